"""``save_state`` and ``load_state``: prepkit's checkpoints, the script's own objects beside them, and its hooks."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch.utils.hooks import RemovableHandle

from prepkit.compat.accelerate.not_offered import NotOffered, in_their_words
from prepkit.compat.accelerate.state import State
from prepkit.facts.loop import Saved
from prepkit.ranks.world import alone
from prepkit.saving.state import of_this_rank, set_positions, set_random_states
from prepkit.training.prepared import Prepared

_NAME = "checkpoint_"


class NotGathered:
    """Stands in the place of a sharded model's weights in a hook of ``save_state``: every rank writes its own part."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotOffered("the weights of a save_state hook", "call accelerator.save_model(model, folder)")

    def __getattr__(self, name: str) -> Any:
        return self.__reduce_ex__(name)

    def __getitem__(self, name: str) -> Any:
        return self.__reduce_ex__(name)


@define
class SavedState:
    """Where a script saves, and what it wants to be told of that."""

    state: State
    project: Any
    """A ``ProjectConfiguration`` of accelerate's, read and counted up; None: folders are given."""
    objects: list[Any] = field(factory=list)
    beside: list[Any] = field(factory=list)
    """Optimizers and schedulers that no plan holds."""
    before_save: OrderedDict[int, Callable[..., Any]] = field(factory=OrderedDict)
    before_load: OrderedDict[int, Callable[..., Any]] = field(factory=OrderedDict)

    def register(self, *objects: Any) -> None:
        """Objects that are saved as well. Raises ``ValueError`` for those that say no state, and registers none."""
        for one in objects:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                name = type(one).__name__
                raise ValueError(f"register_for_checkpointing: a {name} has no state_dict and load_state_dict")
        self.objects += objects

    def hook(self, hooks: OrderedDict[int, Callable[..., Any]], function: Callable[..., Any]) -> RemovableHandle:
        """Registers one; the handle takes it out again."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = function
        return handle

    def save(self, models: tuple[Prepared, ...], output_dir: Any) -> str:
        """The folder that was written. Hooks hear of it before; they get models, weights and the folder.

        Collective where models are sharded or folders are named. Elsewhere the main process writes by itself, as under
        accelerate, since many scripts let nobody else come here; each rank that does writes what it draws by.
        """
        folder = Path(output_dir) if not self._named else self._next()
        folder.mkdir(parents=True, exist_ok=True)
        bare = [ready.unwrap() for ready in models]
        weights = [_weights(ready) for ready in models]
        for hook in self.before_save.values():
            hook(bare, weights, str(folder))
        whole = all(map(_is_whole, models))
        for at, ready in enumerate(models):
            with in_their_words(), alone() if whole else nullcontext():
                if not whole or self.state.is_main_process:
                    ready.save(str(_of_model(folder, at)))
                else:
                    ready.loop.do(Saved())  # which refuses what it refuses on the main process
        if self.state.is_main_process:
            for name, one in self._beside():
                torch.save(one.state_dict(), folder / name)
            self._forget(folder)
        if whole:
            own = {"steps": models[0].steps} | of_this_rank(models[0].loaders)
            torch.save(own, folder / _of_rank(self.state.process_index))
        if self._named or not whole:
            self.state.wait_for_everyone()
        if self._named:
            self.project.iteration += 1
        return str(folder)

    def load(self, models: tuple[Prepared, ...], input_dir: Any) -> None:
        """Goes on from a folder, or from the newest that was named. Collective. Raises ``FileNotFoundError``."""
        if input_dir is None:
            if not (self._named and (found := self._found())):
                raise FileNotFoundError("load_state: name the folder, which save_state has returned")
            input_dir = found[-1]
        for hook in self.before_load.values():
            hook([ready.unwrap() for ready in models], str(input_dir))
        for at, ready in enumerate(models):
            with in_their_words():
                ready.resume(str(_of_model(Path(input_dir), at)))
        for name, one in self._beside():
            one.load_state_dict(torch.load(Path(input_dir) / name, map_location="cpu"))
        if (file := Path(input_dir) / _of_rank(self.state.process_index)).is_file():
            own = torch.load(file, map_location="cpu")
            if own["steps"] == models[0].steps:  # else this rank was not there when the folder was written again
                set_positions(models[0].loaders, own["loaders"], (), same_ranks=True)
                set_random_states(own["random"])

    def _beside(self) -> Iterator[tuple[str, Any]]:
        """Files of what no plan holds, by their names."""
        for at, one in enumerate(self.objects):
            yield f"custom_checkpoint_{at}.pkl", one
        for at, one in enumerate(self.beside):
            yield f"stepped_by_hand_{at}.pkl", one

    @property
    def _named(self) -> bool:
        return self.project is not None and bool(self.project.automatic_checkpoint_naming)

    def _found(self) -> list[Path]:
        found = Path(self.project.project_dir, "checkpoints").glob(f"{_NAME}*")
        return sorted(found, key=lambda path: int(path.name.removeprefix(_NAME)))

    def _next(self) -> Path:
        folder = Path(self.project.project_dir, "checkpoints", f"{_NAME}{self.project.iteration}")
        if folder.exists():
            raise ValueError(f"{folder} is there already; set accelerator.project_configuration.iteration behind it")
        self.state.wait_for_everyone()  # or a fast rank's folder would be there before a slow rank has looked
        return folder

    def _forget(self, newest: Path) -> None:
        """Keeps as many as the project wants."""
        limit = self.project.total_limit if self._named else None
        if limit is not None:
            for old in [path for path in self._found() if path != newest][: -(limit - 1) or None]:
                shutil.rmtree(old)


def _of_model(folder: Path, at: int) -> Path:
    """Where the first model is saved, with the loaders and random states, and the others in folders of their own."""
    return folder / f"model_{at}" if at else folder


def _of_rank(rank: int) -> str:
    return f"random_states_{rank}.pkl"


def _is_whole(ready: Prepared) -> bool:
    """Return whether every rank holds all of it."""
    return ready.plan.run.engine in ("Single", "DDP")


def _weights(ready: Prepared) -> Any:
    """The weights that every rank holds whole, as a hook may write them."""
    return ready.unwrap().state_dict() if _is_whole(ready) else NotGathered()


def write_weights(weights: dict[str, Any], folder: Any, size: Any, *, safe: bool) -> None:
    """Files of so many bytes at most, in safetensors or pickled, as accelerate names them."""
    from huggingface_hub import save_torch_state_dict

    Path(folder).mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, folder, max_shard_size=size, safe_serialization=safe)
