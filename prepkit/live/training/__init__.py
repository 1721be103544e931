"""What is used while training: the prepared model's own calls, one driver per engine, saving and resuming."""
