"""A live model read and reached: canonical names, tensors with their layouts, wrappers, its forward."""
