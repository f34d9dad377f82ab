"""The interface of every launcher of a backfill's runs, and the values that launchers share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BackfillJob:
    """The job or the DAG that replays a consumer, and the assets that it updates."""

    name: str
    assets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended; `why` is the reason if it failed."""

    succeeded: bool
    why: str = ""


class Launcher(Protocol):
    """Launches the runs of a consumer's backfills, and tells how they end."""

    orchestrator: str
    """Its name for people."""

    resume_options: str = ""
    """The options by which `eventsql backfill --resume` finds this orchestrator; empty for the default."""

    outlives: bool = True
    """Whether runs go on after the command ends."""

    @property
    def job(self) -> BackfillJob:
        """The job of the consumer's backfills. Raises `ValidationError` if there is none."""

    def require_running(self) -> None:
        """Raises `LocalProcessError` if a run that is launched would not start."""
        return

    def prepare(self, keys: Sequence[str]) -> None:  # noqa: ARG002 - some have nothing to prepare
        """Create the partitions of these keys, if the orchestrator has partitions."""
        return

    def was_run(self, backfill_id: str) -> bool:
        """Whether there are runs of a backfill, ended or not."""

    def under_way(self, backfill_id: str) -> dict[str, str]:  # noqa: ARG002 - a launcher may know its runs
        """The ids of the runs of a backfill that have not ended, by partition key.

        A launcher that cannot know them gives none: then only the lease of a window shows whether a run is alive.
        """
        return {}

    def launch(self, backfill_id: str, key: str, *, max_failures: int | None = None) -> str:
        """Launch the run of a partition key; gives its id. Raises `RunFailedError`."""

    def ended(self, runs: Iterable[str]) -> dict[str, Ended]:
        """The runs among these that have ended, and how each ended."""

    def close(self) -> None:
        """End the runs that do not outlive the command."""
        return
