"""What drives the reference location: consumer sensors, the transfer, lag and housekeeping."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from eventsql_orchestration.dagster import (
    ConsumerDefinition,
    build_housekeeping_schedule,
    build_lag_sensor,
    build_transfer_schedule,
)


def consumer_sensors(consumers: Sequence[ConsumerDefinition]) -> list[dg.SensorDefinition]:
    """One sensor for each partition of each consumer."""
    return [sensor for consumer in consumers for sensor in consumer.sensors]


def lag_sensor(consumers: Sequence[ConsumerDefinition]) -> dg.SensorDefinition:
    """Observes every consumer's lag."""
    return build_lag_sensor(consumers)


transfer = build_transfer_schedule()
housekeeping = build_housekeeping_schedule()
