"""`eventsql completion`: the script that makes Tab complete names in a shell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import click
from click.shell_completion import get_completion_class

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import write
from eventsql_orchestration.cli.parameters import argument, command

_SHELLS: Final = ("bash", "zsh", "fish")


@command()
def completion(
    context: CliContext,  # noqa: ARG001 - every command takes it
    shell: Annotated[str | None, argument(type=click.Choice(_SHELLS))],
) -> None:
    """Print the script that makes Tab complete commands, options, topics and consumers.

    Without an argument, it is the script of the shell in $SHELL. For bash, add this line to ~/.bashrc, for zsh to
    ~/.zshrc: eval "$(eventsql completion)". For fish: eventsql completion fish >
    ~/.config/fish/completions/eventsql.fish.
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in _SHELLS:
        raise click.UsageError(f"name the shell: {', '.join(_SHELLS[:-1])} or {_SHELLS[-1]}")
    kind = get_completion_class(name)
    assert kind is not None, "click knows these shells"
    write(kind(click.get_current_context().find_root().command, {}, "eventsql", "_EVENTSQL_COMPLETE").source() + "\n")
