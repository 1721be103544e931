"""Facts of a model from a folder's ``config.json`` and headers: no torch, no weights, no code of the model."""
