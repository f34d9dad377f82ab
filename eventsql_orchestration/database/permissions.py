"""What the server's refusal for want of a right means: which role lacks which role or GRANT."""

from __future__ import annotations

import re
from typing import Final

from eventsql_orchestration.database.grants import DEFAULT_PREFIX, KINDS
from eventsql_orchestration.errors import PermissionDeniedError

_OBJECT: Final = re.compile(
    r"(?:permission denied for|must be owner of) (?P<kind>[a-z ]+?)(?: \"?(?P<name>[^\"]+)\"?)?$"
)

_READS: Final = ("reader", "reads it")
_CONSUMES: Final = ("consumer", "consumes")
_PUBLISHES: Final = ("publisher", "publishes")
_MOVES: Final = ("transfer", "moves events")
_STAGES: Final = ("stager", "publishes what Spark or an asset has staged")

_NEEDED: Final = {
    "event_buffer": (_PUBLISHES, _MOVES),
    "event_buffer_eql_id_seq": (_PUBLISHES, _MOVES),
    "hold_topics": (_PUBLISHES,),
    "event_buffer_lock": (_MOVES,),
    "ensure_segments": (_MOVES,),
    "consumer": (_CONSUMES, _READS),
    "consumer_claim": (_CONSUMES, _READS),
    "enter_layout": (_CONSUMES,),
    "topic": (_READS,),
    "topic_layout": (_READS,),
    "schema_version": (_READS,),
    "spark_staged_event": (_STAGES,),
    "spark_publication": (_STAGES, _READS),
    "spark_decision": (_STAGES, _READS),
    "spark_part": (_STAGES, _READS),
    "redriven_dead_letter": (_READS,),
}


def permission_error(detail: str, where: str, role: str | None, prefix: str | None) -> PermissionDeniedError:
    """The error of ours for a right that the current role lacks; `detail` is how the server says it.

    `role` is that role, as far as it is known, and `prefix` what the names of this installation's roles begin with;
    None where it has none.
    """
    found = _OBJECT.search(detail)
    kind, name = (found["kind"], found["name"]) if found is not None else ("", None)
    needed: tuple[tuple[str, str], ...] = ()
    if kind == "topic":
        needed = (_PUBLISHES,)
    elif kind == "schema":
        needed = tuple((each, "") for each in KINDS[1:])
    elif name is not None and detail.startswith("permission"):
        # A log, or a segment or sequence of one, is named after its topic.
        log = "_event" in name or "_segment_" in name
        needed = _NEEDED.get(name, (_READS, _CONSUMES, _MOVES) if log else ())
    advice = _advice(needed, kind, name, role, prefix)
    return PermissionDeniedError(
        f"{where} refuses role {role or 'of this connection'!r} ({detail}): {advice}",
        role=role,
        object=name,
    )


def _advice(
    needed: tuple[tuple[str, str], ...], kind: str, name: str | None, role: str | None, prefix: str | None
) -> str:
    to = f'"{role}"' if role else "it"
    roles = [*needed, ("admin", "changes it" if needed else "")]
    if kind == "topic" and name:
        roles.insert(1, (f"publisher_{name}", "publishes to this topic alone"))
    named = ", or ".join(
        f"`GRANT {prefix or DEFAULT_PREFIX}_{each} TO {to}`" + (f", which {does}" if does else "")
        for each, does in roles
    )
    return named if prefix else f"{named}; `eventsql roles create` makes these roles"
