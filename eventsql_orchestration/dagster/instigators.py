"""The stored states of a location's sensors and schedules: whether each is switched on, and where its ticks are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg


def states_of(instance: dg.DagsterInstance, origin: Any, repository: str | None) -> Sequence[Any]:
    """The stored states of the sensors and schedules of a repository, in the code location of this origin.

    Other locations of the instance may have sensors and schedules with the same names. Empty without an origin.
    """
    if origin is None or instance.schedule_storage is None:
        return ()
    return [
        state
        for state in instance.all_instigator_state()
        if state.origin.repository_origin.code_location_origin.location_name == origin.location_name
        and state.origin.repository_origin.repository_name == repository
    ]
