"""Data loaders as they are handed out: divided over ranks, on the device, at a position that can be saved."""
