"""How many ranks an FSDP2 unit is resharded to after its forward."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import FSDP2, Config
from prepkit.facts import Facts
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


def _reshard(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if not isinstance(cfg.engine, FSDP2) or isinstance(cfg.engine.reshard_after_forward, bool):
        return
    size, shards = cfg.engine.reshard_after_forward, resolved.axis_size("shard") if resolved.mesh else None
    if shards is None or (1 < size < shards and shards % size == 0):
        return
    where = "config.engine.reshard_after_forward"
    if size == 1:
        yield Hit(where, "1 as a number keeps everything gathered.", "Write reshard_after_forward=False.")
    elif size == shards:
        yield Hit(where, f"{size} is the shard size itself.", "Write reshard_after_forward=True.")
    else:
        legal = [str(number) for number in range(2, shards) if shards % number == 0]
        fix = f"Write True, False or {' or '.join(legal[:4])}." if legal else "Write True or False."
        yield Hit(where, f"{size} does not divide the shard size {shards}.", fix)


def mend_reshard(cfg: Config, facts: Facts) -> Config:
    """The config with a ``reshard_after_forward`` that its mesh allows."""
    if not isinstance(cfg.engine, FSDP2) or not any(_reshard(Resolved(cfg=cfg, facts=facts))):
        return cfg
    return evolve(cfg, engine=evolve(cfg.engine, reshard_after_forward=cfg.engine.reshard_after_forward != 1))


RULES: tuple[Rule, ...] = (
    Rule(
        id="reshard.not-a-factor",
        summary="A number in reshard_after_forward divides the shard size, and is neither 1 nor the size itself.",
        check=_reshard,
        fix="Write True, False or a number between 1 and the shard size that divides it.",
        source=("torch _get_post_forward_mesh_info", "G-12"),
        repair=mend_reshard,
    ),
)
"""One rule: torch reads 1 as False and the shard size as True, and refuses what does not divide."""
