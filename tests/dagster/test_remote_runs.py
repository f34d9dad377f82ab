"""How a running Dagster tells which runs of a backfill have ended, and why they failed."""

import dagster as dg
import psycopg

from eventsql_orchestration.dagster.backfills.remote_launcher import RemoteDagster
from eventsql_orchestration.dagster.tags import UNFINISHED
from eventsql_orchestration.orchestration.backfills.launcher import Ended
from tests.dagster.webservers import served


@dg.op
def talkative(context: dg.OpExecutionContext) -> None:
    for row in range(1_100):
        context.log.info(f"row {row}")
    raise psycopg.DataError("row 1100 is broken\nLINE 1: 1/0\n         ^\nHINT: check")


@dg.job
def talking() -> None:
    talkative()


def test_the_reason_of_a_failed_run_is_found_behind_its_messages(
    shared_instance: dg.DagsterInstance, instance_home: str
) -> None:
    failed = talking.execute_in_process(instance=shared_instance, raise_on_error=False).run_id
    lost = shared_instance.create_run_for_job(talking)
    shared_instance.report_run_failed(lost, "Its machine went away.")
    with served(instance_home) as url:
        ended = RemoteDagster(url, "orders", "ledger").ended([failed, lost.run_id])
    assert ended == {
        failed: Ended(False, f"psycopg.DataError: row 1100 is broken LINE 1: 1/0 HINT: check ({url}/runs/{failed})"),
        lost.run_id: Ended(False, f"Its machine went away. ({url}/runs/{lost.run_id})"),
    }


def test_a_run_of_any_unfinished_status_has_not_ended(shared_instance: dg.DagsterInstance, instance_home: str) -> None:
    statuses = [status for status in UNFINISHED if status is not dg.DagsterRunStatus.QUEUED]  # needs an origin
    unfinished = [shared_instance.create_run_for_job(talking, status=status).run_id for status in statuses]
    with served(instance_home) as url:
        ended = RemoteDagster(url, "orders", "ledger").ended([*unfinished, "deleted"])
    assert ended == {"deleted": Ended(False, f"it was deleted ({url}/runs/deleted)")}
