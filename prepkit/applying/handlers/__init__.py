"""How each kind of step is done. A handler reads its step and the target, and nothing else."""
