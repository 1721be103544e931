"""``python -m tests.tools.model_tables [TYPE ...]``: probe transformers and write ``prepkit/formats/models/data``.

Each table is tried on models at unseen sizes; one that does not give their facts exactly is not written.
``--check`` draws again for every table that is there, and writes nothing.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.tools.model_tables.draws import Drawer
from tests.tools.model_tables.solve import activations, difference, solved

DATA = Path(__file__).resolve().parents[3] / "prepkit" / "formats" / "models" / "data"

SECONDS = 120
"""For one class, at most."""

TASKS: tuple[Mapping[str, Any], ...] = (
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
    **dict.fromkeys(("clip", "siglip", "siglip2"), TASKS[6]),
}
"""Types whose checkpoints on the hub are mostly of another task than the first below."""


def main(kinds: list[str], most: int) -> None:
    """Write the tables of these types, or of all."""
    for noisy in ("transformers", "torchao"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    DATA.mkdir(exist_ok=True)
    (DATA / "activations.json").write_text(_text(activations()))
    every = [*MOST_USED, *(kind for kind in CONFIG_MAPPING if kind not in MOST_USED)]
    for kind in kinds or every:
        file = DATA / f"{kind}.json"
        held: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"models": {}}
        for name in classes(kind, most):
            if name in held["models"]:
                continue
            begun = time.monotonic()
            signal.signal(signal.SIGALRM, _too_long)
            signal.alarm(SECONDS)
            try:
                table = solved(CONFIG_MAPPING[kind], getattr(transformers, name))
            except Exception as error:  # printed: the other tables are made all the same
                print(f"- {kind} {name}: {type(error).__name__}: {error!s:.300}", flush=True)
                continue
            finally:
                signal.alarm(0)
            held.setdefault("config", table["config"])
            entry = table["model"] | {"fixed": table["fixed"]}
            held["models"][name] = entry if table["config"] == held["config"] else entry | {"config": table["config"]}
            file.write_text(_text(held))
            print(f"+ {kind} {name}: {time.monotonic() - begun:.0f} s, {file.stat().st_size:,} bytes", flush=True)


def check(kinds: list[str], draws: int = 20) -> int:
    """Number of tables that do not give the facts of newly drawn models."""
    wrong = 0
    for file in sorted(DATA.glob("*.json")):
        if file.stem == "activations" or (kinds and file.stem not in kinds):
            continue
        held = json.loads(file.read_text())
        for name, model in held["models"].items():
            drawer = Drawer(CONFIG_MAPPING[file.stem], getattr(transformers, name), seed=random.randrange(2**30))
            table = {"config": model.get("config", held["config"]), "model": model}
            found = next((why for _ in range(draws) if (why := difference(table, drawer.probe()))), "")
            wrong += bool(found)
            print(f"{'- ' if found else '+ '}{file.stem} {name} {found:.300}", flush=True)
    return wrong


def _too_long(*_: object) -> None:
    raise TimeoutError(f"it takes longer than {SECONDS} s")


def _text(data: Any) -> str:
    """JSON with a line for each entry, so that a change shows."""
    return json.dumps(data, separators=(",", ":"), sort_keys=False) + "\n"


if __name__ == "__main__":
    arguments = [one for one in sys.argv[1:] if not one.startswith("-")]
    if "--check" in sys.argv:
        sys.exit(1 if check(arguments) else 0)
    main(arguments, 4 if "--all-classes" in sys.argv else 1)
