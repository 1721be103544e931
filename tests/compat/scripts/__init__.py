"""accelerate's own scripts, run through prepkit's face of it: which checks there are, how they run, what comes out."""
