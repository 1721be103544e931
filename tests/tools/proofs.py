"""Both tables of the proof by replay: planted errors and what is told of them, right programs and what is not.

``python -m tests.tools.proofs [drawn] [NAME ...]``; ``drawn``: the products of engines alone, ``cost``:
what recording costs. Exit code 1 where an error is missed or a right program is accused.
"""

from __future__ import annotations

import sys
import time
from tempfile import TemporaryDirectory

import torch
from torch import nn

from prepkit.findings import Finding, Severity
from prepkit.proving.proof import Proof, prove_record
from prepkit.proving.recorder import Recorder
from tests.proving.drawn import DRAWN_ERRORS, DRAWN_RIGHT
from tests.proving.right import RIGHT, Right
from tests.proving.window import proved
from tests.proving.wrong import ERRORS, Planted
from tests.support.gang import GangError, gang_of


def told(proof: Proof) -> list[Finding]:
    """What is more than a note."""
    return [finding for finding in proof.findings if finding.severity is not Severity.NOTE]


def holds(program: Planted | Right, found: list[Finding]) -> bool:
    """Whether the cause, and nothing else, is told; of a right program nothing."""
    if isinstance(program, Right):
        return not found
    return {one.rule for one in found} == {program.rule} and any(program.says in one.what for one in found)


def cost() -> int:
    """Prints what a window costs on one process: as it is, recorded, traced too, after it, and its replay."""
    print("| MLP of | as it is | recorded | and traced | the window after | replay | record |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for width, layers in ((256, 8), (1024, 8)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        recorders = Recorder(root=model), Recorder(root=model, traces=True)
        plain = min(_window(model, optimizer, width) for _ in range(5))
        recorded = []
        for recorder in recorders:
            with recorder.on():
                recorded.append(_window(model, optimizer, width))
        after = min(_window(model, optimizer, width) for _ in range(5))
        record = recorders[0].record()
        nbytes = sum(one.nbytes for one in record.tensors.values())
        replay = prove_record(model, (record,)).seconds
        numbers = " | ".join(f"{1000 * one:.0f} ms" for one in (plain, *recorded, after, replay))
        print(f"| {layers} x {width} | {numbers} | {nbytes / 2**20:.0f} MiB |", flush=True)
    return 0


def _window(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> float:
    begun = time.perf_counter()
    for _ in range(4):
        model(torch.randn(64, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begun


def main(names: list[str]) -> int:
    """Prints a line for each program."""
    if names == ["cost"]:
        return cost()
    bad = 0
    drawn = tuple(Planted(program, rule) for program, rule in DRAWN_ERRORS), tuple(map(Right, DRAWN_RIGHT))
    for title, programs, more in (("planted errors", ERRORS, drawn[0]), ("right programs", RIGHT, drawn[1])):
        every = more if "drawn" in names else (*programs, *more)
        kept = [name for name in names if name != "drawn"]
        chosen = [one for one in every if not kept or one.id in kept or title.split()[0] in kept]
        print(f"| {title} | ranks | as it should be | told |\n|---|--:|---|---|", flush=True)
        for ranks in sorted({one.ranks for one in chosen}):
            with gang_of(ranks) as gang, TemporaryDirectory() as folder:
                for one in (one for one in chosen if one.ranks == ranks):
                    try:
                        found = told(gang.run(proved, one.make, f"{folder}/{one.id}")[0])
                        said, good = "; ".join(f"{f.rule}: {f.what}" for f in found), holds(one, found)
                    except GangError as error:
                        lines = [line for line in str(error).splitlines() if "Error" in line or "prepkit/" in line]
                        said, good = " ".join(" ".join(lines[-6:]).split()), False
                    bad += not good
                    print(f"| {one.id} | {ranks} | {'yes' if good else 'NO'} | {said[:700]} |", flush=True)
        print(f"{len(chosen)} {title}\n", flush=True)
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
