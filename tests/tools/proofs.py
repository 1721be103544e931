"""Both tables of the proof by replay: planted errors and what is told of them, right programs and what is not.

``python -m tests.tools.proofs [planted | right] [NAME | LIBRARY | RANKS ...]``: all, or those that a word names;
``cost``: what recording costs. Exit code 1 where an error is missed or a right program is accused.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import torch
from torch import nn

from prepkit.findings import Finding, Severity
from prepkit.proving.proof import Proof, prove_record
from prepkit.proving.recorder import Recorder
from tests.proving.asking import ERRORS_ASKING, RIGHT_ASKING
from tests.proving.by_hand import ERRORS_BY_HAND, RIGHT_BY_HAND
from tests.proving.drawn import DRAWN_ERRORS, DRAWN_RIGHT, RIGHT_OF_FOUR, OfPrepkit
from tests.proving.libraries import BY_LIBRARIES, RIGHT_BY_LIBRARIES, OfLibrary
from tests.proving.right import RIGHT, Right
from tests.proving.sending import ERRORS_SENDING, RIGHT_SENDING
from tests.proving.unseen import UNSEEN
from tests.proving.unusual import ERRORS_UNUSUAL, RIGHT_UNUSUAL
from tests.proving.window import proved
from tests.proving.wrong import ERRORS, Planted
from tests.support.gang import Gang, GangError, gang_of

MORE_ERRORS = (*UNSEEN, *ERRORS_UNUSUAL, *ERRORS_BY_HAND, *ERRORS_ASKING, *ERRORS_SENDING, *DRAWN_ERRORS, *BY_LIBRARIES)
ALL_ERRORS = (*ERRORS, *(Planted(*one) for one in MORE_ERRORS))
MORE_RIGHT = (*((one, 2) for one in DRAWN_RIGHT), *((one, 4) for one in RIGHT_OF_FOUR), *RIGHT_BY_LIBRARIES)
ALL_RIGHT = (
    *RIGHT,
    *map(Right, (*RIGHT_UNUSUAL, *RIGHT_BY_HAND, *RIGHT_ASKING, *RIGHT_SENDING)),
    *(Right(*one) for one in MORE_RIGHT),
)


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


def library(program: Planted | Right) -> str:
    """Who has prepared the model."""
    made = program.make
    if isinstance(made, OfPrepkit | OfLibrary):
        return "prepkit" if isinstance(made, OfPrepkit) else made.library
    return "prepkit" if program.id.startswith("prepkit") else "torch"


def tried(program: Planted | Right, gang: Gang, folder: str) -> tuple[bool, str]:
    """Whether what is told is right, and what it is."""
    try:
        found = told(gang.run(proved, program.make, folder, timeout=180.0)[0])
    except GangError as error:
        lines = [line for line in str(error).splitlines() if "Error" in line or "prepkit/" in line]
        return False, " ".join(" ".join(lines[-6:]).split())
    return holds(program, found), "; ".join(f"{f.rule}: {f.what}" for f in found)


def counted(title: str, done: list[tuple[Planted | Right, bool]]) -> str:
    """How many of each library and number of ranks were as they should be."""
    rows = [f"| {title} by | ranks | programs | as it should be |", "|---|--:|--:|--:|"]
    kinds = sorted({(library(one), one.ranks) for one, _ in done})
    for kind in kinds:
        good = [good for one, good in done if (library(one), one.ranks) == kind]
        rows.append(f"| {kind[0]} | {kind[1]} | {len(good)} | {sum(good)} |")
    return "\n".join((*rows, f"| all | | {len(done)} | {sum(good for _, good in done)} |"))


def main(names: list[str]) -> int:
    """Prints a line for each program, and how many there were."""
    if names == ["cost"]:
        return cost()
    bad = 0
    for title, every in (("planted errors", ALL_ERRORS), ("right programs", ALL_RIGHT)):
        words = set(names) - {"planted", "right"}
        if title.split()[0] not in names and set(names) & {"planted", "right"}:
            continue
        there = [one for one in every if find_spec(getattr(one.make, "needs", "") or "torch") is not None]
        chosen = [one for one in there if not words or {one.id, library(one), str(one.ranks)} & words]
        print(f"| {title} | ranks | as it should be | told |\n|---|--:|---|---|", flush=True)
        done: list[tuple[Planted | Right, bool]] = []
        for ranks in sorted({one.ranks for one in chosen}):
            with gang_of(ranks) as gang, TemporaryDirectory() as folder:
                for at, one in enumerate(one for one in chosen if one.ranks == ranks):
                    good, said = tried(one, gang, f"{folder}/{at}")
                    done.append((one, good))
                    print(f"| {one.id} | {ranks} | {'yes' if good else 'NO'} | {said[:700]} |", flush=True)
        bad += sum(not good for _, good in done)
        print(f"\n{counted(title, done)}\n", flush=True)
        if len(there) < len(every):
            print(f"{len(every) - len(there)} {title} left out: their libraries are not here\n", flush=True)
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
