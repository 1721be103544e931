"""What accelerate does with a file and a model, and what prepkit does with the same, beside each other."""
