"""`eventsql queue`: queues from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventsql_orchestration.cli.queue_work import HandlerFailedError, Programs
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.queue import NewMessage, Queue, list_queues
from tests.cli.conftest import PROGRAM, Run, Start
from tests.fixtures import Until
from tests.waiting import PATIENCE


def shown(run: Run, *arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_queue_is_created_filled_looked_at_and_emptied(run: Run) -> None:
    assert run("queue", "create", "jobs", "--ordered", "--max-receives", 2, "--retention", "7d").exit_code == 0
    assert run("queue", "send", "jobs", "first", "--key", "a").exit_code == 0
    assert run("queue", "send", "jobs", "--key", "a", stdin=b"second\nthird\n").exit_code == 0
    described = shown(run, "queue", "describe", "jobs")
    assert (described["ordered"], described["dead_letters"], described["visible"], described["blocked"]) == (
        True, "jobs_dead", 1, 2,
    )  # fmt: skip
    lines = run("queue", "describe", "jobs").stdout.splitlines()
    assert [line.split()[1:] for line in lines if line.startswith("retention")] == [["7", "d"]]
    assert [each["body"] for each in shown(run, "queue", "peek", "jobs")] == ["first", "second", "third"]
    received = shown(run, "queue", "receive", "jobs", "--acknowledge")
    assert [each["body"] for each in received] == ["first"]
    assert [each["body"] for each in shown(run, "queue", "archive", "jobs")] == ["first"]
    lines = run("queue", "describe", "jobs").stdout.splitlines()
    assert [line.split()[-1] for line in lines if "per second" in line] == ["0.05", "0.02"]
    assert run("queue", "archive", "--drop-expired").exit_code == 0
    assert "2 messages of queue 'jobs' would be deleted" in run("queue", "purge", "jobs").output
    assert run("queue", "purge", "jobs", "--execute").exit_code == 0
    listed = shown(run, "queue", "list")
    assert [(each["queue"], each["visible"]) for each in listed] == [("jobs", 0), ("jobs_dead", 0)]


def test_the_messages_of_keys_are_erased(run: Run, database: Database, tmp_path: Path) -> None:
    Queue(database, "jobs").send_all([NewMessage(b"x", key=key) for key in "aabc"])
    keys = tmp_path / "keys.txt"
    keys.write_text("b\nnobody\n")
    asked = ("queue", "erase", "jobs", "--key", "a", "--key-file", keys)
    assert "3 messages of queue 'jobs' would be deleted; run it again with --execute" in run(*asked).stderr
    with database.transaction() as connection:
        Queue(database, "jobs").acknowledge(Queue(database, "jobs").receive()[0], connection=connection)
        held = run(*asked, "--execute")
    assert held.stdout.split() == ["messages", "2", "dead", "letters", "0", "archived", "0"]
    assert "1 message left" in held.stderr
    assert shown(run, *asked) == {"messages": 0, "dead_letters": 0, "archived": 0, "left": 0, "executed": False}
    assert "nothing to do" in run(*asked).stderr
    assert Queue(database, "jobs").statistics().depth == 1


def test_the_list_of_queues_fits_in_60_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventsql_orchestration.cli.tables.stdout_is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert run("queue", "send", "ride_commands", "charge").exit_code == 0
    header, row = run("queue", "list").stdout.splitlines()
    assert max(len(header), len(row)) <= 60
    assert header.split() == ["queue", "visible", "in", "flight", "dead", "waiting", "(s)"]


def test_messages_that_are_only_shown_are_given_back_and_spend_no_receive(run: Run, database: Database) -> None:
    queue = Queue(database, "jobs", max_receives=1)
    queue.send(b"one")
    for _ in range(2):
        assert [each["body"] for each in shown(run, "queue", "receive", "jobs")] == ["one"]
    assert queue.depth().visible == 1


@pytest.mark.parametrize("separator", [[], ["--"]], ids=["plain", "after dashes"])
def test_a_command_works_a_queue_off_and_its_failures_become_dead_letters(
    run: Run, database: Database, separator: list[str]
) -> None:
    queue = Queue(database, "jobs", max_receives=1)
    queue.send_all([b"good", b"bad", b"good"])
    code = "import sys; sys.exit(sys.stdin.read() == 'bad')"
    result = run("queue", "work", "--drain", "jobs", *separator, sys.executable, "-c", code)
    assert result.exit_code == 0, result.output
    said = "2 messages of queue 'jobs' handled, 1 receive failed, 1 message given up: `eventsql queue peek jobs_dead`"
    assert said in result.output
    assert queue.statistics().dead == 1
    assert "ended with exit code 1" in run("queue", "peek", "jobs_dead").stdout
    assert run("queue", "redrive", "jobs", "--execute").exit_code == 0
    assert queue.depth().visible == 1


def test_a_queue_is_deleted_by_force_where_it_has_messages(run: Run, database: Database) -> None:
    Queue(database, "jobs", max_receives=1).send(b"1")
    assert "deleted with 1 message; run it again with --execute --force" in run("queue", "delete", "jobs").stderr
    kept = run("queue", "delete", "jobs", "--execute")
    assert kept.exit_code == 1
    assert "eventsql queue delete --execute --force jobs" in kept.stderr
    for options in ([], ["--execute", "--force"]):
        needed = run("queue", "delete", "jobs_dead", *options)
        assert needed.exit_code == 1
        assert "it takes the dead letters of 'jobs'" in needed.stderr
    deleted = run("queue", "delete", "jobs", "--execute", "--force")
    assert deleted.exit_code == 0, deleted.output
    assert "eventsql queue delete --execute jobs_dead" in deleted.stderr
    assert run("queue", "delete", "jobs_dead", "--execute").exit_code == 0
    assert list_queues(database) == []


def test_a_queue_that_a_message_makes_is_named(run: Run) -> None:
    assert "made queue 'jbos'" in run("queue", "send", "jbos", "1").stderr
    assert "made" not in run("queue", "send", "jbos", "1").stderr


def test_a_message_of_a_stream_that_pauses_is_sent_at_once_and_an_interrupt_tells_how_many_were(
    start: Start, database: Database, until: Until
) -> None:
    queue = Queue(database, "jobs")
    queue.definition()
    process = start("queue", "send", "jobs", stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"one\r\ntw")
    process.stdin.flush()
    until(lambda: queue.depth().visible == 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    # The message is visible a moment before the process is told of its commit.
    assert errors in {
        b"eventsql: interrupted after 1 message\n",
        b"eventsql: interrupted after 0 messages; the 1 message after them may have been sent, too\n",
    }
    assert [message.body for message in queue.peek()] == [b"one"]


def test_an_argument_that_is_not_utf_8_is_sent_as_its_bytes(run: Run, database: Database) -> None:
    assert run("queue", "send", "jobs", "caf\udce9").exit_code == 0
    assert [message.body for message in Queue(database, "jobs").peek()] == [b"caf\xe9"]
    (peeked,) = shown(run, "queue", "peek", "jobs")
    assert (peeked["body"], peeked["encoding"]) == ("Y2Fm6Q==", "base64")
    assert "636166e9" in run("queue", "peek", "jobs").stdout


def test_a_closed_input_is_one_line(dsn: str) -> None:
    closed = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" <&-', PROGRAM, "--dsn", dsn, "queue", "send", "jobs"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (closed.returncode, len(closed.stderr.splitlines())) == (1, 1)
    assert closed.stderr.startswith("eventsql: standard input is closed: ")


def test_an_empty_input_makes_no_queue(run: Run, database: Database) -> None:
    result = run("queue", "send", "jobs", stdin=b"")
    assert result.exit_code == 0, result.output
    assert "nothing was sent" in result.stderr
    assert list_queues(database) == []


def test_a_dead_letter_that_is_not_there_is_named(run: Run, database: Database) -> None:
    Queue(database, "jobs", max_receives=1).send(b"1")
    result = run("queue", "redrive", "jobs", "--id", 98, "--id", 99)
    assert result.exit_code == 1
    assert "98, 99" in result.stderr


def test_an_option_behind_the_queue_is_not_taken_for_the_program(run: Run, database: Database) -> None:
    Queue(database, "jobs").send(b"1")
    result = run("queue", "work", "jobs", "--drain", "cat")
    assert result.exit_code == 2
    assert "--drain is after QUEUE" in result.stderr
    assert Queue(database, "jobs").depth().visible == 1


@pytest.mark.parametrize("separator", [[], ["--"]], ids=["plain", "after dashes"])
def test_an_option_of_the_command_that_the_program_gets_is_told_unless_dashes_end_the_options(
    run: Run, database: Database, separator: list[str]
) -> None:
    Queue(database, "jobs").send(b"1")
    result = run("queue", "work", "--drain", "jobs", *separator, "true", "--workers=3", "--drain")
    assert (result.exit_code, "true gets --drain, --workers" in result.stderr) == (0, not separator)


def test_an_unknown_option_before_the_queue_is_not_taken_for_the_queue(run: Run, database: Database) -> None:
    Queue(database, "jobs").send(b"1")
    result = run("queue", "work", "-w", "3", "jobs", "cat")
    assert result.exit_code == 2
    assert "-w" in result.stderr
    assert Queue(database, "jobs").depth().visible == 1


@pytest.mark.parametrize(
    ("program", "found"), [("no-such-program", "is not there"), ("./script", "cannot be executed")]
)
def test_a_program_that_cannot_run_is_an_error_before_a_message_is_taken(
    run: Run, database: Database, directory: Path, program: str, found: str
) -> None:
    Queue(database, "jobs").send(b"1")
    (directory / "script").write_text("#!/bin/sh\n")
    result = run("queue", "work", "jobs", "--", program)
    assert result.exit_code == 2
    assert f"{program!r} {found}" in result.stderr
    assert [message.receives for message in Queue(database, "jobs").peek()] == [0]


def worker(start: Start, database: Database, directory: Path, *options: str) -> tuple[subprocess.Popen[bytes], int]:
    """A worker, in a group as in a terminal, whose program reads a pipe; and the number of that program."""
    Queue(database, "jobs").send(b"1")
    os.mkfifo(directory / "go")
    process = start("queue", "work", *options, "jobs", "sh", "-c", "echo $$ >&2; exec cat go", process_group=0)
    return process, int(line(process))


def line(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    return process.stderr.readline().decode()


def test_a_second_ctrl_c_kills_the_program_and_ends_at_once(start: Start, database: Database, directory: Path) -> None:
    process, program = worker(start, database, directory)
    os.killpg(process.pid, signal.SIGINT)
    assert "waiting for 1 message" in line(process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert b"killed sh" in errors
    assert not psutil.pid_exists(program)
    (message,) = Queue(database, "jobs").peek()
    assert message.receives == 1
    assert message.state != "in flight"


def test_a_ctrl_c_after_sigterm_gives_the_message_of_the_killed_program_back_before_the_command_ends(
    start: Start, database: Database, directory: Path, session: Connection
) -> None:
    process, program = worker(start, database, directory)
    os.killpg(process.pid, signal.SIGTERM)
    assert "waiting for 1 message" in line(process)
    with session.transaction():
        session.execute("SELECT FROM eventsql.queue_message FOR UPDATE")
        os.killpg(process.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, b"killed sh" in errors) == (130, True)
    assert not psutil.pid_exists(program)
    (message,) = Queue(database, "jobs").peek()
    assert (message.receives, message.state != "in flight") == (1, True)


def test_a_queue_that_is_deleted_during_the_last_message_stays_deleted(
    start: Start, database: Database, directory: Path
) -> None:
    Queue(database, "jobs", max_receives=1).send_all([b"bad", b"slow"])
    os.mkfifo(directory / "go")
    program = "grep -q bad && exit 1; echo begun >&2; exec cat go"
    process = start("queue", "work", "jobs", "sh", "-c", program, process_group=0)
    assert process.stderr is not None
    assert b"begun\n" in process.stderr
    os.killpg(process.pid, signal.SIGINT)
    assert "waiting for 1 message" in line(process)
    Queue(database, "jobs").delete(force=True)
    (directory / "go").open("w").close()
    _, errors = process.communicate(timeout=PATIENCE)
    assert b"1 message given up: `eventsql queue peek jobs_dead`" in errors
    assert [each.name for each in list_queues(database)] == ["jobs_dead"]


def test_ctrl_z_stops_the_program_with_the_command_and_ctrl_c_says_for_what_it_waits_and_lets_the_program_end(
    start: Start, database: Database, directory: Path, until: Until
) -> None:
    process, program = worker(start, database, directory)
    both = [psutil.Process(process.pid), psutil.Process(program)]
    os.killpg(process.pid, signal.SIGTSTP)
    until(lambda: [each.status() for each in both] == [psutil.STATUS_STOPPED] * 2)
    os.killpg(process.pid, signal.SIGCONT)
    until(lambda: psutil.STATUS_STOPPED not in {each.status() for each in both})
    os.killpg(process.pid, signal.SIGINT)
    assert "waiting for 1 message" in line(process)
    (directory / "go").open("w").close()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert b"1 message of queue 'jobs' handled" in errors
    assert Queue(database, "jobs").statistics().depth == 0


def test_a_program_that_runs_keeps_its_time_if_the_messages_cannot_be_counted(
    start: Start, database: Database, directory: Path
) -> None:
    process, program = worker(start, database, directory, "--drain")
    with database.connection() as connection:
        connection.execute("ALTER TABLE eventsql.queue_message RENAME TO gone")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    assert psutil.pid_exists(program)
    (directory / "go").open("w").close()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert b"killed" not in errors


def test_ctrl_z_does_not_stop_a_program_that_is_just_being_started(database: Database) -> None:
    """It still has the command's group. The thread that starts it would wait for it, and the command for the thread."""
    held = "import signal, sys; sys.exit(signal.SIGTSTP not in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    queue, before = Queue(database, "jobs"), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    queue.send(b"1")
    (message,) = queue.receive()
    with database.connection() as connection:
        Programs([sys.executable, "-c", held]).run(message, connection)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.mark.parametrize(
    ("ends", "said"), [("exit 3", "sh ended with exit code 3"), ("kill -9 $$", "sh was killed by SIGKILL")]
)
def test_the_history_says_how_a_program_ended(run: Run, database: Database, ends: str, said: str) -> None:
    queue = Queue(database, "jobs", max_receives=1)
    queue.send(b"1")
    assert run("queue", "work", "--drain", "jobs", "sh", "-c", ends).exit_code == 0
    (letter,) = Queue(database, "jobs_dead").peek()
    assert letter.history[0]["reason"].endswith(said)


def test_no_program_is_started_after_the_others_were_killed(database: Database, directory: Path) -> None:
    queue, programs = Queue(database, "jobs"), Programs(["touch", "made"])
    queue.send(b"1")
    (message,) = queue.receive()
    programs.kill()
    with database.connection() as connection, pytest.raises(HandlerFailedError):
        programs.run(message, connection)
    assert not (directory / "made").exists()
