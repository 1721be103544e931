"""Text to people's terminals and to pipes: colour only where somebody looks, and no complaint when a reader leaves."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import IO, Any

import click

from prepkit.codec.text import readable
from prepkit.findings.text import harmless

COLOURS: tuple[str, ...] = (
    r"\A(?P<bold>\w+ plan for .*)",
    r"(?m)^ +[0-9]+  (?P<cyan>[A-Z][A-Za-z0-9]+)  ",
    r"(?m)^ +(?P<dim>because .*)$",
    r"(?m)^(?P<bold>steps|layout|structure|memory|traffic|warnings|overridden)\b",
    r"(?m)^ *(?P<red>error) ",
    r"(?m)^ *(?P<yellow>warning) ",
    r"(?m)^ *(?P<green>fix:) ",
    r"(?m)^ *(?P<green>\+ .*)$",
    r"(?m)^ *(?P<red>- .*)$",
)
"""Regular expressions over the plain text; the name of a group is the style that rich gives to what it matches."""


def forgive() -> None:
    """From now on a character that the terminal's encoding lacks is shown as its escape; it ends no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str, *, err: bool = False) -> None:
    """Prints a text and a line break, in colour on a terminal."""
    stream = sys.stderr if err else sys.stdout
    text = harmless(text)
    _write(painted(text, stream) if stream is not None and stream.isatty() else text, stream)


def say_json(data: Any) -> None:
    """Prints JSON for scripts, without colour."""
    _write(readable(data), sys.stdout)


def say_as_it_is(text: str) -> None:
    """Prints lines for another program, such as a patch, with every character that they have; harmless to terminals."""
    looked_at = sys.stdout is not None and sys.stdout.isatty()
    _write(painted(harmless(text), sys.stdout) if looked_at else text, sys.stdout, end=False)


def _write(text: str, stream: IO[str] | None, *, end: bool = True) -> None:
    """A pipe whose reader has left swallows the text: ``prepkit show plan.json | head`` is no fault.

    Neither is a stream that the caller has closed. One that can hold no more ends the command, in words.
    """
    if stream is None:
        return
    try:
        click.echo(text, file=stream, nl=end)
    except OSError as error:
        # What is still buffered would complain again when the interpreter closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise click.ClickException(f"the output cannot be written: {error.strerror}") from None


def painted(text: str, stream: IO[str]) -> str:
    """The text with the terminal's colour codes; rich leaves them out under ``NO_COLOR`` and on a dumb terminal."""
    from rich.console import Console  # half of the start-up time, and pipes never need it
    from rich.text import Text

    drawn = Text(text)
    for pattern in COLOURS:
        drawn.highlight_regex(pattern)
    console = Console(file=stream)
    with console.capture() as captured:
        console.print(drawn, soft_wrap=True, end="")
    return captured.get()
