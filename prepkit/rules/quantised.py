"""Models that were loaded in 4 or 8 bits: where their packed weights may lie."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prepkit.facts import Facts
from prepkit.findings.text import at, count, some
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule

_LOCAL = "local"
_MULTI_BACKEND = (0, 46)
"""bitsandbytes from which the CPU and other accelerators are backends (its ``features`` say ``multi_backend``)."""


def _devices(facts: Facts) -> tuple[str, ...]:
    """Devices of a quantised model's map; none where it is not quantised, or has no map."""
    return tuple(dict.fromkeys(device for _, device in facts.model.device_map)) if facts.model.quantised else ()


def _multi_backend(facts: Facts) -> bool:
    """Whether bitsandbytes computes on more than CUDA; an environment that does not name its version is trusted."""
    match = re.match(r"(\d+)\.(\d+)", dict(facts.env.libraries).get("bitsandbytes", "999.0"))
    return match is not None and (int(match.group(1)), int(match.group(2))) >= _MULTI_BACKEND


def _spread(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    devices = _devices(facts)
    # Without keep_device_map the rule about device maps refuses it already.
    if len(devices) > 1 and cfg.keep_device_map and not resolved.one_process:
        what = f"The {facts.model.quantised} model lies on {some(devices)}, and {type(cfg.engine).__name__} trains it"
        yield Hit("model.hf_device_map", f"{what} in each of {facts.env.world_size} processes.")


def _other_device(resolved: Resolved) -> Iterator[Hit]:
    devices, here = _devices(resolved.facts), resolved.compute_device
    if len(devices) != 1 or devices[0] in ("cpu", "disk"):
        return
    kind, _, index = devices[0].rpartition(":")
    if index == _LOCAL and here != "cpu" and kind in ("", here):
        return
    what = f"The {resolved.facts.model.quantised} weights lie on {devices[0]}, but this process computes on {here}"
    yield Hit("model.hf_device_map", what + (" at its local rank." if here != "cpu" else "."))


def _on_cpu(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if "cpu" not in _devices(facts):
        return
    kept = f"The {facts.model.quantised} model keeps weights on the CPU"
    if facts.env.device == "xpu":
        yield Hit("model.hf_device_map", f"{kept}, and bitsandbytes computes on the XPU that is here.")
    elif not _multi_backend(facts):
        version = dict(facts.env.libraries)["bitsandbytes"]
        yield Hit("model.hf_device_map", f"{kept}, where bitsandbytes {version} cannot compute.")
    elif _devices(facts) == ("cpu",) and resolved.compute_device != "cpu":
        yield Hit("model.hf_device_map", f"{kept}, but this process computes on {resolved.compute_device}.")


def _on_disk(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if "disk" in _devices(facts):
        yield Hit(
            "model.hf_device_map", f"The {facts.model.quantised} model keeps weights on disk, without a gradient."
        )


def _unpacked(resolved: Resolved) -> Iterator[Hit]:
    names = [
        param.name
        for param in resolved.facts.model.params
        if not param.requires_grad
        and (
            (param.cls == "Params4bit" and len(param.shape) == 2 and param.shape[1] != 1)
            or (param.cls == "Int8Params" and param.dtype != "int8")
        )
    ]
    if names:
        what = f"{count(len(names), 'parameter')} would change shape or dtype when moved: {some(names)}."
        yield Hit(at(names[0]), what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="quantised.spread",
        summary="A quantised model of several processes lies on one device in each.",
        check=_spread,
        fix='Load it with device_map={"": local_rank}, or run one process with engine=Single().',
        source=("Q-1", "Q-2", "DM-2"),
    ),
    Rule(
        id="quantised.other-device",
        summary="A quantised model lies on the device that its process computes on.",
        check=_other_device,
        fix='Load it with device_map={"": local_rank}: quantised weights are not moved.',
        source=("Q-3", "Q-5", "Q-6", "Q-7", "Q-8", "G-26"),
    ),
    Rule(
        id="quantised.on-cpu",
        summary="Quantised weights are on the CPU only where that is what computes.",
        check=_on_cpu,
        fix='Load the whole model on the accelerator: device_map={"": local_rank}; or install bitsandbytes>=0.46 and '
        'write device="cpu".',
        source=("Q-4", "Q-9", "Q-10", "Q-12", "G-26"),
    ),
    Rule(
        id="quantised.on-disk",
        summary="No quantised weights are on disk.",
        check=_on_disk,
        fix='Load the whole model into memory: device_map={"": local_rank}.',
        source=("Q-11", "Q-3", "G-26"),
    ),
    Rule(
        id="quantised.not-packed",
        summary="The weights of 4-bit and 8-bit layers are packed before planning.",
        check=_unpacked,
        fix="Call model.to(device) before build_plan: bitsandbytes packs weights when they are first moved.",
        source=("bitsandbytes Params4bit.to", "bitsandbytes Int8Params.to"),
    ),
)
"""Reporting order: on how many devices, on which, in which form."""
