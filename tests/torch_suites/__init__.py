"""What comes with torch for testing torch, here as judge of prepkit: its modules, and its optimizers."""
