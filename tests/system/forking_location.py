"""The location of `operated_location.py`, for a daemon whose runs are forks."""

from tests.dagster.forking import fork_runs
from tests.system.operated_location import defs

__all__ = ["defs"]

fork_runs("tests.system.operated_location")
