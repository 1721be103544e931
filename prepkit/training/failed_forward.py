"""What torch does not say of a forward that has failed: whose sharded parameter it met, or which buffers are not cast.

Torch's error stays what is raised, and a finding is added to it as a note (PEP 678). Nothing is looked at before.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Iterator
from textwrap import dedent
from types import CodeType, TracebackType
from typing import Any

from attrs import define
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from prepkit.court import found
from prepkit.findings import Finding
from prepkit.findings.text import at, some
from prepkit.objects import names
from prepkit.plan import Plan
from prepkit.rules.forward import elsewhere
from prepkit.rules.run.drift import FSDP1_INSTEAD
from prepkit.steps import CompileModules, InitializeDeepSpeed, ShardUnits, WrapFSDP1

LIBRARIES = ("torch.", "deepspeed.", "prepkit.")
"""How the names of modules begin whose lines name no parameter of the model."""
DTYPES = re.compile(r"\b(dtype|scalar type)\b.*\b(BFloat16|Half)\b", re.DOTALL)
"""What torch says of numbers in 16 bits that meet others."""

WRITTEN = re.compile(r"view.* modified inplace", re.DOTALL)
"""What torch says of weights that are written where they are views."""

MIXED = "got mixed torch.Tensor and DTensor"
"""What torch says of a shard that meets a whole tensor."""


def explain(model: Module, plan: Plan) -> Iterator[RemovableHandle]:
    """Explain from now on what fails in the forward of a model whose weights are sharded or cast.

    Not where the whole model is compiled: its hooks would be.
    """
    steps = [planned.step for planned in plan.steps]
    changed = any(isinstance(step, ShardUnits | WrapFSDP1 | InitializeDeepSpeed) for step in steps)
    if changed and not compiled_whole(plan):
        yield model.register_forward_hook(Explains(plan), always_call=True)


def compiled_whole(plan: Plan) -> bool:
    """Return whether the outermost module is compiled, and hooks of it would be."""
    return any(isinstance(one.step, CompileModules) and "" in one.step.paths for one in plan.steps)


@define(eq=False, repr=False)
class Explains:
    """A hook of the outermost module, which torch calls after a forward, also after one that has failed."""

    plan: Plan

    def __call__(self, model: Module, _: Any, output: Any) -> None:
        """Add notes to the error that is under way in this very forward, if one is."""
        error = sys.exc_info()[1]
        if output is not None or error is None or error.__traceback__ is None:
            return
        if error.__traceback__.tb_frame.f_locals.get("self") is not model:
            return  # the forward went well, inside somebody's ``except``
        for finding in findings(error, model, self.plan):
            error.add_note(f"{finding.rule} at {finding.where}: {finding.what} {finding.fix}")

    def __deepcopy__(self, memo: Any) -> Explains:
        return self

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> Any:
    """Return what stands for the hook in a model that was pickled."""
    return _silent


def _silent(*_: Any) -> None:
    """Say nothing."""


def findings(error: BaseException, model: Module, plan: Plan) -> Iterator[Finding]:
    """What can be said of it from the frames that it went through."""
    frames = list(_frames(error.__traceback__))
    paths = {id(module): path for path, module in names.named_modules(model).items()}
    running = [paths[id(one)] for frame in frames if id(one := frame.tb_frame.f_locals.get("self")) in paths]
    foreign = False
    for hit in elsewhere(tuple(_foreign(frames, model, plan, running))):
        foreign = True
        yield found("forward.used-elsewhere", hit.where, hit.what, hit.fix)
    if WRITTEN.search(str(error)) and any(isinstance(planned.step, WrapFSDP1) for planned in plan.steps):
        what = "FSDP1 gathers weights as views of one tensor, which a forward cannot write: it would be lost as well."
        yield found("run.written-in-forward", "model", what, FSDP1_INSTEAD)
    if not foreign and MIXED in str(error):
        what = (
            "A shard has met a whole tensor: it comes in from outside, or is made of a parameter that is in parts, as "
        )
        what += "next(model.parameters()).new_zeros(...) makes it outside of the forward."
        yield found(
            "forward.used-elsewhere", "model", what, "Make it of an input: x.new_zeros(...), or torch.zeros(...)."
        )
    if not foreign and isinstance(error, RuntimeError) and DTYPES.search(str(error)):
        yield from _apart(model, plan)


def explain_backward(error: BaseException) -> None:
    """Add a note to what has failed in a backward: shards of weights, as of a penalty, were added to whole tensors."""
    if isinstance(error, RuntimeError) and MIXED in str(error):
        what = "The loss adds up terms of weights that are whole, and of others that are shards, as a penalty does."
        fix = (
            "Make each term whole before it is added: `term.full_tensor() if isinstance(term, DTensor) else term`, "
            "with term = p.pow(2).sum()."
        )
        finding = found("forward.used-elsewhere", "loss", what, fix)
        error.add_note(f"{finding.rule} at {finding.where}: {finding.what} {finding.fix}")


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


# --- parameters ---


def _foreign(
    frames: list[TracebackType], model: Module, plan: Plan, running: list[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield parameter, unit and user of each that the failing line names, and that is not gathered there."""
    ours = [one for one in frames if not f"{one.tb_frame.f_globals.get('__name__')}.".startswith(LIBRARIES)]
    if not ours:
        return
    named = {id(param): name for name, param in names.named_parameters(model).items()}
    layout = {one.name: one for one in plan.layout}
    for value in _values(ours[-1]):
        one = layout.get(named.get(id(value), ""))
        if one is not None and one.unit and one.unit not in running and _in_parts(value, one.shape):
            yield one.name, one.unit, running[-1] if running else ""


def _in_parts(param: Any, shape: tuple[int, ...]) -> bool:
    """Return whether it is a shard now: of FSDP2 a DTensor, of FSDP1 and ZeRO-3 of another shape."""
    return hasattr(param, "placements") or tuple(param.shape) != shape


def _values(failing: TracebackType) -> Iterator[Any]:
    """Yield the tensors that stand by a name in the expression that has failed, such as ``self.embed.weight``."""
    scope = failing.tb_frame.f_locals
    for node in ast.walk(_expression(failing.tb_frame.f_code, failing.tb_lasti)):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(value := _value(node, scope), Tensor):
            yield value


def _expression(code: CodeType, instruction: int) -> ast.AST:
    """Read the source of the instruction; nothing where there is none."""
    positions = list(code.co_positions())[instruction // 2]
    first, last, begin, end = positions
    if first is None or last is None or begin is None or end is None:
        return ast.Pass()
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    if not all(lines):
        return ast.Pass()
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    try:
        return ast.parse(f"({dedent(b''.join(lines).decode())})")
    except SyntaxError:  # an assignment to a part, as ``x[0] = y``
        return ast.Pass()


def _value(node: ast.expr, scope: Any) -> Any:
    """Look a name up without running any code of the user's: names of the frame, and what modules have registered."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    inside = _value(node.value, scope) if isinstance(node, ast.Attribute) else None
    if not isinstance(inside, Module) or not isinstance(node, ast.Attribute):
        return None
    inside = names.unwrap(inside)[-1]  # a wrapper passes on what it does not have
    held = ({node.attr: vars(inside).get(node.attr)}, inside._parameters, inside._modules, inside._buffers)
    return next((table[node.attr] for table in held if table.get(node.attr) is not None), None)


# --- buffers ---


def _apart(model: Module, plan: Plan) -> Iterator[Finding]:
    """Yield what in 32 bits may have met weights in 16: buffers that the forward of their own module names."""
    wide = [
        f"{path}.{name}" if path else name
        for path, module in names.named_modules(model).items()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point() and buffer.element_size() > 2 and _reads(module, name)
    ]
    if wide:
        what = f"Buffers stay in the dtype that they were made in, here above 16 bits: {some(wide)}."
        name = wide[0].rpartition(".")[2]
        fix = f"Cast them in the forward where they meet activations: self.{name}.to(x.dtype){_cast_by(plan)}."
        yield found("forward.unlike-dtypes", at(wide[0]), what, fix)
    else:
        what = "It met a tensor above 16 bits that is no buffer: an input, or one that the forward has made."
        yield found("forward.unlike-dtypes", "model", what)


def _cast_by(plan: Plan) -> str:
    """Write what makes the engine cast buffers, where it can."""
    casts = any(isinstance(planned.step, InitializeDeepSpeed) for planned in plan.steps)
    return ', or write "data_types": {"buffer_dtype": "bf16"} into the JSON of DeepSpeed(config=...)' * casts


def _reads(module: Module, name: str) -> bool:
    """Return whether the forward of its class has that name in its code."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    return code is not None and name in code.co_names
