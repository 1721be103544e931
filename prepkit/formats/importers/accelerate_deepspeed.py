"""The ``deepspeed_config`` section of accelerate's file, and the JSON that it points to (behaviour DP-1 to DP-12)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

from attrs import evolve

from prepkit.config import ClipNorm, Config, DeepSpeed
from prepkit.findings import PlanRejected
from prepkit.formats.importers.deepspeed import read_deepspeed
from prepkit.formats.importers.foreign import Foreign
from prepkit.formats.importers.source import JSON, read
from prepkit.resolve.deepspeed.keys import SECTIONS

_HERE = "deepspeed_config."
_DEVICES = ("none", "cpu", "nvme")
_LAUNCHING = (
    *("deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter"),
    *("deepspeed_inclusion_filter", "zero3_save_16bit_model"),
)
_BESIDE_A_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
)
"""Keys that accelerate refuses beside a JSON file (DP-5)."""
Device = Literal["none", "cpu", "nvme"]


def deepspeed(file: Foreign, config: Config, path: Path) -> Config:
    """The config with DeepSpeed as its engine."""
    config = _engine(file, config, path)
    _say_whose(file)
    return config


def _say_whose(file: Foreign) -> None:
    """Keys that accelerate's launcher does not read here, and DeepSpeed's own file has."""
    known = file.known()
    for key in file.section("deepspeed_config"):
        homes = [f"{path}.{key}".strip(".") for path, keys in SECTIONS.items() if key in keys]
        if homes and f"{_HERE}{key}" not in known:
            what = "accelerate's launcher reads no such key here; DeepSpeed's own file does"
            home = next((home for home in homes if home.startswith("zero_optimization.")), homes[0])
            fix = f"Write {home} into a DeepSpeed JSON, and that file's path as deepspeed_config_file."
            file.error("unknown-key", f"{_HERE}{key}", what, fix)


def _engine(file: Foreign, config: Config, path: Path) -> Config:
    file.section("deepspeed_config")
    file.launching(*(f"{_HERE}{name}" for name in _LAUNCHING))
    experts = file.names(f"{_HERE}deepspeed_moe_layer_cls_names", "engine.leaf_modules") or ()
    stage = file.whole(f"{_HERE}zero_stage", "engine.stage")
    init = file.flag(f"{_HERE}zero3_init_flag")
    if init and (stage == 3 or file.has(f"{_HERE}deepspeed_config_file")):
        file.launching(f"{_HERE}zero3_init_flag")  # how the model is built; one on meta is filled by config.weights
    json_file = file.text(f"{_HERE}deepspeed_config_file", "engine.config")
    if json_file is not None:
        return _from_file(file, config, path, json_file, experts)
    if init and stage != 3:
        file.without_effect(f"{_HERE}zero3_init_flag", f"it is for stage 3, and zero_stage is {stage or 2}")
    engine = DeepSpeed(
        stage=2 if stage is None else stage,
        offload_optimizer=_device(file, "optimizer"),
        offload_param=_device(file, "param"),
        leaf_modules=experts,
        config=_rest(file),
    )
    steps = file.whole(f"{_HERE}gradient_accumulation_steps", "accumulation")
    clip = file.number(f"{_HERE}gradient_clipping", "clip")
    config = evolve(config, engine=engine, accumulation=steps)
    return evolve(config, clip=ClipNorm(clip)) if clip else config


def _device(file: Foreign, what: str) -> Device | None:
    path = f"{_HERE}offload_{what}_nvme_path"
    if file.text(path) not in (None, "none"):
        file.raw(path, "engine.config")
    word = file.word(f"{_HERE}offload_{what}_device", _DEVICES, f"engine.offload_{what}")
    return cast("Device | None", word)


def _rest(file: Foreign) -> dict[str, object]:
    """Parts of DeepSpeed's own config that stand in the section itself, and the paths of offload files."""
    data: dict[str, object] = {}
    for name in ("bf16", "fp16", "seq_parallel_communication_data_type"):
        value = file.raw(f"{_HERE}{name}", *(("engine.config",) if file.has(f"{_HERE}{name}") else ()))
        if value is not None:
            why = "accelerate's launcher reads no such key here; DeepSpeed's own file does"
            file.without_effect(f"{_HERE}{name}", why, "Write it into the deepspeed_config_file.")
    zero = {}
    for what in ("optimizer", "param"):
        place = file.raw(f"{_HERE}offload_{what}_nvme_path")
        if isinstance(place, str) and place != "none":
            zero[f"offload_{what}"] = {"device": "nvme", "nvme_path": place}
    return data | ({"zero_optimization": zero} if zero else {})


def _from_file(file: Foreign, config: Config, path: Path, name: str, experts: tuple[str, ...]) -> Config:
    for key in _BESIDE_A_FILE:
        if file.has(f"{_HERE}{key}"):
            what = "accelerate refuses it beside deepspeed_config_file"
            file.error("contradiction", f"{_HERE}{key}", what, f"Write it into {name}, and remove it here.")
    places = (Path(name), path.parent / name)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        what = f"there is no file {name}, neither from here nor beside {path.name}"
        file.error("missing-file", f"{_HERE}deepspeed_config_file", what, "Give the path of the JSON file.")
        return config
    try:
        inner = read_deepspeed(read(str(found), JSON))
    except PlanRejected as refused:
        file.findings += refused.findings
        return config
    file.origins += inner.config.origins
    file.findings += inner.notes
    assert isinstance(inner.config.engine, DeepSpeed)
    engine = evolve(inner.config.engine, leaf_modules=experts)
    if file.has("mixed_precision") and "precision" in {o.setting.partition(".")[2] for o in inner.config.origins}:
        what = "accelerate refuses it beside deepspeed_config_file, which says the precision too"
        if type(inner.config.precision) is not type(config.precision):
            file.error("contradiction", "mixed_precision", what, "Remove it, or write the same in both.")
    precision = inner.config.precision if not file.has("mixed_precision") else config.precision
    return evolve(
        config,
        engine=engine,
        precision=precision,
        accumulation=inner.config.accumulation,
        global_batch=inner.config.global_batch,
        clip=inner.config.clip,
    )
