"""The keys of `eventsql topic erase` and `eventsql queue erase`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import click

from eventsql_orchestration.cli.parameters import FILE, option
from eventsql_orchestration.errors import InputError

ErasedKeys = Annotated[tuple[str, ...], option("Erase what has this key; repeat it.", "--key", metavar="KEY")]
FileOfKeys = Annotated[Path | None, option("Erase what has a key in FILE, one a line.", type=FILE)]


def read_keys(keys: Iterable[str], file: Path | None) -> list[str]:
    """The given keys and those of a file, sorted. Raises `UsageError` without a key, and `InputError`."""
    wanted = sorted({*keys, *(() if file is None else _keys_of(file))})
    if not wanted:
        raise click.UsageError("give the keys to erase: --key KEY, or --key-file FILE")
    return wanted


def _keys_of(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{file} is not text in UTF-8: write one key a line") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
    return [line for line in text.split("\n") if line]
