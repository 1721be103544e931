"""A model without values is filled under every engine: bytes exact, and the training that of the full model."""

from __future__ import annotations

from pathlib import Path

import pytest

import prepkit as pk
from tests.support.filled_models import FROM, filled
from tests.support.gang import Gang
from tests.support.meta_models import saved

FLOAT8 = pk.FP8(backend=pk.fp8.TorchAO(emulate=True))


def found(gang: Gang, folder: Path, cfg: pk.Config, family: str, *, readers: int = 2) -> list[dict[str, float]]:
    path = saved(folder, family)
    return gang.run(every, cfg, family, path, readers, timeout=120)


def every(rank: int, world: int, cfg: pk.Config, family: str, path: str, readers: int) -> dict[str, float]:
    """The largest difference of each kind, over all sources of values that the engine takes."""
    runs = [filled(rank, world, cfg, family, source, path, readers) for source in FROM]
    return {key: max(run[key] for run in runs) for key in runs[0]}


@pytest.mark.parametrize("family", ["llama-tied"])
def test_layers_cut_over_ranks_get_their_parts(gang2: Gang, tmp_path: Path, family: str) -> None:
    cfg = pk.Config(engine=pk.TensorParallel(), tp_plan=pk.tp.TPPlanFromModel())
    for rank in found(gang2, tmp_path, cfg, family, readers=1):
        assert rank["values"] == 0
        assert max(rank["loss"], rank["step"]) < 1e-6


@pytest.mark.parametrize(
    ("engine", "family"), [(pk.FSDP1(), "llama-tied"), (pk.FSDP1(use_orig_params=False), "mixtral")]
)
def test_flat_parameters_get_the_elements_that_a_rank_holds(
    gang2: Gang, tmp_path: Path, engine: pk.FSDP1, family: str
) -> None:
    for rank in found(gang2, tmp_path, pk.Config(engine=engine), family):
        assert rank["values"] == 0
        assert max(rank["loss"], rank["step"]) < 2e-6


@pytest.mark.parametrize("engine", [pk.FSDP2(), pk.DDP(), pk.FSDP1()])
def test_layers_that_multiply_in_float8_keep_the_values_as_they_are(
    gang2: Gang, tmp_path: Path, engine: pk.Engine
) -> None:
    for rank in found(gang2, tmp_path, pk.Config(engine=engine, precision=FLOAT8), "llama"):
        assert rank["values"] == 0
        assert max(rank["loss"], rank["step"]) < 2e-3, "of float8's own rounding"
