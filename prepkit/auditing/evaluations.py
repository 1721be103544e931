"""Evaluations, by what a program calls things: models that train there, and what is taken for the best."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, TypeGuard

import torch
from attrs import define, evolve, field
from torch import nn

from prepkit.facts.phases import EvaluationFacts, WorstKept
from prepkit.objects.names import unwrap_root
from prepkit.observe.prepared.around import innermost as loop_around
from prepkit.observe.prepared.around import name_of, nodes_of, own_frames, parsed, texts_of_program
from prepkit.observe.prepared.modules import drops

EVALUATES = frozenset({
    *("dev", "eval", "evaluate", "evaluation", "holdout", "test", "val", "valid", "validate", "validation"),
})  # fmt: skip
BESIDE = frozenset({
    *("a", "acc", "accuracy", "all", "and", "compute", "data", "dataset", "do", "epoch", "error", "full", "get"),
    *("loader", "loop", "loss", "losses", "measure", "metric", "metrics", "model", "models", "net", "network", "on"),
    *("one", "performance", "perplexity", "run", "score", "set", "split", "the"),
})  # fmt: skip
"""Words that stand beside those in the name of a function that evaluates."""
OF_DATA = frozenset({
    *("batch", "batches", "dl", "ds", "feats", "features", "graph", "image", "images", "img", "in", "input", "inputs"),
    *("iter", "label", "labels", "logits", "nodes", "out", "output", "outputs", "pred", "prediction", "predictions"),
    *("preds", "sample", "samples", "subset", "target", "targets", "text", "texts", "x", "xs", "y", "ys"),
})  # fmt: skip
"""Words that stand beside those in the names of samples, and of what is made of them."""
LEARNS = frozenset({"backward", "step", "grad", "update_bn"})
"""Calls that no evaluation makes."""
LOWER = frozenset({
    *("bce", "brier", "ce", "cer", "eer", "err", "error", "fid", "loss", "losses", "mae", "mape", "mse", "nll"),
    *("perplexity", "ppl", "rmse", "rmsle", "smape", "wer"),
})  # fmt: skip
HIGHER = frozenset({
    *("acc", "accuracies", "accuracy", "auc", "auroc", "bleu", "dice", "f1", "iou", "miou", "ndcg"),
    *("precision", "psnr", "r2", "recall", "rouge", "ssim", "top1"),
})  # fmt: skip
TURNED = frozenset({
    *("delta", "gap", "hard", "hardest", "highest", "inv", "inverse", "lowest", "max", "min", "minus", "neg"),
    *("negative", "worst"),
})  # fmt: skip
"""Words of measures that may be meant the other way round."""


@define(eq=False)
class Evaluations:
    """Is told of calls of models by ``enters``."""

    training: dict[tuple[str, str, str], None] = field(factory=dict)
    _said: EvaluationFacts | None = None

    def enters(self, module: nn.Module, *_: Any) -> None:
        """A model is called from outside of any other."""
        inside = unwrap_root(module)[-1]
        if module.training and inside.training and (why := _varies(inside)):
            frames = own_frames()
            graph = torch.is_grad_enabled()
            places = [(one.f_code, one.f_lineno) for one in frames]
            if any(_evaluates(*one, innermost=one is places[0], with_graph=graph) for one in places):
                line = f"{Path(frames[0].f_code.co_filename).name}:{frames[0].f_lineno}"
                self.training[(line, type(inside).__name__, why)] = None

    def facts(self) -> EvaluationFacts:
        """What was heard so far, and what the program's text says, which is read once."""
        if self._said is None:
            trees = {Path(one).name: parsed(one) for one in texts_of_program()}
            self._said = EvaluationFacts(
                worst=tuple(found for name, tree in trees.items() for found in _worst(tree, name)),
                refitted=tuple(found for name, tree in trees.items() for found in _refitted(tree, name)),
            )
        return evolve(self._said, training=tuple(self.training))


# --- a model that trains while it is evaluated ---


def _varies(model: nn.Module) -> str:
    """What gives other numbers in training mode; empty: nothing does."""
    if drops(model):
        return "drops elements"
    norms = (one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm) and one.training)
    return "takes the means of the batch, and keeps them" if any(one.track_running_stats for one in norms) else ""


@lru_cache(maxsize=1024)  # it is asked at each call
def _evaluates(code: CodeType, line: int, *, innermost: bool, with_graph: bool) -> bool:
    """Return whether a line stands in an evaluation by the names of its function, its loop or, innermost, its own."""
    tree = parsed(code.co_filename)
    begin, end = loop_around(code, line)
    loops = [one for one in nodes_of(tree, ast.For) if one.lineno == begin and one.end_lineno == end]
    if any(map(_repeats, loops)):
        return False  # drawn several times, as for its spread
    bodies: list[ast.AST] = [one for one in loops if _says(one.iter, bare=True)]
    if not with_graph:
        bodies += [one for one in nodes_of(tree, ast.FunctionDef) if _is_of(one, code.co_firstlineno, line)]
        lines = nodes_of(tree, ast.Assign, ast.Expr, ast.AugAssign) if innermost else ()
        bodies += [one for one in lines if _stands(one, line)]
    return any(not any(_learns(call, line) for call in ast.walk(one)) for one in bodies)


def _learns(node: ast.AST, line: int) -> bool:
    """Return whether a call belongs to no evaluation, or has said before a line that training mode is meant."""
    if not isinstance(node, ast.Call):
        return False
    return name_of(node) in LEARNS or (name_of(node) == "train" and not node.args and node.lineno <= line)


def _repeats(loop: ast.For) -> bool:
    """Return whether it counts runs that are alike: nothing inside of it takes what it runs over."""
    over = {one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)}
    used = {one.id for part in loop.body for one in ast.walk(part) if isinstance(one, ast.Name)}
    return isinstance(loop.iter, ast.Call) and name_of(loop.iter) == "range" and not over & used


def _is_of(function: ast.FunctionDef, first: int, line: int) -> bool:
    """Return whether it is the function that begins at a line, around another, and evaluates by its name."""
    lines = {function.lineno, *(one.lineno for one in function.decorator_list)}
    words = _words(function.name)
    named = words & EVALUATES and words <= EVALUATES | BESIDE
    return bool(named) and first in lines and function.lineno <= line <= (function.end_lineno or 0)


def _stands(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0) and _says(node)


def _says(node: ast.AST, *, bare: bool = False) -> bool:
    """Return whether a name in it is of what validates; ``bare``: one that is no more than that word counts."""
    names = (one.id if isinstance(one, ast.Name) else one.attr for one in ast.walk(node) if _is_name(one))
    told = (words for one in names if (words := _words(one)) & EVALUATES and words <= EVALUATES | BESIDE | OF_DATA)
    return any(bare or len(words) > 1 for words in told)


def _is_name(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    return isinstance(node, ast.Name | ast.Attribute)


@lru_cache(maxsize=4096)
def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+\d?", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()))


# --- what is taken for the best ---


def _worst(tree: ast.AST, file: str) -> tuple[WorstKept, ...]:
    calls = nodes_of(tree, ast.Call)
    made = {ast.unparse(one.targets[0]): one.value for one in nodes_of(tree, ast.Assign)}
    found = [*_kept(tree, file)]
    for call in calls:
        for who, measure, keeps_lower in (*_watched(call), *_plateau(call, made), *_of_trainer(call)):
            lower = _is_lower(measure)
            if lower is not None and lower is not keeps_lower:
                found.append(WorstKept(line=f"{file}:{call.lineno}", who=who, measure=measure, lower=lower))
    return tuple(found)


def _is_lower(measure: str) -> bool | None:
    """Whether less is better, by the name of a measure; None: that is unknown."""
    words = _words(measure)
    lower, higher = bool(words & LOWER), bool(words & HIGHER)
    return None if lower is higher or words & TURNED or "-" in measure else lower


def _kept(tree: ast.AST, file: str) -> Iterator[WorstKept]:
    """Yield what is written for the best behind a comparison with what was the best before."""
    for one in nodes_of(tree, ast.If):
        test = one.test.values[-1] if isinstance(one.test, ast.BoolOp) and isinstance(one.test.op, ast.Or) else one.test
        match test:
            case ast.Compare(left, [ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE() as sign], [right]):
                pass
            case _:
                continue
        sides = {ast.unparse(left): left, ast.unparse(right): right}
        below = isinstance(sign, ast.Lt | ast.LtE)
        for name, value in _written(one):
            if "best" not in _words(name) or value not in sides or not any(name in _parts(side) for side in sides):
                continue
            keeps_lower = below is (value == ast.unparse(left))
            first = _first(tree, name)
            told = "-" in value or _words(value) & (LOWER | HIGHER | TURNED)
            lower = _is_lower(value if told else name)
            who = ast.unparse(test)
            if lower is not None and lower is not keeps_lower:
                yield WorstKept(line=f"{file}:{one.lineno}", who=who, measure=value, lower=lower)
            elif first is not None and _never(first, keeps_lower=keeps_lower, lower=lower):
                begins = ast.unparse(first)
                yield WorstKept(line=f"{file}:{one.lineno}", who=who, measure=value, lower=keeps_lower, never=begins)


def _written(branch: ast.If) -> Iterator[tuple[str, str]]:
    """Yield what its first branch writes, and of what."""
    for one in (each for part in branch.body for each in ast.walk(part)):
        match one:
            case ast.Assign([ast.Name() | ast.Attribute() as target], value):
                yield ast.unparse(target), ast.unparse(value)
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
                yield from ((ast.unparse(a), ast.unparse(b)) for a, b in zip(targets, values, strict=True))


def _parts(text: str) -> set[str]:
    return {ast.unparse(one) for one in ast.walk(ast.parse(text)) if _is_name(one)}


def _first(tree: ast.AST, name: str) -> ast.expr | None:
    """What a name begins with, where one line alone writes a number into it."""
    written = [one.value for one in nodes_of(tree, ast.Assign) if any(ast.unparse(to) == name for to in one.targets)]
    numbers = [one for one in written if _number(one) is not None]
    return numbers[0] if len(numbers) == 1 else None


def _number(node: ast.expr) -> float | None:
    match ast.unparse(node).replace('"', "'"):
        case "float('inf')" | "math.inf" | "np.inf" | "numpy.inf" | "torch.inf" | "float('Inf')":
            return float("inf")
        case "-float('inf')" | "float('-inf')" | "-math.inf" | "-np.inf" | "-torch.inf" | "-numpy.inf":
            return -float("inf")
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return float(value) if isinstance(value, int | float) else None


def _never(first: ast.expr, *, keeps_lower: bool, lower: bool | None) -> bool:
    """Return whether no value is better than the one that it begins with."""
    number = _number(first)
    if number is None:
        return False
    if keeps_lower:
        return number == -float("inf") or (lower is True and number == 0)
    return number == float("inf") or (lower is False and number > 100)


# --- libraries that choose ---


def _given(call: ast.Call, name: str) -> Any:
    """The constant that a call is given by a name; None: it is given none."""
    found = (one.value for one in call.keywords if one.arg == name)
    return next((one.value for one in found if isinstance(one, ast.Constant)), None)


def _watched(call: ast.Call) -> Iterator[tuple[str, str, bool]]:
    """Yield what Lightning's callbacks watch, which take the lower one where nobody says more."""
    watched = _given(call, "monitor")
    plain = all(one.arg and (one.arg != "mode" or isinstance(one.value, ast.Constant)) for one in call.keywords)
    if name_of(call) in ("EarlyStopping", "ModelCheckpoint") and isinstance(watched, str) and plain:
        yield f"{name_of(call)}(monitor={watched!r})", watched, _given(call, "mode") in (None, "min")


def _plateau(call: ast.Call, made: dict[str, ast.expr]) -> Iterator[tuple[str, str, bool]]:
    """Yield what a ``ReduceLROnPlateau`` is ticked with, by its name."""
    match call:
        case ast.Call(ast.Attribute(owner, "step"), [ast.Name() | ast.Attribute() | ast.Subscript() as measure]):
            maker = made.get(ast.unparse(owner))
            if isinstance(maker, ast.Call) and name_of(maker) == PLATEAU and len(maker.args) < 2:
                text = ast.unparse(measure)
                yield f"{PLATEAU}.step({text})", text, _given(maker, "mode") in (None, "min")


PLATEAU = "ReduceLROnPlateau"


def _of_trainer(call: ast.Call) -> Iterator[tuple[str, str, bool]]:
    """Yield what transformers' Trainer chooses by; what does not end in "loss" is better where it is greater."""
    measure = _given(call, "metric_for_best_model")
    if isinstance(measure, str):
        said = _given(call, "greater_is_better")
        greater = said if said is not None else not measure.endswith("loss")
        plain = all(one.arg != "greater_is_better" or isinstance(one.value, ast.Constant) for one in call.keywords)
        if plain:
            yield f"{name_of(call)}(metric_for_best_model={measure!r})", measure, not greater


# --- what is fitted on what validates ---


def _refitted(tree: ast.AST, file: str) -> Iterable[tuple[str, str]]:
    """Lines that fit once more, on what validates, what was fitted on something else before."""
    fitted: dict[str, str] = {}
    found = []
    for one in sorted(nodes_of(tree, ast.Call), key=lambda call: call.lineno):
        match one:
            case ast.Call(ast.Attribute(owner, "fit_transform" | "fit" as name), [given, *_]):
                who, what = ast.unparse(owner), ast.unparse(given)
                if name == "fit_transform" and _says(given) and fitted.get(who, what) != what:
                    found.append((f"{file}:{one.lineno}", ast.unparse(one)))
                fitted.setdefault(who, what)
    return tuple(found)
