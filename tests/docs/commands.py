"""The command line as a page, from its own help."""

from __future__ import annotations

import click

from prepkit.cli import main

_HEAD = """# Command line

`prepkit COMMAND --help` prints the same. Exit codes: 0 fine, 1 findings or differences, 2 used wrongly. `show`,
`diff`, `rules`, `report`, and `check` on a plan file never import torch. `--json` prints for scripts.
"""


def page() -> str:
    """One section per command."""
    lines = [_HEAD]
    for name, command in sorted(main.commands.items()):
        words = main.context_settings  # of the group: a command keeps the first names of --help that it was asked for
        context = click.Context(
            command, info_name=f"prepkit {name}", terminal_width=100, max_content_width=100, **words
        )
        lines += [f"## prepkit {name}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(lines)
