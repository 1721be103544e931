"""The prepared objects in a loop: forward, backward, step, evaluation, averages, logs."""
