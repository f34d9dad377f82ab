"""Errors that a retry would only repeat, as failures that Dagster does not retry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from eventsql_orchestration.orchestration.errors import FinalRunError


@contextmanager
def without_retries() -> Iterator[None]:
    """Raise a `FinalRunError` of the block as `dagster.Failure`, which Dagster does not retry."""
    try:
        yield
    except FinalRunError as error:
        cause = error.__cause__
        facts = {**error.facts, **(cause.metadata if isinstance(cause, dg.Failure) else {})}
        raise dg.Failure(error.message, metadata=facts, allow_retries=False) from cause
