"""The commands of a shell script as words, with the variables that the script sets plainly. Nothing is run."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from attrs import evolve, field, frozen

_WORD = re.compile(
    r"""(?:\$\{(?:[^{}\n]|\$\{[^{}\n]*\})*\}|\$\((?:[^()\n]|\([^()\n]*\))*\)|`[^`\n]*`"""
    r"""|[^\s"'\\;&|]|\\.|"(?:\\.|[^"\\])*"|'[^']*')+|[;&|]+|\n""",
    re.DOTALL,
)
_ON = re.compile(r"\\\r?\n")
_COMMENT = re.compile(r"(?m)^\s*#[^\n]*|(?<=\s)#[^\n]*")
_PYTHON = re.compile(r"(?ms)^[^\n]*\bpython[\d.]*\b[^\n]*<<-?[ \t]*([\"']?)(\w+)\1[^\n]*\n.*?^[ \t]*\2[ \t\r]*$")
"""Lines that are given to Python, and are none of the shell's."""
_SUM = re.compile(r"\$\(\(([^()]*)\)\)")
_ARRAY = re.compile(r"(?<![\w$])(\w+)(\+?)=\(([^()]*)\)")
_ITEMS = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
_NAME = re.compile(r"\$\{(?P<braced>\w+)(?:(?P<sign>:?[-=?])(?P<default>[^{}]*))?\}|\$(?P<plain>\w+)")
"""A variable, also one with what it is where nothing sets it: ``${X:-8}``, ``${X:=8}``."""
_SETTING = re.compile(r"\$\{([A-Za-z_]\w*):?=((?:[^{}]|\$\{[^{}]*\})*)\}")
"""What sets a variable where nothing has set it."""
_SET = re.compile(r"(?:^|[\s;&|()])([A-Za-z_]\w*)\+?=")
"""What may set a variable, wherever it stands."""
_RUN = re.compile(r"\"?(\$\((?!\()|`)")
"""How a value begins that a command gives."""
_OWN_DEFAULT = re.compile(r"([\"']?)\$\{(\w+):?[-=](.*)\}\1", re.DOTALL)
_FROM_OUTSIDE = re.compile(r"([\"']?)\$(?:\{(\w+)\}|(\w+))\1")
"""A value that is another variable's, and nothing else."""
_HERE = re.compile(r"`pwd`|\$\(pwd\)|\$\{PWD\}|\$PWD\b")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NOTHING = "\x01"
"""In the place of a space inside of a sum, which is one word."""
_BEFORE = frozenset({"then", "else", "do", "{", "time", "exec", "sudo", "nohup", "!"})
"""Words that a command may begin with, and that are not its own."""
_SETS = frozenset({"export", "local", "declare", "readonly", "typeset", "-x"})
_STARTS = ("-c", "-lc", "eval")
"""What a word is behind that a shell reads."""
_ELSEWHERE = ("ssh", "pdsh", "clush")
"""Commands that give their last word to a shell elsewhere."""
_DEEPEST = 5
"""Variables that stand in each other, and shells that are started in each other."""
_LONGEST = 2_000
"""Letters of one value, and words of one command: a script has no say over how much its variables grow to."""


@frozen
class Word:
    """A word of a command."""

    text: str
    """With the variables that the script sets, and without its quotes."""
    at: int
    """Where it stands in the script."""
    raw: str = ""
    """As written."""
    assumed: tuple[tuple[str, str], ...] = ()
    """Variables that nothing sets here, and what the script takes them for then: ``${X:-8}``."""


@frozen(kw_only=True)
class Command:
    """The words of one command."""

    words: tuple[Word, ...]
    before: tuple[Word, ...] = ()
    """Those of the command that starts its shell, as ``srun bash -c``."""
    folder: str | None = None
    """Where the script has gone before, from where it began; None: it has not, or nobody knows here."""
    exported: Mapping[str, str] = field(factory=dict)
    """What the script puts into the environment, and the command itself."""
    kept: bool = False
    """Whether it is the value of a variable, which another line may run."""
    assumed: Mapping[str, tuple[tuple[str, str], ...]] = field(factory=dict)
    """Exported variables to what is assumed in their values, as ``Word.assumed``."""


Values = Mapping[str, str | None]
"""Variables that are set, by their names; None: to what, the run alone knows."""


@frozen
class _Uses:
    """The variables that are read where a text is filled in."""

    set_: set[str] = field(factory=set)
    assumed: dict[str, str] = field(factory=dict)
    """Those that nothing sets, and what the text takes them for then."""


def commands(text: str, given: Values, sought: re.Pattern[str]) -> list[Command]:
    """The commands of a script in order, and those in values of variables in which something stands that is ``sought``.

    ``given``: variables that are set before it starts. One that nothing sets is what the script takes it for then.
    """
    joined = _ON.sub(_blank, _PYTHON.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text))
    joined = _COMMENT.sub(_blank, joined)
    joined = _SUM.sub(lambda found: re.sub(r"\s", _NOTHING, found[0]), joined)
    shell = _Shell.of(joined, given, sought)
    return list(shell.commands(_ARRAY.sub(_blank, joined), 0))


def unquoted(word: str) -> str:
    """The word without its quotes; those that stand in others, as in JSON, are a part of it."""
    return _QUOTES.sub(_inside, word).replace(_NOTHING, "")


_QUOTES = re.compile(r"\\.|'([^']*)'|\"((?:\\.|[^\"\\])*)\"|[\"']", re.DOTALL)


def _inside(found: re.Match[str]) -> str:
    if found[1] is not None:
        return found[1]
    return re.sub(r"[\"']", "", found[0]) if found[2] is None else re.sub(r"\\([\"\\$`])", r"\1", found[2])


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0]) if found.re is _ARRAY else " " * len(found[0])


def _split(text: str, at: int) -> Iterator[list[Word]]:
    words: list[Word] = []
    for found in _WORD.finditer(f"{text}\n"):
        if found[0] == "\n" or re.fullmatch(r"[;&|]+", found[0]):
            yield words
            words = []
        else:
            words.append(Word("", at + found.start(), found[0]))


def _own(words: list[Word]) -> list[Word]:
    """The words without what a shell reads itself before them: ``then``, or the parenthesis of a subshell."""
    while words and words[0].raw in _BEFORE:
        words = words[1:]
    if words and words[0].raw.startswith("(") and not words[0].raw.startswith("(("):
        first = Word("", words[0].at + 1, words[0].raw[1:])
        words = [first, *words[1:]] if first.raw else words[1:]
    if words and words[-1].raw.endswith(")") and "(" not in words[-1].raw:
        words = [*words[:-1], Word("", words[-1].at, words[-1].raw[:-1])]
    return [word for word in words if word.raw]


@frozen
class _Shell:
    values: Values
    arrays: Mapping[str, tuple[Word, ...]]
    exported: frozenset[str]
    sought: re.Pattern[str]
    uses: Mapping[str, _Uses]
    """Variables to those that stand in their values."""

    @classmethod
    def of(cls, text: str, given: Values, sought: re.Pattern[str]) -> _Shell:
        """What a script sets: a variable that it gives two values, or one that only the run knows, has none here."""
        values: dict[str, set[str]] = {name: {"\n" if value is None else value} for name, value in given.items()}
        defaults: dict[str, set[str]] = {}
        for name, default in _SETTING.findall(text):
            defaults.setdefault(name, set()).add(default)
        arrays: dict[str, list[tuple[Word, ...]]] = {}
        exported = set(given)
        for found in _ARRAY.finditer(text):
            items = tuple(word for words in _split(found[3], found.start(3)) for word in words)
            arrays.setdefault(found[1], []).append(((*arrays[found[1]].pop(), *items)) if found[2] else items)
        for words in map(_own, _split(_ARRAY.sub(_blank, text), 0)):
            sets = [_ASSIGNED.fullmatch(word.raw) for word in words if word.raw not in _SETS]
            if words and all(sets):
                for one in filter(None, sets):
                    own = _own_default(one)
                    held = values if own is None else defaults
                    held.setdefault(one[1], set()).add(_plainly(one) if own is None else own)
                exported |= {one[1] for one in sets if one is not None and words[0].raw in ("export", "declare")}
            elif words and words[0].raw == "export":
                exported |= {word.raw for word in words[1:]}
            elif words and words[0].raw in ("for", "read", "unset"):
                for word in words[1:]:
                    values.setdefault(word.raw, set()).add("\n")
        for name in {*_SET.findall(text)} - values.keys() - defaults.keys():
            values[name] = {"\n"}
        assumed = {name: said for name, said in defaults.items() if name not in values}
        plain = {
            name: next(iter(said)) if len(said) == 1 and "\n" not in said else None
            for name, said in (values | assumed).items()
        }
        known = {name: one[0] for name, one in arrays.items() if len(one) == 1}
        settled, uses = _settled(_without_outer(plain))
        for name in assumed:
            if (by_default := settled.get(name)) is not None:
                uses[name].assumed[name] = by_default
        return cls(settled, known, frozenset(exported), sought, uses)

    @cached_property
    def given(self) -> tuple[dict[str, str], dict[str, tuple[tuple[str, str], ...]]]:
        """The exported variables that are known, and what is assumed in the values of all that are exported."""
        known = {name: value for name in self.exported if (value := self.values.get(name)) is not None}
        return known, {name: self.assumed(_Uses({name})) for name in self.exported}

    def assumed(self, uses: _Uses) -> tuple[tuple[str, str], ...]:
        """Everything that is assumed where these variables are read, also in the values of those that are set."""
        found, seen, left = dict(uses.assumed), set[str](), list(uses.set_)
        while left:
            name = left.pop()
            if name not in seen and name in self.uses:
                found |= self.uses[name].assumed
                left += self.uses[name].set_
            seen.add(name)
        return tuple(found.items())

    def commands(
        self, text: str, start: int, before: tuple[Word, ...] = (), folder: str | None = None
    ) -> Iterator[Command]:
        """The commands in a text that begins at ``start``, and those in the shells that it starts."""
        for raw in map(_own, _split(text, start)):
            words = self._expanded(raw)
            if not words:
                continue
            own = {one[1]: one[3] for word in words if (one := _ASSIGNED.fullmatch(word.text))}
            here, outer = self.given
            both = ChainMap(own, here) if own else here  # thousands of commands share what is exported
            yield Command(words=words, before=before, folder=folder, exported=both, assumed=outer)
            yield from self._inside(words, before, folder)
            folder = _gone(folder, [word.text for word in words])

    def _inside(self, words: tuple[Word, ...], before: tuple[Word, ...], folder: str | None) -> Iterator[Command]:
        """The commands in the words of a command: those of a shell that it starts, and of values that it sets."""
        if sum(word.text in _STARTS for word in before) >= _DEEPEST:
            return
        for i, word in enumerate(words):
            behind = i > 0 and (words[i - 1].text in _STARTS or words[0].text in _ELSEWHERE)
            name, _, value = word.raw.partition("=")
            kept = bool(re.fullmatch(r"\w+", name)) and re.fullmatch(r"([\"'])(.*\s.*)\1", value, re.DOTALL) is not None
            if kept and not self.sought.search(word.text):
                continue
            raw, at = (value, word.at + len(name) + 1) if kept else (word.raw, word.at)
            if not kept and not (behind and re.search(r"\s|\$", word.text or "")):
                continue
            quoted = raw[:1] in ("'", '"')
            inner = _unescaped(raw[1:-1]) if quoted else word.text
            for one in self.commands(inner, at + quoted, (*before, *words[:i], Word("-c", at)), folder):
                yield evolve(one, kept=one.kept or kept)

    def _expanded(self, words: Iterable[Word]) -> tuple[Word, ...]:
        every: list[Word] = []
        for word in words:
            items, alone = _ITEMS.fullmatch(word.raw), _NAME.fullmatch(word.raw)
            if items and items[1] in self.arrays:
                every += map(self._meant, self.arrays[items[1]])
            elif alone and _value(alone, self.values, uses := _Uses()) is not None:
                pieces = (piece for line in _split(_filled(word.raw, self.values, uses), 0) for piece in line)
                every += [Word(unquoted(one.raw), word.at, one.raw, self.assumed(uses)) for one in pieces]
            else:
                every.append(self._meant(word))
        return tuple(every[:_LONGEST])

    def _meant(self, word: Word) -> Word:
        """The word with what it means."""
        uses = _Uses()
        return evolve(word, text=_valued(word.raw, self.values, uses), assumed=self.assumed(uses))


def _unescaped(quoted: str) -> str:
    """The text without backslashes, and as long: what stands for one ends no word that it is inside of."""
    return re.sub(r"(?<=[^\s\\])\\", _NOTHING, quoted).replace("\\", " ")


def _gone(folder: str | None, words: list[str]) -> str | None:
    """The folder after a command: one that only the run knows is where the script lies, or unknown."""
    if words[0] not in ("cd", "pushd") or len(words) < 2:
        return folder
    return None if "$" in words[1] or words[1] == "-" else f"{folder}/{words[1]}" if folder else words[1]


# --- values ----------------------------------------------------------------------------------------------------------


def _valued(word: str, values: Values, uses: _Uses) -> str:
    """The word as a shell makes it, where the script says all of it; the rest stays as written."""
    return unquoted(word if word.startswith("'") else _put(word, values, uses))


def _own_default(assigned: re.Match[str]) -> str | None:
    """What ``N=${N:-8}`` takes the variable for where nothing has set it."""
    own = _OWN_DEFAULT.fullmatch(assigned[3])
    return own[3] if own is not None and own[2] == assigned[1] and not assigned[2] else None


def _plainly(assigned: re.Match[str]) -> str:
    """The value that an assignment gives as it stands; a line's end where only the run knows it."""
    return "\n" if assigned[2] or _RUN.match(_HERE.sub(".", assigned[3])) else assigned[3]


def _without_outer(values: Values) -> Values:
    """Values without variables that hold what comes from outside, as ``N=$1`` does: nothing here sets them."""
    outer = {name: one[2] or one[3] for name, value in values.items() if (one := _FROM_OUTSIDE.fullmatch(value or ""))}
    return {name: value for name, value in values.items() if name not in outer or outer[name] in values}


def _settled(values: Values) -> tuple[dict[str, str | None], dict[str, _Uses]]:
    """Values with those that stand in them; one of several words may have some that only the run knows."""
    uses = {name: _Uses() for name in values}
    settled = {
        name: value if value is None or re.search(r"\s", value) else unquoted(value) for name, value in values.items()
    }
    for _ in range(_DEEPEST):
        others = {
            name: value and re.sub(r"^([\"'])(.*)\1$", r"\2", value, flags=re.DOTALL) for name, value in settled.items()
        }
        settled = {name: value and _put(value, others, uses[name]) for name, value in others.items()}
    return {
        name: None if value is None or (re.search(r"[$`]", value) and not re.search(r"\s", value)) else value
        for name, value in settled.items()
    }, uses


def _put(value: str, others: Values, uses: _Uses) -> str:
    with_sums = _SUM.sub(lambda found: _worked_out(found[1], others, uses) or found[0], _HERE.sub(".", value))
    return _filled(with_sums, others, uses)


def _filled(text: str, values: Values, uses: _Uses) -> str:
    """The text with the values in it, as far as they are not too long together."""
    left = _LONGEST

    def value(found: re.Match[str]) -> str:
        nonlocal left
        said = _value(found, values, uses)
        if said is None or len(said) > left:
            return found[0]
        left -= len(said)
        return said

    for _ in range(_DEEPEST):  # defaults stand in each other
        before, text = text, _NAME.sub(value, text)
        if "${" not in text or text == before:
            break
    return text


def _value(found: re.Match[str], values: Values, uses: _Uses) -> str | None:
    """What a shell puts in the place of a variable; None where only the run knows. Notes which variable was read."""
    name, sign = found["braced"] or found["plain"], found["sign"] or ""
    said = values.get(name)
    if said or (name in values and not (said == "" and sign in (":-", ":="))):
        uses.set_.add(name)
        return said
    if sign[-1:] not in ("-", "="):
        return None
    default: str = found["default"]
    if name not in values and not re.search(r"[$`]", default):
        uses.assumed[name] = unquoted(default)
    return default


def _worked_out(sum_: str, values: Values, uses: _Uses) -> str | None:
    """Sums and products of whole numbers, without parentheses."""
    filled = _filled(sum_, values, uses)
    plain = re.sub(r"([A-Za-z]\w*)", lambda found: values.get(found[1]) or found[0], filled).replace(_NOTHING, "")
    if not re.fullmatch(r"\d{1,9}([-+*/]\d{1,9})*", plain):
        return None
    total = 0
    for sign, product in re.findall(r"([-+]?)([^-+]+)", plain):
        first, *others = re.split(r"([*/])", product)
        worked = int(first)
        for operator, number in zip(others[::2], map(int, others[1::2]), strict=True):
            if operator == "/" and number == 0:
                return None
            worked = worked * number if operator == "*" else worked // number
        total += -worked if sign == "-" else worked
    return str(total)
