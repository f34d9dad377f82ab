"""Advice for a statement that the server refused: the role that lacks a right, and the GRANT that gives it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from eventsql_orchestration.database import grants
from eventsql_orchestration.database.grants import ADMIN, DEFAULT_PREFIX, KINDS
from eventsql_orchestration.errors import PermissionDeniedError

_OBJECT: Final = re.compile(
    r"(?:permission denied for|must be owner of) (?P<kind>[a-z ]+?)(?: \"?(?P<name>[^\"]+)\"?)?$"
)

_DOES: Final[Mapping[str, str]] = {
    "reader": "reads it",
    "publisher": "publishes",
    "transfer": "moves events",
    "stager": "publishes what Spark or an asset has staged",
    "consumer": "consumes",
    ADMIN: "changes it",
}
"""What a member of each kind of role does with an object."""


def permission_error(detail: str, where: str, role: str | None, prefix: str | None) -> PermissionDeniedError:
    """The error for a right that the current role lacks. `detail` is the server's message.

    `role` is the current role, as far as it is known. `prefix` begins the names of this installation's roles; None
    where it has none.
    """
    found = _OBJECT.search(detail)
    kind, name = (found["kind"], found["name"]) if found is not None else ("", None)
    to = f'"{role}"' if role else "it"
    named = ", or ".join(
        f"`GRANT {prefix or DEFAULT_PREFIX}_{each} TO {to}`" + (f", which {does}" if does else "")
        for each, does in _needed(kind, name, detail)
    )
    advice = named if prefix else f"{named}; `eventsql roles create` makes these roles"
    return PermissionDeniedError(
        f"{where} refuses role {role or 'of this connection'!r} ({detail}): {advice}", role=role, object=name
    )


def _needed(kind: str, name: str | None, detail: str) -> Sequence[tuple[str, str]]:
    """The roles that have the right, by the end of their names, and what each does."""
    if kind == "topic":
        alone = [(f"publisher_{name}", "publishes to this topic alone")] if name else []
        return [("publisher", _DOES["publisher"]), *alone, (ADMIN, _DOES[ADMIN])]
    if kind == "schema":
        return [*((each, "") for each in KINDS[1:]), (ADMIN, _DOES[ADMIN])]
    if name is None or not detail.startswith("permission"):
        return [(ADMIN, "")]

    kinds = grants.kinds_for(name)
    # A log, and a segment or sequence of a log, is named after its topic.
    if not kinds and ("_event" in name or "_segment_" in name):
        kinds = grants.KINDS_FOR_LOGS
    return [*((each, _DOES[each]) for each in kinds), (ADMIN, _DOES[ADMIN] if kinds else "")]
