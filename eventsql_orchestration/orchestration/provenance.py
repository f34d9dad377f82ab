"""The publishing run and its asset or task, in the metadata of events and in the record of a publication."""

from __future__ import annotations

import json
import re
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

SHARD: Final = "eventsql_shard"
"""In an event's metadata: the shard whose events the run consumed to make this event."""

DAGSTER_RUN: Final = "dagster_run_id"
DAGSTER_ASSET: Final = "dagster_asset_key"
DAGSTER_PARTITION: Final = "dagster_partition"
"""In the metadata of an event that a Dagster run has published."""

AIRFLOW_DAG: Final = "airflow_dag_id"
AIRFLOW_RUN: Final = "airflow_run_id"
AIRFLOW_TASK: Final = "airflow_task_id"
AIRFLOW_MAP_INDEX: Final = "airflow_map_index"
"""In the metadata of an event that an Airflow task has published."""

_RUN: Final = "run "
_CLAIM: Final = re.compile(r"claim (?P<id>\d+)(?: of (?P<shard>.+))?")


@dataclass(frozen=True, slots=True)
class Provenance(ABC):
    """The origin of events: a run, and the asset or task and the partition that it computes, if any.

    `root_run_id` is the same for a run and for all of its retries and re-executions. `shard` is the shard that the run
    consumes on; None if there is one database.
    """

    run_id: str
    root_run_id: str
    asset: str | None = None
    partition: str | None = None
    shard: str | None = None

    @abstractmethod
    def _names(self) -> dict[str, str | None]:
        """The names of the run, the asset or task and the partition, as the orchestrator's users know them."""

    def metadata(self) -> dict[str, str]:
        """The metadata by which every event names its origin, and the current span of a program that traces."""
        named = {name: text for name, text in {**self._names(), SHARD: self.shard}.items() if text is not None}
        tracing = sys.modules.get("eventsql_orchestration.tracing")
        return named if tracing is None else {**named, **tracing.current_context()}

    def writer(self, topic: str, *, claim: int | None = None, output: str | None = None) -> str:
        """The id under which a publication is recorded. It is the same for every repetition of the publication.

        It names the claim, which is on `shard`, or else the root run. `output` is the step or the output that
        publishes.
        """
        of = "" if self.shard is None else f" of {self.shard}"
        cause = f"{_RUN}{self.root_run_id}" if claim is None else f"claim {claim}{of}"
        return json.dumps([self.asset, output, self.partition, topic, cause], ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Writer:
    """The parts of a `Provenance.writer`: its asset, and either its claim with the claim's shard, or its root run."""

    asset: str | None = None
    claim: int | None = None
    shard: str | None = None
    run: str | None = None

    @classmethod
    def read(cls, writer: str) -> Writer:
        """Read the id of a writer; nothing is known of an id of another form."""
        try:
            parts = json.loads(writer)
        except ValueError:
            parts = None
        if not isinstance(parts, list) or not parts:
            return cls()
        asset = parts[0] if isinstance(parts[0], str) else None
        cause = parts[-1] if isinstance(parts[-1], str) else ""
        if (found := _CLAIM.fullmatch(cause)) is not None:
            return cls(asset, claim=int(found["id"]), shard=found["shard"])
        return cls(asset, run=cause.removeprefix(_RUN) if cause.startswith(_RUN) else None)
