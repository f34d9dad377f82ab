"""The errors of runs, and of orchestrators on this machine."""

from __future__ import annotations

from eventsql_orchestration.errors import EventSQLError

# Runs of an orchestrator


class FunctionExitedError(EventSQLError):
    """A consumer's function called `sys.exit()`, which counts as a failure of the function."""


class FinalRunError(EventSQLError):
    """A run failed, and a retry would only repeat the failure."""

    def __init__(self, message: str | None = None, **facts: str | int) -> None:
        """`facts` are texts and numbers by their names, for the record of the run."""
        super().__init__(message)
        self.facts = facts


class ReplayError(FinalRunError):
    """A range cannot be replayed, and none of its events was."""


class NotCommittedError(FinalRunError):
    """A function over a range ended without a commit of its claim."""


class RangeFailedError(FinalRunError):
    """A range failed as a whole and was released: it is claimed again after a pause."""


class WindowFailedError(FinalRunError):
    """The window of a backfill cannot be replayed further."""


class WindowGoneError(FinalRunError):
    """The window of a run is not registered: its backfill is finished, or was deleted."""


class ForeignClaimError(FinalRunError):
    """A run was launched with the claim of another consumer, and has not touched the claim."""


# Orchestrators on this machine


class LocalProcessError(EventSQLError):
    """A process of `eventsql dev` did not start or ended, or another `eventsql dev` is in the way."""


class LocalDagsterError(LocalProcessError):
    """Dagster did not start, could not load the code location, or ended."""


class LocalAirflowError(LocalProcessError):
    """Airflow did not start, could not import the DAGs, or one of its parts has ended."""


class AirflowAnswerError(LocalAirflowError):
    """Airflow refused a request. `status` is the status of HTTP."""

    def __init__(self, message: str | None = None, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class RunFailedError(EventSQLError):
    """A run of Dagster or Airflow failed, or could not be launched."""


class RoundError(EventSQLError):
    """A round ended with events that are missing, repeated or left over."""
