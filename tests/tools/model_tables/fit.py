"""Finds the expression in a config's fields that gives each observed value: sizes, counts, and what is there when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field
from transformers.activations import ACT2FN

from prepkit.formats.models.expressions import INDICES

Where = tuple[int, tuple[int, ...]]
"""Number of a probe, and the counts of the repeats around the place."""

KNOWN_QUOTIENTS = (
    ("hidden_size", "num_attention_heads", False),
    ("hidden_size", "num_heads", False),
    ("embed_dim", "num_heads", False),
    ("n_embd", "n_head", False),
    ("image_size", "patch_size", True),
)
"""Fields that nearly every model divides, and whether the quotient is squared, as that of an image is."""

CONSTANTS = (1, 2, 3, 4, 5, 6, 8, 16)


FEW = 64
"""Numbers below it may decide what is there; one above it is a size, and equal to another by chance."""

FEWEST = 6
"""Probes on each side of a condition that divides sizes: fewer fit by chance."""

LAST = -1
"""Depth at which sums of three terms are tried, and nothing is divided."""


class Unsolved(Exception):
    """No expression was found."""


@define
class Solver:
    """Solves over the fields of some probes; what it has worked out for one set of places serves the next."""

    probes: Sequence[Mapping[str, Any]]
    ignored: frozenset[str] = frozenset(ACT2FN)
    _flat: list[dict[str, Any]] = field(init=False)
    _names: list[str] = field(init=False)
    _bases: dict[tuple[Where, ...], _Base] = field(factory=dict)
    _known: dict[Any, str | Unsolved] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self._flat = [dict(_flattened(probe, "")) for probe in self.probes]
        every = {name: None for flat in self._flat for name in flat}
        same = {
            name
            for name in every
            if name.split(".")[-1] not in ("num_labels",) and len({repr(flat.get(name)) for flat in self._flat}) == 1
        }
        self._names = [name for name in every if name not in same]

    def texts(self) -> list[str]:
        """Names of the fields with texts."""
        return [name for name in self._names if any(isinstance(flat.get(name), str) for flat in self._flat)]

    def flat(self, where: Where) -> dict[str, Any]:
        """Fields at a place."""
        return self._flat[where[0]]

    def solve(self, seen: Mapping[Where, Any], depth: int = 3) -> str:
        """Expression that gives what was seen at each place. Raises ``Unsolved``."""
        key = (tuple(seen), tuple(map(repr, seen.values())), depth)
        if key not in self._known:
            try:
                self._known[key] = self._solve(seen, depth)
            except Unsolved as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, Unsolved):
            raise known
        return known

    def _solve(self, seen: Mapping[Where, Any], depth: int) -> str:
        values = list(seen.values())
        if all(value == values[0] and type(value) is type(values[0]) for value in values):
            return repr(values[0])
        base = self._base(tuple(seen))
        if (direct := base.named(values)) is not None:
            return direct
        if all(type(value) is bool for value in values):
            return base.condition(np.array(values, dtype=bool))
        if all(type(value) is int for value in values) and (found := base.size(np.array(values, dtype=np.int64))):
            return found
        whole = all(type(value) is int for value in values)
        if depth == LAST and whole and (found := base.long_size(np.array(values, dtype=np.int64))):
            return found
        if depth <= 0:
            raise Unsolved(f"{dict(list(seen.items())[:6])}")
        try:
            return self._divided(seen, base, depth)
        except Unsolved:
            if depth != 3 or not whole or not (found := base.long_size(np.array(values, dtype=np.int64))):
                raise
            return found

    def _divided(self, seen: Mapping[Where, Any], base: _Base, depth: int) -> str:
        values = [repr(value) for value in seen.values()]
        places = list(seen)
        kinds = sorted(set(values), key=values.index)
        if len(kinds) <= 6:
            for kind in kinds[:-1]:
                try:
                    test = base.condition(np.array([value == kind for value in values]), pairs=len(kinds) == 2)
                except Unsolved:
                    continue
                rest = {place: seen[place] for place, value in zip(places, values, strict=True) if value != kind}
                return f"{kind} if {test} else ({self.solve(rest, depth - 1)})"
        found: list[str] = []
        for test, mask in list(base.tests())[:60]:
            yes = {place: seen[place] for place, inside in zip(places, mask, strict=True) if inside}
            no = {place: seen[place] for place, inside in zip(places, mask, strict=True) if not inside}
            if min(len({place[0] for place in side}) for side in (yes, no)) < FEWEST:
                continue
            plain = test.endswith("is None") or test.replace(".", "").isidentifier()
            try:
                first = self.solve(yes, LAST if plain else 0)
                found.append(f"({first}) if {test} else ({self._rest(no, depth, plain=plain)})")
            except Unsolved:
                continue
        if not found:
            raise Unsolved(f"{dict(list(seen.items())[:6])}")
        return min(found, key=len)

    def _rest(self, seen: Mapping[Where, Any], depth: int, *, plain: bool) -> str:
        try:
            return self.solve(seen, LAST if plain else 0)
        except Unsolved:
            return self.solve(seen, depth - 1 if depth < 3 else 1)

    def _base(self, places: tuple[Where, ...]) -> _Base:
        if places not in self._bases:
            flats = [self._flat[number] for number, _ in places]
            self._bases[places] = _Base(self._names, self.ignored, flats, [counts for _, counts in places])
        return self._bases[places]


@define
class _Base:
    """Every simple expression and condition over one set of places, by its values there."""

    names: list[str]
    ignored: frozenset[str]
    """Texts that decide nothing: names of activations, of which each has its own class."""
    flats: list[dict[str, Any]]
    counts: list[tuple[int, ...]]
    _columns: dict[str, list[Any]] = field(init=False)
    _numbers: dict[str, Any] = field(init=False)
    _pairs: dict[bytes, str] | None = None
    _tests: dict[bytes, str] | None = None

    def __attrs_post_init__(self) -> None:
        self._columns = {name: [flat.get(name) for flat in self.flats] for name in self.names}
        for depth in range(len(self.counts[0])):
            self._columns[INDICES[depth]] = [counts[depth] for counts in self.counts]
        for name in [name for name, held in self._columns.items() if any(isinstance(one, list) for one in held)]:
            held = self._columns[name]
            for place in (
                "0",
                "-1",
                *(f"{i}{step}" for i in INDICES[: len(self.counts[0])] for step in ("", " - 1", " + 1")),
            ):
                self._columns[f"{name}[{place}]"] = [
                    _item(one, _place(place, counts)) for one, counts in zip(held, self.counts, strict=True)
                ]
            self._columns[f"len({name})"] = [len(one) if isinstance(one, list) else None for one in held]
        self._numbers = {
            name: np.array(held, dtype=np.int64)
            for name, held in self._columns.items()
            if all(type(one) is int and abs(one) < 2**40 for one in held)
        }
        for over, under, square in KNOWN_QUOTIENTS:
            for name, held in list(self._numbers.items()):
                other = self._numbers.get(f"{name.removesuffix(over)}{under}") if name.endswith(over) else None
                if other is not None and (other > 0).all():
                    text = f"({name} // {name.removesuffix(over)}{under})"
                    self._numbers[text] = held // other
                    if square:
                        self._numbers[f"({text} * {text})"] = (held // other) ** 2

    def named(self, values: list[Any]) -> str | None:
        """The field that has the values."""
        for name, held in self._columns.items():
            if all(one == value and type(one) is type(value) for one, value in zip(held, values, strict=True)):
                return name
        return None

    def size(self, target: Any) -> str | None:
        """Sum, product or quotient that has the values."""
        pairs = self._two()
        if (found := pairs.get(target.tobytes())) is not None:
            return found
        for text, values in self._listed:
            if (values == 0).any():
                continue
            for rest, form in ((target - values, "{0} + {1}"), (target + values, "{1} - {0}")):
                if (other := pairs.get(rest.tobytes())) is not None:
                    return form.format(_in(text), _in(other))
            if not (target % values).any() and (other := pairs.get((target // values).tobytes())) is not None:
                return f"{_in(text)} * {_in(other)}"
        if "stacked" not in self._cache:
            self._cache["stacked"] = np.stack([values for _, values in self._listed])
        for number in CONSTANTS[1:]:
            for place in np.flatnonzero((self._cache["stacked"] // number == target).all(axis=1))[:1]:
                return f"{_in(self._listed[place][0])} // {number}"
        return None

    def long_size(self, target: Any) -> str | None:
        """A sum of three terms, or a quotient of two: tried last, since it takes longest."""
        pairs = self._two()
        listed = self._listed[:3000]
        every = np.stack([values for _, values in listed])
        rest = target - every
        for name, other in self._numbers.items():
            if (other <= 0).any():
                continue
            for place in np.flatnonzero((every // other == target).all(axis=1))[:1]:
                return f"{_in(listed[place][0])} // {name}"
            for place in np.flatnonzero(~(rest % other).any(axis=1) & (rest != 0).any(axis=1)):
                if (found := pairs.get((rest[place] // other).tobytes())) is not None:
                    return f"{_in(listed[place][0])} + {name} * {_in(found)}"
        return None

    def _two(self) -> dict[bytes, str]:
        if self._pairs is None:
            self._pairs, self._listed = {}, []
            for text, values in self._made():
                if np.abs(values).max(initial=0) < 2**40 and values.tobytes() not in self._pairs:
                    self._pairs[values.tobytes()] = text
                    self._listed.append((text, values))
        return self._pairs

    _listed: list[tuple[str, Any]] = field(factory=list)
    _cache: dict[str, Any] = field(factory=dict)

    def _made(self) -> Iterator[tuple[str, Any]]:
        numbers = self._numbers
        size = len(self.flats)
        for number in (*CONSTANTS, 0):
            yield str(number), np.full(size, number, dtype=np.int64)
        yield from numbers.items()
        for name, values in numbers.items():
            for number in CONSTANTS[1:]:
                yield f"{number} * {name}", number * values
                yield f"{name} // {number}", values // number
                yield f"{name} // {number} + 1", values // number + 1
            yield f"({name} + 1) // 2", (values + 1) // 2
            for number in (1, 2, 3):
                yield f"{name} + {number}", values + number
                yield f"{name} - {number}", values - number
        floats = [
            (name, [float(one) for one in held])
            for name, held in self._columns.items()
            if all(type(one) in (int, float) for one in held) and any(type(one) is float for one in held)
        ]
        for name, values in numbers.items():
            for factor, held in floats:
                product = np.array([int(a * b) for a, b in zip(values.tolist(), held, strict=True)])
                yield f"int({name} * {factor})", product
                yield f"int({name} * {factor}) + 1", product + 1
        sizes = {name: values for name, values in numbers.items() if name != "num_labels"}  # are a whole size
        for name, values in sizes.items():
            for other, more in sizes.items():
                if name <= other:
                    yield f"{name} * {other}", values * more
                    yield f"{name} + {other}", values + more
                if name != other:
                    yield f"{name} - {other}", values - more
                    if (more > 0).all():
                        yield f"{name} // {other}", values // more

    def tests(self) -> Iterator[tuple[str, Any]]:
        """Conditions and where they hold, simple ones first; each set of places once."""
        if self._tests is None:
            self._tests = {}
            for text, held in self._conditions():
                mask = np.array(held, dtype=bool)
                if 0 < mask.sum() < len(mask):
                    self._tests.setdefault(mask.tobytes(), text)
        for key, text in self._tests.items():
            yield text, np.frombuffer(key, dtype=bool)

    def _conditions(self) -> Iterator[tuple[str, list[bool]]]:
        for name, held in self._columns.items():
            if any(type(one) is bool for one in held):
                yield name, [bool(one) for one in held]
        for name, held in self._columns.items():
            if any(one is None for one in held):
                yield f"{name} is None", [one is None for one in held]
            for text in sorted({one for one in held if isinstance(one, str)} - self.ignored):
                yield f"{name} == {text!r}", [one == text for one in held]
            lists = [one if isinstance(one, list) else [] for one in held]
            for text in sorted({item for one in lists for item in one if isinstance(item, str)}):
                yield f"{text!r} in {name}", [text in one for one in lists]
            if any(not one for one in held) and any(type(one) in (int, float, list) for one in held):
                yield name, [bool(one) for one in held]
        yield from self._conditions_of_counts()
        yield from self._comparisons()

    def _conditions_of_counts(self) -> Iterator[tuple[str, list[bool]]]:
        columns = self._columns
        counts = [INDICES[depth] for depth in range(len(self.counts[0]))]
        small = {name: values for name, values in self._numbers.items() if values.max(initial=0) < 2 * FEW}
        for i in counts:
            index = self._numbers[i]
            for number in range(4):
                yield f"{i} == {number}", (index == number).tolist()
                yield f"{i} < {number}", (index < number).tolist()
            for number in (2, 3, 4, 5, 6):
                for rest in range(number):
                    yield f"{i} % {number} == {rest}", (index % number == rest).tolist()
            for name, values in small.items():
                yield f"{i} < {name}", (index < values).tolist()
                yield f"{i} == {name} - 1", (index == values - 1).tolist()
                yield from self._periods(i, name, small) if name != i and (values > 0).all() else ()
            for name, held in columns.items():
                if any(isinstance(one, list) for one in held):
                    yield f"{i} in {name}", [isinstance(a, list) and b in a for a, b in zip(held, index, strict=True)]

    def _periods(self, i: str, name: str, small: dict[str, Any]) -> Iterator[tuple[str, list[bool]]]:
        index, values = self._numbers[i], self._numbers[name]
        yield f"{i} % {name} == 0", (index % values == 0).tolist()
        yield f"({i} + 1) % {name} == 0", ((index + 1) % values == 0).tolist()
        for other, more in small.items():
            if other not in (i, name):
                yield f"{i} % {name} == {other}", (index % values == more).tolist()

    def _comparisons(self) -> Iterator[tuple[str, list[bool]]]:
        counts = set(INDICES)
        for name, values in self._numbers.items():
            for number in sorted(number for number in set(values.tolist()) if number < FEW)[:4]:
                yield f"{name} == {number}", (values == number).tolist()
            for other, more in self._numbers.items():
                if name < other:
                    yield f"{name} == {other}", (values == more).tolist()
                if name != other and name not in counts and other not in counts:
                    yield f"{name} < {other}", (values < more).tolist()

    def condition(self, target: Any, *, pairs: bool = True) -> str:
        """Condition that holds just where the target is true. Raises ``Unsolved``."""
        texts, masks = self._every_test()
        if not texts:
            raise Unsolved("there is no condition at all")
        for same in np.flatnonzero((masks == target).all(axis=1))[:1]:
            return texts[same]
        if not pairs:
            raise Unsolved(f"a condition true at {int(target.sum())} of {len(target)} places")
        for word, kept in (("and", ~(target & ~masks).any(axis=1)), ("or", ~(masks & ~target).any(axis=1))):
            places = np.flatnonzero(kept)[:400]
            some = masks[places]
            for place in places:
                joint = some & masks[place] if word == "and" else some | masks[place]
                for other in np.flatnonzero((joint == target).all(axis=1))[:1]:
                    return f"({texts[places[other]]}) {word} ({texts[place]})"
        if (found := self._three(target)) is not None:
            return found
        if (found := self._three(~target)) is not None:
            return f"not ({found})"
        raise Unsolved(f"a condition true at {int(target.sum())} of {len(target)} places")

    def _three(self, target: Any) -> str | None:
        """One of two things, each of which may be that two hold together; over the simplest conditions."""
        texts, masks = self._every_test()
        texts, masks = texts[:100], masks[:100]
        parts: list[tuple[str, Any]] = []
        for place in range(len(texts)):
            joint = masks[place:] & masks[place]
            for other in np.flatnonzero(joint.any(axis=1) & ~(joint & ~target).any(axis=1)):
                both = f"({texts[place]}) and ({texts[place + other]})" if other else texts[place]
                parts.append((both, joint[other]))
        if not parts:
            return None
        every = np.stack([mask for _, mask in parts])
        for text, mask in parts:
            for other in np.flatnonzero(((every | mask) == target).all(axis=1))[:1]:
                return f"({text}) or ({parts[other][0]})"
        return None

    def _every_test(self) -> tuple[list[str], Any]:
        """Conditions and their opposites, and where each holds, as one matrix."""
        if "tests" not in self._cache:
            tests = list(self.tests())
            texts = [text for plain, _ in tests for text in (plain, f"not ({plain})")]
            masks = [mask for plain in (mask for _, mask in tests) for mask in (plain, ~plain)]
            self._cache["tests"] = texts, np.stack(masks) if masks else None
        held: tuple[list[str], Any] = self._cache["tests"]
        return held


def _in(text: str) -> str:
    return f"({text})" if " " in text else text


def _item(held: Any, place: int) -> Any:
    return held[place] if isinstance(held, list) and -len(held) <= place < len(held) else None


def _place(text: str, counts: tuple[int, ...]) -> int:
    if text[0] not in INDICES:
        return int(text)
    place = counts[INDICES.index(text[0])] + int(text[1:].replace(" ", "") or 0)
    return place if place >= 0 else 2**30


def _flattened(fields: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if not isinstance(name, str) or not name.isidentifier() or name in ("id2label", "label2id"):
            continue
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value
