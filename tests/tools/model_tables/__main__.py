"""``python -m tests.tools.model_tables [TYPE ...]``: probe transformers and write ``prepkit/formats/models/data``.

Each table is tried on models at unseen sizes; one that does not give their facts exactly is not written.
``--check [DRAWS]`` draws again for every table that is there, and writes nothing. ``--needs`` asks anew which sizes of
a config have to divide which, for every table that is there. ``--all-classes``: four of a type in the place of one.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.tools.model_tables.draws import Drawer
from tests.tools.model_tables.fit import Unsolved
from tests.tools.model_tables.needs import needs
from tests.tools.model_tables.solve import common, difference, outside, solved

DATA = Path(__file__).resolve().parents[3] / "prepkit" / "formats" / "models" / "data"

COMMON = DATA / "common.json"
"""Activations, and classes of torch and of others that many types share."""

WIDTH, TREE = 120, 3
"""Characters of a line of a table, and how deep the lists are of which each item has its own line."""

SECONDS = 120
"""Of this process' own time for one class, at most: others may be at work on the machine."""

TASKS: tuple[Mapping[str, Any], ...] = (
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_MAPPING_NAMES,
)
"""Tables of the library from a model type to its classes; the first that has a type is what its checkpoints are."""

MOST_USED = (
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "phi"),
    *("phi3", "gpt_neox", "bert", "roberta", "t5", "vit", "clip", "whisper", "deepseek_v3", "deepseek_v2", "qwen2_moe"),
    *("olmo", "olmo2", "olmoe", "falcon", "bloom", "opt", "mpt", "granite", "granitemoe", "cohere", "cohere2"),
    *("starcoder2", "smollm3", "distilbert", "albert", "electra", "deberta-v2", "modernbert", "gpt_oss", "llama4_text"),
)
"""Types that are made first."""


def classes(kind: str, most: int) -> list[str]:
    """Names of the classes of a model type, the one that is trained most first."""
    tasks = [task for task in TASKS if kind in task]
    if FIRST.get(kind):
        tasks = [FIRST[kind], *tasks]
    found: list[str] = []
    for task in tasks:
        names = task[kind]
        found += [name for name in ((names,) if isinstance(names, str) else names) if name not in found]
    return found[:most]


FIRST: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(("clip", "siglip", "siglip2"), modeling_auto.MODEL_MAPPING_NAMES),
}
"""Types whose checkpoints on the hub are mostly of another task than the first below."""


def main(kinds: list[str], most: int) -> None:
    """Write the tables of these types, or of all."""
    for noisy in ("transformers", "torchao"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    DATA.mkdir(exist_ok=True)
    shared: dict[str, Any] = json.loads(COMMON.read_text()) if COMMON.exists() else {"classes": {}}
    shared |= {"activations": common()["activations"], "classes": shared["classes"] | common()["classes"]}
    every = [*MOST_USED, *(kind for kind in CONFIG_MAPPING if kind not in MOST_USED)]
    for kind in kinds or every:
        file = DATA / f"{kind}.json"
        held: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"classes": {}, "models": {}}
        for name in classes(kind, most):
            if name in held["models"]:
                continue
            begun = time.monotonic()
            signal.signal(signal.SIGPROF, _too_long)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                table = solved(CONFIG_MAPPING[kind], getattr(transformers, name))
                _add(table["model"].pop("classes"), held, shared["classes"])
            except Exception as error:  # printed: the other tables are made all the same
                print(f"- {kind} {name}: {type(error).__name__}: {error!s:.300}", flush=True)
                continue
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            held.setdefault("config", table["config"])
            entry = table["model"] | {"fixed": table["fixed"], "needs": _needs(kind, name)}
            held["models"][name] = entry if table["config"] == held["config"] else entry | {"config": table["config"]}
            file.write_text(text(held))
            COMMON.write_text(text(shared))
            print(f"+ {kind} {name}: {time.monotonic() - begun:.0f} s, {file.stat().st_size:,} bytes", flush=True)


def check(kinds: list[str], draws: int) -> int:
    """Number of tables that do not give the facts of the usual model and of newly drawn ones."""
    wrong = 0
    shared = json.loads(COMMON.read_text())
    for file in sorted(DATA.glob("*.json")):
        if file == COMMON or (kinds and file.stem not in kinds):
            continue
        held = json.loads(file.read_text())
        for name, model in held["models"].items():
            drawer = Drawer(CONFIG_MAPPING[file.stem], getattr(transformers, name), seed=random.randrange(2**30))
            whole = model | {"module": held["module"], "classes": {**shared["classes"], **held["classes"]}}
            table = {"config": model.get("config", held["config"]), "model": whole}
            probes = chain(drawer.usual(), (drawer.probe() for _ in range(draws)))
            found = next((why for one in probes if not outside(model, one.raw) and (why := difference(table, one))), "")
            wrong += bool(found)
            print(f"{'- ' if found else '+ '}{file.stem} {name} {found:.300}", flush=True)
    return wrong


def ask_needs(kinds: list[str]) -> None:
    """Write into every table, or those of these types, what its models need of their sizes."""
    for file in sorted(DATA.glob("*.json")):
        if file == COMMON or (kinds and file.stem not in kinds):
            continue
        held = json.loads(file.read_text())
        for name, model in held["models"].items():
            model["needs"] = _needs(file.stem, name)
            print(f"{file.stem} {name}: {', '.join(model['needs'])}", flush=True)
        file.write_text(text(held))


def _needs(kind: str, name: str) -> list[str]:
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return needs(CONFIG_MAPPING[kind], getattr(transformers, name))
    except TimeoutError as error:
        print(f"- {kind} {name}: {error}", flush=True)
        return []
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"it takes longer than {SECONDS} s")


def _add(classes: dict[str, Any], held: dict[str, Any], shared: dict[str, Any]) -> None:
    """Put classes where they belong: transformers' own with their type, all others with what types share."""
    own = {name: fact for name, fact in classes.items() if fact["module"].startswith("transformers.models.")}
    held.setdefault("module", Counter(fact["module"] for fact in own.values()).most_common(1)[0][0])
    for name, fact in classes.items():
        place = held["classes"] if name in own else shared
        usual = {"module": held["module"] if name in own else ""}
        short = {key: value for key, value in fact.items() if usual.get(key) != value}
        if place.setdefault(name, short) != short:
            raise Unsolved(f"two classes are called {name}")


def text(data: Any, depth: int = 0) -> str:
    """JSON with a line for each entry that is more than a word or two, so that a change shows."""
    short = json.dumps(data)
    if not isinstance(data, dict | list) or len(short) + depth <= WIDTH:
        return short if depth else short + "\n"
    pairs = data.items() if isinstance(data, dict) else ((None, value) for value in data)
    parts = [("" if name is None else f"{json.dumps(name)}: ") + text(value, depth + 1) for name, value in pairs]
    lines = [""]
    for place, part in enumerate(parts):
        ended = part + ("" if place == len(parts) - 1 else ",")
        tree = isinstance(data, list) and depth == TREE
        if lines[-1] and not tree and "\n" not in lines[-1] + part and len(lines[-1]) + len(ended) + depth < WIDTH:
            lines[-1] += " " + ended
        else:
            lines.append(ended)
    begin, end = "{}" if isinstance(data, dict) else "[]"
    inside = "".join("\n" + " " * (depth + 1) + line for line in lines if line)
    return begin + inside + "\n" + " " * depth + end + ("" if depth else "\n")


if __name__ == "__main__":
    if unknown := {one for one in sys.argv[1:] if one.startswith("-")} - {"--check", "--needs", "--all-classes"}:
        sys.exit(f"{', '.join(sorted(unknown))}?\n{__doc__}")
    arguments = [one for one in sys.argv[1:] if not one.startswith("-")]
    if "--check" in sys.argv:
        draws = [int(one) for one in arguments if one.isdecimal()]
        sys.exit(1 if check([one for one in arguments if not one.isdecimal()], draws[0] if draws else 20) else 0)
    if "--needs" in sys.argv:
        ask_needs(arguments)
        sys.exit(0)
    main(arguments, 4 if "--all-classes" in sys.argv else 1)
