"""The command line as a page, from its own help."""

from __future__ import annotations

import click

from prepkit.cli import main

_HEAD = """# Command line

`prepkit COMMAND --help` prints the same. Exit codes: 0 fine, 1 findings or differences, 2 used wrongly; of `audit`
also 3, where the script itself failed, and of `audit --prove` and `prove` 4, where nothing seen is wrong and the window
could not be proven. `show`,
`diff`, `rules`, `import`, `export` and `report` never import torch, nor does a `--model` that is a folder. `--json`
prints for scripts.

The shell completes commands and options once it has read one line, which goes into `~/.bashrc`, `~/.zshrc` or
`~/.config/fish/completions/prepkit.fish`:

```text
eval "$(_PREPKIT_COMPLETE=bash_source prepkit)"
eval "$(_PREPKIT_COMPLETE=zsh_source prepkit)"
_PREPKIT_COMPLETE=fish_source prepkit | source
```
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
