"""What the examples take on the command line: a folder for what they write, an engine, and how long they train."""

from __future__ import annotations

import argparse

from attrs import evolve

import prepkit as pk


def options(folder: str, steps: int) -> argparse.Namespace:
    """``--folder``, ``--config`` with the engine, ``--steps``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default=folder, help="for checkpoints, the log and its plot")
    parser.add_argument(
        "--config", help="TOML file with the engine, such as examples/engines/ddp.toml; else one process"
    )
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    return parser.parse_args()


def config(args: argparse.Namespace, **changes: object) -> pk.Config:
    """The config of the command line, with what the example needs besides."""
    return evolve(pk.read_config(args.config) if args.config else pk.Config(), **changes)
