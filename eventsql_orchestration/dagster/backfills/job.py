"""The Dagster job of a consumer's backfills: its tags, and the config of its runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG, BACKFILL_TAG, DAGSTER_PARTITION_TAG, shard_tags
from eventsql_orchestration.orchestration.backfills.launcher import BackfillJob
from eventsql_orchestration.orchestration.backfills.windows import read_key

DEFINE_IT: Final = (
    "give the code location `build_definitions(…, backfills=True)`, or the asset and the jobs of `build_backfill(…)`; "
    "then reload the location if it runs already"
)


@dataclass(frozen=True, slots=True)
class DagsterJob(BackfillJob):
    """The job that replays a consumer, and the name of its dynamic partitions.

    `of` names the consumer in the tags of runs: backfills of several consumers may have the same id. `location` is that
    of a webserver's job.
    """

    partitions: str
    of: str
    repository: str
    location: str = ""

    def tags(self, backfill_id: str) -> dict[str, str]:
        """The tags by which the runs of a backfill are found."""
        return {BACKFILL_TAG: backfill_id, BACKFILL_OF_TAG: self.of}

    def run_tags(self, backfill_id: str, key: str) -> dict[str, str]:
        """The tags of the run of a partition key."""
        _, window, _ = read_key(key)
        return {DAGSTER_PARTITION_TAG: key, **self.tags(backfill_id), **shard_tags(window.shard)}

    def config(self, max_failures: int | None) -> dict[str, Any]:
        """The config of a run. The name of the partitions is the key of the asset, and ends with the run's only op."""
        op = self.partitions.rpartition("/")[2]
        return {} if max_failures is None else {"ops": {op: {"config": {"max_failures": max_failures}}}}
