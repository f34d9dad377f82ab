"""What an observation of a consumer with hundreds of partitions says, and how large it is."""

from __future__ import annotations

import dagster as dg

from eventsql_orchestration.dagster.lag import SHOWN_PARTITIONS, AssetLag
from eventsql_orchestration.log.lag import ConsumerLag, LagCause

PARTITIONS = 300


def lag_of(partition: int, events: int) -> ConsumerLag:
    leased = events > 0
    return ConsumerLag(
        topic="orders", consumer="ledger", partition=partition, events=events, seconds=events / 10, last_event_id=1,
        end=1 + events, buffered=0, cause=LagCause.LEASED if leased else LagCause.NONE,
        detail=f"by run 0b5e9d5c-6f0e-4c8e-9a3e-{partition:012d}" if leased else "",
    )  # fmt: skip


def observed(partitions: int) -> AssetLag:
    """The higher its number, the further a partition is behind; the first is not."""
    return AssetLag(tuple(lag_of(partition, partition) for partition in range(partitions)))


def test_an_observation_of_hundreds_of_partitions_stays_small() -> None:
    metadata = observed(PARTITIONS).metadata()
    event = dg.AssetObservation(asset_key="ledger", metadata=metadata)
    assert len(dg.serialize_value(event)) < 20_000


def test_the_totals_are_of_all_and_the_furthest_behind_are_told_apart() -> None:
    metadata = observed(PARTITIONS).metadata()
    assert metadata["lag events"] == sum(range(PARTITIONS))
    assert metadata["partitions behind"] == PARTITIONS - 1
    shown = {partition for partition in range(PARTITIONS) if f"lag events [{partition}]" in metadata}
    assert shown == set(range(PARTITIONS - SHOWN_PARTITIONS, PARTITIONS))
    assert f"consumed by [{PARTITIONS - 1}]" in metadata
    assert metadata["cause"].startswith(f"[{PARTITIONS - SHOWN_PARTITIONS}] leased: by run ")
    assert metadata["cause"].endswith(f"; {PARTITIONS - 1 - SHOWN_PARTITIONS} more partitions are behind")


def test_few_partitions_are_all_told_apart() -> None:
    metadata = observed(SHOWN_PARTITIONS).metadata()
    assert all(f"lag events [{partition}]" in metadata for partition in range(SHOWN_PARTITIONS))
    assert "more partitions" not in metadata["cause"]
