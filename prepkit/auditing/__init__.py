"""What is wrong with a model that something else has prepared, which config it is, and what has changed since."""
