"""``python -m prepkit`` is the command line."""

from __future__ import annotations

from prepkit.cli import main

if __name__ == "__main__":  # a rehearsal's process imports this module again
    main(prog_name="prepkit")
