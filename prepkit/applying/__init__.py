"""Does what a plan says to live objects, on all ranks or on none, and verifies the outcome."""
