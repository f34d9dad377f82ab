"""The stored states of a location's sensors and schedules: whether each is switched on, and where its ticks are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg


def states_of(instance: dg.DagsterInstance, location: Any, repository: str | None) -> Sequence[Any]:
    """The stored states of the sensors and schedules of one location; empty if `location`, its origin, is None.

    Other locations of the instance may have sensors and schedules with the same names.
    """
    if location is None or instance.schedule_storage is None:
        return ()
    return [
        state
        for state in instance.all_instigator_state()
        if state.origin.repository_origin.code_location_origin.location_name == location.location_name
        and state.origin.repository_origin.repository_name == repository
    ]
