"""The location of `location.py`, for a daemon whose runs are forks."""

from tests.dagster.forking import fork_runs
from tests.dagster.location import defs

__all__ = ["defs"]

fork_runs("tests.dagster.location")
