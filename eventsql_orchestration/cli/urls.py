"""URLs of databases that the user does not name on the command line: asked for, or read from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from eventsql_orchestration.errors import ConfigurationError

ASK: Final = "-"
"""Stands for a URL that the program asks for."""


def ask_for_url(what: str = "URL of the database") -> str:
    """Ask for a URL on the terminal, without an echo."""
    return str(click.prompt(what, hide_input=True, err=True)).strip()


def urls_of_file(file: Path) -> str:
    """The URLs in a file. Raises `ConfigurationError`, without a quotation of the file."""
    try:
        text = file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{file} is not text in UTF-8: write the URL of the database into it") from None
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror or error}") from None
    if not text:
        raise ConfigurationError(f"{file} is empty: write the URL of the database into it")
    return text
