"""After apply: does what stands there match the plan? One file per part of what is looked at."""
