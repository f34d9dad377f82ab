"""Sizes and retention in words, as every command and page shows them. `validation.age` has durations."""

from __future__ import annotations

from eventsql_orchestration.model import Retention
from eventsql_orchestration.validation import age, counted


def size(number: int) -> str:
    """A number of bytes."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 2**power:
            # Round a number that is not whole in this unit.
            return f"{number / 2**power:,.4g} {unit}"
    return counted(number, "byte")


def kept(retention: Retention | None) -> str:
    """The part of a topic that retention keeps."""
    bounds = retention or Retention()
    texts = [] if bounds.seconds is None else [age(bounds.seconds)]
    if bounds.bytes is not None:
        texts.append(size(bounds.bytes))
    if bounds.events is not None:
        texts.append(counted(bounds.events, "event"))
    return ", ".join(texts) or "for ever"
