"""How many golden files a small change of the source changes: ``python -m tests.tools.golden_changes [name ...]``.

Each change is made in a copy of the working tree, where all golden texts are then written anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[2]


@frozen(kw_only=True)
class Change:
    """One edit, and how many golden files it may change at most."""

    file: str
    before: str
    after: str
    most: int


CHANGES: dict[str, Change] = {
    "unused field": Change(
        file="prepkit/config/__init__.py",
        before="    average_each: bool = False\n",
        after='    quiet: bool = False\n    """Nothing reads it."""\n    average_each: bool = False\n',
        most=0,
    ),
    "memory.may-exceed-device": Change(
        file="prepkit/rules/memory.py", before='activations aside"\n', after='without activations"\n', most=2
    ),
    "optimizer.none": Change(
        file="prepkit/rules/optimizer.py", before="intent is training, but no", after="for training, no", most=2
    ),
    "mesh.not-world-size": Change(
        file="prepkit/rules/mesh.py",
        before=", but the world size is {world}.",
        after=" for a world of {world}.",
        most=2,
    ),
}
"""Name to the change."""
TESTS = (
    *("tests/audit/test_rules.py", "tests/codec/test_every_field.py", "tests/planner/test_readable_plans.py"),
    *(
        "tests/planner/test_settings.py",
        "tests/predict/test_drawn_inputs.py",
        "tests/render",
        "tests/rules/test_rules.py",
    ),
    *("tests/rules/test_neighbours.py", "tests/resolve/test_resolved.py", "tests/resolve/deepspeed/test_every_key.py"),
)
"""All that write golden texts."""


def edited(change: Change, root: Path) -> None:
    """Make the change in the file below this folder. Raises ``LookupError`` where its text is not there."""
    path = root / change.file
    text = path.read_text()
    if change.before not in text:
        raise LookupError(f"{change.file} has no {change.before!r}: write in CHANGES what it has now")
    path.write_text(text.replace(change.before, change.after))


def changed(change: Change) -> tuple[str, ...]:
    """Golden files that differ after the change, once all are written anew; takes minutes."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        edited(change, copy)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        environment = {**os.environ, "PYTHONPATH": str(copy), "WRITE_GOLDEN": "1"}
        subprocess.run(command, cwd=copy, env=environment, check=False, stdout=subprocess.DEVNULL)
        return tuple(different(ROOT, copy))


def different(before: Path, after: Path) -> Iterator[str]:
    """Golden files that are in one of two trees only, or are not the same in both."""
    trees = [
        {path.relative_to(root): path for path in root.glob("tests/**/golden/**/*.txt")} for root in (before, after)
    ]
    for name in sorted({*trees[0], *trees[1]}):
        texts = [tree[name].read_bytes() if name in tree else None for tree in trees]
        if texts[0] != texts[1]:
            yield str(name)


def main() -> int:
    """Print each change with the files that it changes; 1 where one changes too many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CHANGES))
    too_many = 0
    for name in parser.parse_args().names:
        files = changed(CHANGES[name])
        too_many += len(files) > CHANGES[name].most
        print(f"{name}: {len(files)} of at most {CHANGES[name].most}", *files, sep="\n  ", flush=True)
    return int(too_many > 0)


if __name__ == "__main__":
    sys.exit(main())
