"""Several processes as one: launched, in groups, agreed on the plan, all going on or none."""
