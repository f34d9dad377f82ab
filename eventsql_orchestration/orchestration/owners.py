"""The names of claims' owners by which an orchestrator finds its own runs."""

from __future__ import annotations

from eventsql_orchestration.consuming.claim_pruning import RUN_OWNER


def owner_of_run(run_id: str) -> str:
    """The owner name of a claim that a run has taken over."""
    return RUN_OWNER + run_id


def run_of_owner(owner: str) -> str | None:
    """The run that owns a claim; None for any other owner, for example a tick."""
    return owner.removeprefix(RUN_OWNER) if owner.startswith(RUN_OWNER) else None
