"""A user's script, run until its first window is complete, and proven there."""

from __future__ import annotations

import runpy
import shutil
import tempfile
from pathlib import Path

from prepkit.auditing.script import ScriptEnded, as_main, told
from prepkit.facts.proof import ProofFacts
from prepkit.proving.proof import Proof, found_in, prove_records
from prepkit.proving.record_file import write
from prepkit.proving.recorder import Recorder, TooLarge
from prepkit.ranks.world import world


class WindowDone(BaseException):
    """Ends the script behind its first window; no ``except Exception`` of the script holds it up."""


def prove_script(script: str, arguments: tuple[str, ...] = (), keep: str | None = None) -> Proof | None:
    """The proof of a script's first window, on every rank; None where no optimizer steps a model that was called.

    The script runs as ``python script arguments`` would run it, on every rank that a launcher has started, until
    all that trains was stepped, or the next window begins. Rank 0 replays while the others wait.
    ``keep``: a folder that the record is left in, with what each module and operator has computed, for ``bisect``.
    Raises ``ScriptEnded`` for what the script itself raises before that.
    """

    def end() -> None:
        raise WindowDone

    recorder = Recorder(when_done=end, traces=keep is not None)
    with recorder.on():
        try:
            with as_main(script, arguments):
                runpy.run_path(script, run_name="__main__")
        except WindowDone:
            pass
        except TooLarge as error:
            return _unproven(str(error))
        except SystemExit as left:
            if left.code:
                raise ScriptEnded(f"{script} left with exit code {left.code} before its first step") from left
        except Exception as error:
            raise ScriptEnded(told(script, error)) from error
    stepped = recorder.root is not None and bool(recorder.stepped)
    return _together(recorder, stepped, keep)


def _together(recorder: Recorder, stepped: bool, keep: str | None) -> Proof | None:
    """Rank 0's proof on every rank. Collective where there are several."""
    every = world().gather(stepped)
    if not any(every):
        return None
    if not all(every):
        ranks = ", ".join(str(rank) for rank, one in enumerate(every) if not one)
        return _unproven(f"rank {ranks} had stepped nothing when the others were done")
    made = keep or (tempfile.mkdtemp(prefix="prepkit-proof-") if world().is_first else "")
    folder = Path(world().from_first(made))
    try:
        write(recorder.record(), folder)
        world().meet()
        assert recorder.root is not None
        proof = prove_records(recorder.root, folder) if world().is_first else None
        return world().from_first(proof)
    finally:
        if world().is_first and keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _unproven(why: str) -> Proof:
    facts = ProofFacts(world=world().size, shares=(), unproven=why)
    return found_in(facts)
