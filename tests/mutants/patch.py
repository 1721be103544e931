"""A mutant put into a running process: in place where its function stands already, else when its module is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from attrs import frozen

from tests.mutants.mutant import Mutant, applied

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "prepkit"


def module_of(path: str) -> str:
    """The dotted name of a source file.

    >>> module_of("prepkit/rules/__init__.py"), module_of("prepkit/planner/sweep.py")
    ('prepkit.rules', 'prepkit.planner.sweep')
    """
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def compiled(mutant: Mutant) -> CodeType:
    """The code of the whole file with the mutant in it. Raises ``SyntaxError`` if it is none."""
    path = ROOT / mutant.path
    return compile(applied(mutant, path.read_bytes()), str(path), "exec", dont_inherit=True)


def put_in_place(mutant: Mutant) -> bool:
    """Gives the function around the mutant its mutated code, for all who hold it. False if it cannot be found."""
    function = function_at(sys.modules.get(module_of(mutant.path)), mutant.scope)
    if function is None:
        return False
    first = function.__code__.co_firstlineno
    codes = [code for code in _codes(compiled(mutant)) if code.co_qualname == mutant.scope]
    codes = [code for code in codes if code.co_firstlineno == first]
    if len(codes) != 1 or codes[0].co_freevars != function.__code__.co_freevars:
        return False
    function.__code__ = codes[0]
    forget_results()
    return True


def function_at(module: ModuleType | None, scope: str) -> FunctionType | None:
    """The function of this qualified name, taken out of a property, a cache or a class method."""
    found: Any = module
    for name in scope.split("."):
        found = vars(found).get(name) if isinstance(found, ModuleType | type) else None
        for inner in ("fget", "func", "__func__", "__wrapped__"):
            if not isinstance(found, FunctionType) and hasattr(found, inner):
                found = getattr(found, inner)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found if isinstance(found, FunctionType) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def forget_results() -> None:
    """Empties every ``functools`` cache of the package: what it holds was worked out by other code."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == PACKAGE:
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@frozen(slots=False)
class Hook:
    """A finder for ``sys.meta_path``: the mutant's module is made of its mutated source; all others are as ever."""

    mutant: Mutant

    @cached_property
    def name(self) -> str:
        """The module."""
        return module_of(self.mutant.path)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As import machinery asks."""
        del path, target
        if name != self.name:
            return None
        file = str(ROOT / self.mutant.path)
        return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, file, self.mutant))


class _Loader(SourceFileLoader):
    def __init__(self, name: str, file: str, mutant: Mutant) -> None:
        super().__init__(name, file)
        self.mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        """The mutated code, past every cache of bytecode."""
        del fullname
        return compiled(self.mutant)


def hook(mutant: Mutant) -> None:
    """From now on the module is imported mutated. Raises ``RuntimeError`` if it has been imported already."""
    if module_of(mutant.path) in sys.modules:
        raise RuntimeError(f"{module_of(mutant.path)} is imported already")
    sys.meta_path.insert(0, Hook(mutant))
