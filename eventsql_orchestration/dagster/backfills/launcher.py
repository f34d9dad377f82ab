"""Where the runs of a backfill are launched: the interface of both launchers, and the values that they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG, BACKFILL_TAG, DAGSTER_PARTITION_TAG, shard_tags
from eventsql_orchestration.orchestration.backfills.windows import read_key

DEFINE_IT: Final = "give the code location `build_backfill(…)` of the consumer: its asset and its jobs"


@dataclass(frozen=True, slots=True)
class BackfillJob:
    """The job that replays a consumer, the name of its dynamic partitions, and the assets that it materializes.

    `of` names the consumer in the tags of runs: backfills of several consumers may have the same id.
    """

    name: str
    partitions: str
    assets: tuple[str, ...]
    of: str
    location: str = ""
    repository: str = ""

    def tags(self, backfill_id: str) -> dict[str, str]:
        """The tags by which the runs of a backfill are found."""
        return {BACKFILL_TAG: backfill_id, BACKFILL_OF_TAG: self.of}

    def run_tags(self, backfill_id: str, key: str) -> dict[str, str]:
        """The tags of the run of a partition key."""
        _, window, _ = read_key(key)
        return {DAGSTER_PARTITION_TAG: key, **self.tags(backfill_id), **shard_tags(window.shard)}

    def config(self, max_failures: int | None) -> dict[str, Any]:
        """The config of a run. Its only op has the name of the asset, and so have the partitions."""
        return {} if max_failures is None else {"ops": {self.partitions: {"config": {"max_failures": max_failures}}}}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended; `why` is the reason if it failed."""

    succeeded: bool
    why: str = ""


class Launcher(Protocol):
    """Launches the runs of backfills, and tells how they end."""

    outlives: bool
    """Whether runs go on after the command ends."""

    def job(self, topic: str, consumer: str) -> BackfillJob:
        """The job of a consumer's backfills. Raises `ValidationError` if there is none."""

    def require_running(self) -> None:
        """Raises `LocalDagsterError` if a run that is launched would not start."""

    def prepare(self, job: BackfillJob, keys: Sequence[str]) -> None:
        """Create the partitions of these keys."""

    def was_run(self, job: BackfillJob, backfill_id: str) -> bool:
        """Whether there are runs of a backfill, ended or not."""

    def under_way(self, job: BackfillJob, backfill_id: str) -> dict[str, str]:
        """The ids of the runs of a backfill that have not ended, by partition key."""

    def launch(self, job: BackfillJob, backfill_id: str, key: str, *, max_failures: int | None = None) -> str:
        """Launch the run of a partition key; gives its id. Raises `RunFailedError`."""

    def ended(self, runs: Iterable[str]) -> dict[str, Ended]:
        """Those of some runs that have ended, and how."""

    def close(self) -> None:
        """End the runs that do not outlive the command."""
