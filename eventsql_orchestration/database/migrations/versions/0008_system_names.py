"""Functions that run in anybody's session name the system's functions and operators in full."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import exists, install

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    install("layouts", "publishing")
    # `storage/legacy_writer_trigger.py` makes it where it is needed first.
    if exists("place_in_layout()"):
        install("guards")
