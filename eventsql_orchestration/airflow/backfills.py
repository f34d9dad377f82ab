"""Backfills in Airflow: each window is a run of the DAG that consumes, started by the public REST API."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from urllib.parse import quote, urlsplit

from eventsql_orchestration.airflow.api import CONFLICT, AirflowApi
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration.backfills.launcher import BackfillJob, Ended, Launcher
from eventsql_orchestration.orchestration.backfills.windows import read_key
from eventsql_orchestration.orchestration.errors import AirflowAnswerError, LocalAirflowError, RunFailedError

logger = logging.getLogger(__name__)

UNDER_WAY: Final = ("queued", "running")

CONF: Final = "eventsql_backfill"
"""The name in the configuration of a run under which it finds its window."""

RESUME_OPTIONS: Final = " --orchestrator airflow"


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """The window that a run replays, as the configuration of the run has it."""

    topic: str
    consumer: str
    window: str
    max_failures: int | None = None

    @classmethod
    def read(cls, conf: object) -> ReplayRequest | None:
        """The request of a run's configuration; None for a run that replays nothing. Raises `ValidationError`."""
        if not isinstance(conf, Mapping) or CONF not in conf:
            return None
        try:
            request = cls(**conf[CONF])
            read_key(request.window)
        except TypeError:
            raise ValidationError(
                f"{CONF} of a run's configuration has topic, consumer, window and max_failures, not {conf[CONF]!r}: "
                "`eventsql backfill --orchestrator airflow` launches such runs"
            ) from None
        return request

    def conf(self) -> dict[str, Any]:
        return {CONF: {name: getattr(self, name) for name in self.__slots__}}


class AirflowRuns(Launcher):
    """Launches the runs of a consumer's backfills in a running Airflow. The runs go on after this object is closed.

    `dag` is the DAG that consumes; by default the DAG that `claims_asset` of the consumer schedules.
    """

    orchestrator = "Airflow"
    resume_options = RESUME_OPTIONS

    def __init__(self, url: str, topic: str, consumer: str, *, dag: str | None = None) -> None:
        """Raises `ValidationError` for a URL that is not of HTTP."""
        self._api = AirflowApi(url)
        self._topic = topic
        self._consumer = consumer
        self._dag = dag
        self._was_paused = False
        self._run_ids: dict[str, str] = {}

    @cached_property
    def job(self) -> BackfillJob:
        dag = self._dag or self._scheduled()
        if self._api.find_dag(dag) is None:
            raise ValidationError(f"Airflow at {self._api.url} has no DAG {dag!r}: name another with --dag")
        assets = [
            asset["name"]
            for asset in self._api.pages("/assets", "assets", dag_ids=dag)
            if any(task["dag_id"] == dag for task in asset["producing_tasks"])
        ]
        return BackfillJob(dag, tuple(sorted(assets)))

    def _scheduled(self) -> str:
        """The DAG that claims of the consumer schedule. Raises `ValidationError` unless there is exactly one."""
        topic, consumer = self._topic, self._consumer
        path = f"/{topic}/{quote(consumer, safe='')}"
        assets = self._api.pages("/assets", "assets", uri_pattern=f"eventsql://%{path}")
        named = (asset for asset in assets if urlsplit(asset["uri"]).path == path)
        dags = sorted({dag["dag_id"] for asset in named for dag in asset["scheduled_dags"]})
        if len(dags) != 1:
            found = f"several DAGs ({', '.join(dags)})" if dags else "no DAG"
            raise ValidationError(
                f"Airflow at {self._api.url} has {found} with the schedule claims_asset({topic!r}, {consumer!r}): name "
                "the DAG that consumes with --dag"
            )
        return str(dags[0])

    def require_running(self) -> None:
        health = self._api.ask("GET", "/monitor/health")
        if (health.get("scheduler") or {}).get("status") != "healthy":
            raise LocalAirflowError(f"the scheduler of {self._api.url} does not run: start it, or runs would wait")
        if self._is_paused():
            raise LocalAirflowError(f"DAG {self.job.name} is paused, and its runs would wait: unpause it")

    def _is_paused(self) -> bool:
        dag = self._api.find_dag(self.job.name)
        return dag is not None and bool(dag["is_paused"])

    def was_run(self, backfill_id: str) -> bool:
        return any(True for _ in self._runs(backfill_id))

    def under_way(self, backfill_id: str) -> dict[str, str]:
        return {request.window: run["dag_run_id"] for request, run in self._runs(backfill_id, state=UNDER_WAY)}

    def _runs(self, backfill_id: str, **query: Any) -> Iterator[tuple[ReplayRequest, dict[str, Any]]]:
        """The runs of a backfill, with their windows."""
        pattern = f"{_prefix(backfill_id)}%"
        for run in self._api.pages(
            f"/dags/{quote(self.job.name, safe='')}/dagRuns", "dag_runs", run_id_pattern=pattern, **query
        ):
            request = ReplayRequest.read(run["conf"])
            if request is None or (request.topic, request.consumer) != (self._topic, self._consumer):
                continue
            if read_key(request.window)[0] == backfill_id:
                yield request, run

    def launch(self, backfill_id: str, key: str, *, max_failures: int | None = None) -> str:
        request = ReplayRequest(self._topic, self._consumer, key, max_failures)
        # A window may have several runs, and a name of a shard may have characters that ids of runs may not have.
        run_id = f"{_prefix(backfill_id)}{key.partition(':')[2].partition('@')[0]}__{secrets.token_hex(4)}"
        # A launch that got no answer and is repeated makes no second run.
        run_id = self._run_ids.setdefault(key, run_id)
        note = f"Backfill {backfill_id} of {self._topic}/{self._consumer}, window {key}"
        try:
            return self._api.trigger(self.job.name, request.conf(), run_id=run_id, note=note)
        except AirflowAnswerError as error:
            if error.status == CONFLICT:
                return run_id
            raise RunFailedError(f"DAG {self.job.name} could not be run: {error}") from error

    def ended(self, runs: Iterable[str]) -> dict[str, Ended]:
        ids, dag = list(runs), self.job.name
        ended = {}
        for run in ids:
            state = self._api.state(dag, run)
            if state not in UNDER_WAY:
                page = f"{self._api.url}/dags/{quote(dag, safe='')}/runs/{quote(run, safe='')}"
                ended[run] = Ended(state == "success", f"its run is {state}: see {page}")
        self._tell_paused(waiting=len(ended) < len(ids))
        return ended

    def _tell_paused(self, *, waiting: bool) -> None:
        """Log a warning if the DAG was paused since the last call, and runs wait."""
        is_paused = waiting and self._is_paused()
        if is_paused and not self._was_paused:
            logger.warning("DAG %s is paused, and its runs wait: unpause it", self.job.name)
        self._was_paused = is_paused


def _prefix(backfill_id: str) -> str:
    """The beginning of the ids of a backfill's runs."""
    return f"eventsql_backfill__{backfill_id}__"
