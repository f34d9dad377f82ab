"""The values of events: the same for every orchestrator."""

import json
from collections.abc import Iterable
from typing import Any

from eventsql_orchestration import Event


def json_values(events: Iterable[Event]) -> list[Any]:
    """The value of each event, read as JSON. An erased event has no value and is left out."""
    return [json.loads(event.value) for event in events if not event.erased]
