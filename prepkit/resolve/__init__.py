"""What a config *means* for these facts: mesh, units, dtypes, placements, the checkpoint match.

Arithmetic on config and facts that rules, planner and predictions share, so that what is checked is what is planned.
"""
