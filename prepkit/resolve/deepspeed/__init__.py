"""The DeepSpeed config as a value: read, checked, worked out whole. DeepSpeed itself is not imported."""
