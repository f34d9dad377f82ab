"""The options of a read of the event store, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.errors import ConfigurationError, ValidationError
from eventsql_orchestration.spark.options import (
    AGGREGATES,
    DATABASE,
    READ,
    TASKS,
    Given,
    Source,
    TaskOptions,
    naming_option,
)
from eventsql_orchestration.validation import check_name

ALL: Final = "*"

_CHANGES: Final = (*DATABASE, AGGREGATES, "kinds", "afterCheckpoint", "uptoCheckpoint", *TASKS)


def reads_changes(options: Mapping[str, str]) -> bool:
    """Whether these are the options of a read of the event store."""
    return any(name.lower() == AGGREGATES for name in options)


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """The options of a read of the event store.

    `types` and `kinds` are None for all. `after` and `upto` are checkpoints as text, None for the first and the newest
    change.
    """

    source: Source
    types: tuple[str, ...] | None
    kinds: tuple[str, ...] | None
    after: str | None
    upto: str | None
    tasks: TaskOptions

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ChangeOptions:
        """Raises `ConfigurationError` or `ValidationError`."""
        given = Given(options, (*_CHANGES, *READ))
        given.refuse("it is for topics, and aggregates is given", *(name for name in READ if name not in _CHANGES))
        source = given.source()
        if len(source.urls) > 1:
            raise ConfigurationError(
                "option aggregates: each shard has an event store of its own, and dsn names several: name one URL"
            )
        return cls(
            source=source,
            types=_names(given, AGGREGATES, "aggregate type"),
            kinds=_names(given, "kinds", "kind of change"),
            after=given.text("afterCheckpoint"),
            upto=given.text("uptoCheckpoint"),
            tasks=TaskOptions.of(given),
        )


def _json_list(text: str) -> list[object]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not names:
        raise ValidationError('this is not a JSON list of names: write one such as ["order", "ride"]')
    return names


def _names(given: Given, option: str, what: str) -> tuple[str, ...] | None:
    text = given.text(option)
    if text is None or text.strip() == ALL:
        return None
    with naming_option(f"option {option}"):
        # JSON has room for names with commas.
        listed = _json_list(text) if text.lstrip().startswith("[") else map(str.strip, text.split(","))
        names = tuple(check_name(what, name) for name in listed)
        if ALL in names:
            raise ValidationError(f"{ALL} is all of them: leave the other names out")
    return names
