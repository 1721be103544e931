"""Inputs of the formulas where nothing is special: a run in one process that trains, without parameters."""

from __future__ import annotations

from typing import Any

from prepkit.predict.inputs import Inputs


def plain_inputs(engine: str, **more: Any) -> Inputs:
    """The inputs with these fields in the place of the plain ones."""
    plain: dict[str, Any] = {
        "world_size": 1,
        "mesh": (),
        "contents": (),
        "units": (),
        "buffers": 0,
        "trains": True,
        "optimizer": None,
        "accumulation": 1,
        "average_each": False,
        "torch": "2.13.0",
        "deepspeed": "0.19.8",
        "device": "cpu",
        "per_node": None,
        "gathered_size": None,
        "reduced_size": None,
        "autocast_size": None,
        "offload": False,
        "wraps": None,
        "left_out": (),
        "uneven": False,
        "whole": (),
        "loaded": 0,
        "sent": False,
        "narrower": False,
        "original": True,
        "zero": None,
        "upcast_frozen": 0,
        "splits_units": False,
    }
    return Inputs(engine=engine, **plain | more)
