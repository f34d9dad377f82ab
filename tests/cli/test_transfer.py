"""`eventsql transfer`."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess

import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.cli import transfer
from eventsql_orchestration.cli.transfer import _Report
from eventsql_orchestration.client.admin import ClusterRetainer
from eventsql_orchestration.client.consumers import ClusterTransfer
from eventsql_orchestration.database import Connection
from tests.cli.conftest import Run, Start
from tests.cli.mailer import TOPIC, prepare
from tests.fixtures import UntilBlocked
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.prepared.with_args(prepare)


def test_transfer_once_moves_what_is_there(run: Run, platform: EventSQL) -> None:
    platform.publisher.publish_all(Publication(TOPIC, b"x") for _ in range(3))
    result = run("transfer", "--once")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"eventsql: transferred 3 events ({TOPIC} 3)\n"
    assert platform.reader.count(TOPIC) == 3
    assert run("transfer", "--once").stderr == "eventsql: nothing to transfer\n"


def test_a_transfer_of_many_topics_names_those_with_the_most_events(run: Run, platform: EventSQL) -> None:
    for number in range(12):
        platform.registry.register_topic(Topic(f"t{number:02}"))
        platform.publisher.publish_all(Publication(f"t{number:02}", b"x") for _ in range(2 if number == 11 else 1))
    names = ", ".join(f"t{number:02} 1" for number in range(9))
    assert run("transfer", "--once").stderr == f"eventsql: transferred 13 events (t11 2, {names}, and 2 other topics)\n"


def test_each_event_is_reported_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = _Report()
    report.add({"a": 1})
    assert capsys.readouterr().err == "eventsql: transferred 1 event (a 1)\n"
    monkeypatch.setattr(transfer, "_REPORT_SECONDS", math.inf)
    report.add({"a": 2})
    report.add({"a": 3})
    assert capsys.readouterr().err == "", "a report comes at most once a second"
    report.flush()
    report.flush()
    assert capsys.readouterr().err == "eventsql: transferred 5 events (a 5)\n"


@pytest.mark.parametrize(("options", "runs"), [((), ["retention", "transfer"]), (("--no-retain",), ["transfer"])])
def test_a_transfer_drops_old_events_too_unless_it_is_told_not_to(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], runs: list[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(transfer, "start_thread", lambda _name, target, stop: target(stop))
    monkeypatch.setattr(ClusterRetainer, "run", lambda *_: ran.append("retention"))
    monkeypatch.setattr(ClusterTransfer, "run", lambda *_, **__: ran.append("transfer"))
    assert run("transfer", *options).exit_code == 0
    assert ran == runs


def test_a_transfer_that_starts_while_the_database_is_down_ends_with_an_error(start: Start, closed_port: int) -> None:
    process = start("transfer", EVENTSQL_DSN=f"postgresql://127.0.0.1:{closed_port}/x")
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, b"cannot be reached" in errors) == (1, True)


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_transfer_runs_until_it_is_told_to_end(
    start: Start, platform: EventSQL, ending: signal.Signals, code: int
) -> None:
    process = start("transfer", "--interval", 0.1)
    assert process.stderr is not None
    assert b"transferring" in process.stderr.readline()
    platform.publisher.publish(Publication(TOPIC, b"1"))
    wait_until(lambda: platform.reader.count(TOPIC))
    process.send_signal(ending)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert errors == f"eventsql: transferred 1 event ({TOPIC} 1)\n".encode()


def test_a_transfer_that_has_told_of_its_wait_tells_that_it_goes_on(start: Start, session: Connection) -> None:
    process = start("transfer")
    assert process.stderr is not None
    assert b"transferring" in process.stderr.readline()
    session.execute("ALTER SCHEMA eventsql RENAME TO away")
    assert b"warning: the transfer waits for the database" in process.stderr.readline()
    session.execute("ALTER SCHEMA away RENAME TO eventsql")
    assert process.stderr.readline().startswith(b"eventsql: the transfer goes on with postgresql://")


@pytest.fixture
def moving(
    start: Start, platform: EventSQL, session: Connection, until_blocked: UntilBlocked
) -> subprocess.Popen[bytes]:
    """A transfer that waits in the middle of a batch, for a lock that `session` holds."""
    with platform.database.transaction() as connection:
        platform.publisher.publish(Publication(TOPIC, b"1"), connection=connection)
    session.execute("BEGIN")
    session.execute(f"LOCK TABLE eventsql.{TOPIC}_event IN SHARE MODE".encode())
    process = start("transfer", "--no-retain")
    until_blocked()
    return process


def test_ctrl_c_lets_the_batch_under_way_finish(
    moving: subprocess.Popen[bytes], platform: EventSQL, session: Connection
) -> None:
    moving.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        moving.wait(0.5)
    session.execute("COMMIT")
    _, errors = moving.communicate(timeout=PATIENCE)
    assert moving.returncode == 130
    assert errors.endswith(f"eventsql: transferred 1 event ({TOPIC} 1)\n".encode())
    assert platform.reader.count(TOPIC) == 1


def test_a_second_ctrl_c_does_not_wait_for_the_batch(moving: subprocess.Popen[bytes], platform: EventSQL) -> None:
    # Two signals may arrive as one, and the driver looks at signals each 0.1 s if none interrupts that.
    while moving.poll() is None:
        moving.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            moving.wait(0.5)
    # One that comes when Python ends has no handler any more.
    assert moving.returncode in {130, -signal.SIGINT}
    assert platform.buffered() == {TOPIC: 1}
