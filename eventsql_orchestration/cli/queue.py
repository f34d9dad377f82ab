"""`eventsql queue`: create, inspect, fill, process, empty and delete queues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Final

import click

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.failures import message_of
from eventsql_orchestration.cli.input import StandardInput, batches, stdin_is_terminal
from eventsql_orchestration.cli.keys import ErasedKeys, FileOfKeys, read_keys
from eventsql_orchestration.cli.output import bytes_field, say, say_plan, write_json
from eventsql_orchestration.cli.parameters import (
    POSITIVE,
    AsJson,
    Name,
    Whole,
    argument,
    command,
    executing,
    leave_out,
    option,
)
from eventsql_orchestration.cli.queue_work import check_command, work_off
from eventsql_orchestration.cli.tables import Columns, picked, same, show_fields, show_list
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.errors import EventSQLError, PartlySentError, QueueNotFoundError
from eventsql_orchestration.queue import (
    ArchivedMessage,
    Message,
    NewMessage,
    PeekedMessage,
    Queue,
    drop_expired_archives,
    list_queues,
)
from eventsql_orchestration.queue.queue import MAX_WORKERS
from eventsql_orchestration.validation import advised, age, check_name, counted

_SENT_AT_ONCE: Final = 1_000

_MOVED: Final = "moved to the dead letters"
"""The reason that the database notes for it."""

_QUEUE: Final = Name("queue", partial(check_name, "queue name"))

QueueName = Annotated[str, argument(metavar="QUEUE", type=_QUEUE)]
Limit = Annotated[int, option("At most N messages.", type=POSITIVE, default=10)]


@click.group()
def queue() -> None:
    """Create, inspect, fill, process, empty and delete queues."""


def _existing(platform: EventSQL, name: str) -> Queue:
    if name not in _names(platform):
        raise QueueNotFoundError(
            f"there is no queue {name!r}: create it with `{advised('queue create', name)}`, or look its name up "
            "with `eventsql queue list`"
        )
    return Queue(platform, name)


def _names(platform: EventSQL) -> set[str]:
    platform.open()
    return {each.name for shard in platform.members() if shard.down is None for each in list_queues(shard.database)}


@command(queue)
def create(
    context: CliContext,
    *,
    name: QueueName,
    ordered: Annotated[bool, option("Give out the messages of a key one after another.")],
    visibility_timeout: Annotated[timedelta | None, option("How long a receiver holds a message  [default: 30s].")],
    max_receives: Annotated[
        int | None, option("Receives until a message is a dead letter; without it, none is.", type=POSITIVE)
    ],
    dead_letters: Annotated[
        str | None,
        option(
            "The queue of the dead letters, with --max-receives  [default: QUEUE_dead].", metavar="NAME", type=_QUEUE
        ),
    ],
    retention: Annotated[
        timedelta | None, option("How long acknowledged messages are kept; without it, they are deleted.")
    ],
    deduplication_window: Annotated[timedelta | None, option("How long a deduplication id counts  [default: 5m].")],
) -> None:
    """Create QUEUE, or change its options. A queue that exists keeps the options that are not given."""
    with context.platform() as platform:
        Queue(
            platform, name, ordered=ordered or None, visibility_timeout=visibility_timeout, max_receives=max_receives,
            dead_letters=dead_letters, retention=retention, deduplication_window=deduplication_window,
        ).definition()  # fmt: skip
    say(f"queue {name!r} is ready")


@command(queue, "list")
def list_all(context: CliContext, as_json: AsJson) -> None:
    """List the queues with the numbers of their messages.

    Column dead counts the messages that have moved to the queue's dead letters and are still there. Column oldest is
    the age of the message that was sent first, and column waiting the longest wait of a visible message. Columns sent/s
    and acknowledged/s are the rates of the last minute, of queues with a retention.
    """
    with context.platform() as platform:
        found = [Queue(platform, name).statistics() for name in sorted(_names(platform))]
    columns: Columns = {
        **same("queue", "visible"), "in flight": "in_flight", **same("delayed", "blocked", "dead"),
        "oldest (s)": "oldest", "waiting (s)": "waiting",
        "sent/s": "sent_per_second", "acknowledged/s": "acknowledged_per_second",
    }  # fmt: skip
    show_list(found, columns, as_json=as_json, spare=("acknowledged/s", "sent/s", "oldest (s)", "delayed", "blocked"))


@command(queue)
def describe(context: CliContext, name: QueueName, as_json: AsJson) -> None:
    """Show the options of QUEUE, the numbers of its messages, and with a retention its rates of the last minute."""
    with context.platform() as platform:
        found = _existing(platform, name)
        described = {**asdict(found.definition()), **asdict(found.statistics())}
    del described["queue"]
    if as_json:
        write_json(described)
    else:
        show_fields({
            label.replace("_", " "): _in_words(label, value) if isinstance(value, float) else value
            for label, value in described.items()
        })  # fmt: skip


def _in_words(label: str, value: float) -> str:
    return f"{value:,.2f}" if label.endswith("_per_second") else age(round(value, 1))


@command(queue)
def send(
    context: CliContext,
    *,
    name: QueueName,
    body: Annotated[str | None, argument(required=False)],
    key: Annotated[str | None, option("The key of the messages.", metavar="KEY")],
    metadata: Annotated[tuple[tuple[str, str], ...], option("Metadata of the messages; repeat it.")],
    delay: Annotated[timedelta | None, option("Time until the messages can be received.")],
    priority: Annotated[int, option("From 0 to 9; the highest comes first.", type=Whole(0, 9), default=0)],
    deduplication_id: Annotated[str | None, option("Send it once within the queue's window.", metavar="ID")],
) -> None:
    """Send BODY to QUEUE, or each line of standard input, as it comes."""

    def message(text: bytes) -> NewMessage:
        return NewMessage(text, key, dict(metadata), delay or 0.0, priority=priority, deduplication_id=deduplication_id)

    texts: Iterable[bytes | None]
    if body is not None:
        # An argument that is not UTF-8 is sent as its bytes.
        texts = [body.encode(errors="surrogateescape")]
    else:
        leave_out("is for BODY (of the lines of standard input, only the first would be sent)", "deduplication_id")
        texts = (line and line.removesuffix(b"\r") for line in StandardInput().lines())
        if stdin_is_terminal():
            say("reading messages from the terminal, one a line; Ctrl-D ends it")
    sent, under_way = 0, ""
    with context.platform() as platform:
        target = Queue(platform, name)
        try:
            for batch in batches(texts, _SENT_AT_ONCE):
                messages = [message(text) for text in batch]
                if not sent and name not in _names(platform):
                    target.definition()
                    say(f"made queue {name!r}: there was none of this name")
                under_way = f"; the {counted(len(messages), 'message')} after them may have been sent, too"
                sent += len(target.send_all(messages))
                under_way = ""
        except PartlySentError as error:
            raise EventSQLError(_unsent(error, sent)) from error
        except EventSQLError as error:
            if not sent:
                raise
            raise EventSQLError(f"{error.message}; lines 1-{sent} were sent before that") from error
        except KeyboardInterrupt:
            say(f"interrupted after {counted(sent, 'message')}{under_way}")
            raise
    say(f"{counted(sent, 'message')} sent to queue {name!r}" if sent else "standard input is empty: nothing was sent")


def _unsent(error: PartlySentError, before: int) -> str:
    """The lines of a batch, after `before` lines, that some shards have not taken."""
    lines = [line for line, sent in enumerate(error.ids, before + 1) if sent is None]
    runs = [[line for _, line in run] for _, run in groupby(enumerate(lines), lambda each: each[1] - each[0])]
    named = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    faults = "; ".join(f"shard {shard!r}: {message_of(fault)}" for shard, fault in error.failed.items())
    return (
        f"lines {named}, and all lines after line {before + len(error.ids)}, were not sent: send them again ({faults})"
    )


@command(queue)
def receive(
    context: CliContext,
    *,
    name: QueueName,
    limit: Limit,
    wait: Annotated[timedelta | None, option("Wait this long for the first message; without it, not at all.")],
    acknowledge: Annotated[bool, option("Acknowledge the messages after they are printed.")],
    as_json: AsJson,
) -> None:
    """Receive messages of QUEUE and print them. Without --acknowledge, they are given back, and spend no receive."""
    with context.platform() as platform:
        source = _existing(platform, name)
        messages = source.receive(max_messages=limit, wait=wait or 0.0)
        try:
            _print(messages, as_json=as_json)
        except BaseException:
            source.give_back(messages)
            raise
        if acknowledge:
            source.acknowledge_all(messages)
        else:
            source.give_back(messages)


def _print(messages: Sequence[Message | PeekedMessage], *, as_json: bool) -> None:
    columns: Columns = {
        **same("id", "key"), "body": lambda message: _text(message.body), **same("priority", "receives"),
        "sent": "sent_at",
    }  # fmt: skip
    if any(isinstance(message, PeekedMessage) for message in messages):
        columns = {**columns, **same("state", "origin")}
    if any(message.history for message in messages):
        columns = {**columns, "failure": _failure}
    show_list(messages, columns, as_json=as_json, json=_object, spare=("priority", "sent", "state"))


def _object(message: Message | PeekedMessage | ArchivedMessage) -> dict[str, Any]:
    return {**asdict(message), "metadata": dict(message.metadata), **bytes_field("body", message.body)}


def _failure(message: Message | PeekedMessage) -> str | None:
    """Why the message was given back last. The last entry of a dead letter's history is its move."""
    reasons = [each["reason"] for each in message.history if each["reason"] != _MOVED]
    return reasons[-1] if reasons else None


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body.hex()


@command(queue)
def peek(context: CliContext, name: QueueName, limit: Limit, as_json: AsJson) -> None:
    """Show the next messages of QUEUE without receiving them, and why each was given back last.

    A body that is not UTF-8 text is shown as hexadecimal digits; with --json, it is base64, with "encoding": "base64".
    """
    with context.platform() as platform:
        _print(_existing(platform, name).peek(limit), as_json=as_json)


@command(queue)
def purge(context: CliContext, name: QueueName, execute: Annotated[bool, executing("Delete them")]) -> None:
    """Delete all messages of QUEUE: a plan and, with --execute, the deletion.

    Its dead letters stay: they are messages of their own queue.
    """
    with context.platform() as platform:
        target = _existing(platform, name)
        if execute:
            say(f"{counted(target.purge(), 'message')} of queue {name!r} deleted")
        else:
            depth = target.statistics().depth
            say_plan(f"{counted(depth, 'message')} of queue {name!r} would be deleted", number=depth)


@command(queue)
def erase(
    context: CliContext,
    *,
    name: QueueName,
    keys: ErasedKeys,
    key_file: FileOfKeys,
    execute: Annotated[bool, executing("Delete them")],
    as_json: AsJson,
) -> None:
    """Delete the messages of a key in QUEUE: a plan and, with --execute, the deletion.

    Messages in flight, dead letters and archived messages of the key are deleted, too. Receivers of a deleted message
    cannot acknowledge it.
    """
    wanted = read_keys(keys, key_file)
    with context.platform() as platform:
        target = _existing(platform, name)
        found = target.erase(wanted) if execute else target.count_of_keys(wanted)
        left = target.count_of_keys(wanted).total if execute else found.total
    if as_json:
        write_json({**asdict(found), "left": left, "executed": execute})
    else:
        show_fields(picked(found, {**same("messages"), "dead letters": "dead_letters", **same("archived")}))
    if not execute:
        say_plan(f"{counted(found.total, 'message')} of queue {name!r} would be deleted", number=found.total)
    elif left:
        say(f"{counted(left, 'message')} left: transactions hold or have sent messages of these keys; run it again")


@command(queue)
def delete(
    context: CliContext, name: QueueName, execute: Annotated[bool, executing("Delete it")],
    force: Annotated[bool, option("Delete it even with messages, dead letters or an archive.")],
) -> None:  # fmt: skip
    """Delete QUEUE: a plan and, with --execute, the deletion.

    If it has messages, dead letters or an archive, this needs --force. Its dead letters stay in their own queue, and
    cannot be redriven any more. A queue that takes the dead letters of another queue is kept. Programs that use the
    queue get an error until they are restarted.
    """
    with context.platform() as platform:
        target = _existing(platform, name)
        dead_letters = target.definition().dead_letters
        if not execute:
            target.check_deletable(force=True)
            held = target.statistics()
            options = "--execute --force" if held.depth or held.dead or target.archived(1) else "--execute"
            dead = f", and {counted(held.dead, 'dead letter')} could not be redriven" if held.dead else ""
            say_plan(f"queue {name!r} would be deleted with {counted(held.depth, 'message')}{dead}", options)
            return
        target.delete(force=force)
    say(f"queue {name!r} deleted")
    if dead_letters is not None:
        say(f"its queue of dead letters stays: `{advised('queue delete --execute', dead_letters)}` deletes it")


@command(queue)
def redrive(
    context: CliContext,
    name: QueueName,
    limit: Annotated[int | None, option("The oldest N.", type=POSITIVE)],
    ids: Annotated[tuple[int, ...], option("The dead letter with this id; repeat it.", "--id", type=POSITIVE)],
    execute: Annotated[bool, executing("Move them")],
) -> None:
    """Move the dead letters of QUEUE back to it: a plan and, with --execute, the move.

    `eventsql queue peek QUEUE_dead` says why each failed.
    """
    with context.platform() as platform:
        source = _existing(platform, name)
        if execute:
            say(f"{counted(source.redrive(limit, ids=ids or None), 'dead letter')} moved back to queue {name!r}")
            return
        source.check_dead_letters(ids)
        dead = source.statistics().dead
    redriven = len(set(ids)) if ids else dead
    redriven = redriven if limit is None else min(limit, redriven)
    say_plan(f"{counted(redriven, 'dead letter')} would be moved back to queue {name!r}", number=redriven)


@command(queue)
def archive(
    context: CliContext,
    name: Annotated[str | None, argument(metavar="[QUEUE]", required=False, type=_QUEUE)],
    limit: Limit,
    drop_expired: Annotated[bool, option("Drop the messages of all queues whose retention has passed.")],
    as_json: AsJson,
) -> None:
    """Show the messages of QUEUE that were acknowledged last, or drop the expired messages of all queues."""
    if (name is None) != drop_expired:
        raise click.UsageError("give either QUEUE or --drop-expired")
    if drop_expired:
        leave_out("is not for --drop-expired", "limit", "as_json")
    with context.platform() as platform:
        platform.open()
        if name is None:
            reached = [shard for shard in platform.shards if shard.down is None]
            dropped = [each for shard in reached for each in drop_expired_archives(shard.database)]
            say(f"{counted(len(dropped), 'day')} of the archive dropped")
            return
        archived = _existing(platform, name).archived(limit)
    columns: Columns = {
        **same("id", "key"), "body": lambda message: _text(message.body), **same("receives"),
        "sent": "sent_at", "acknowledged": "acknowledged_at",
    }  # fmt: skip
    show_list(archived, columns, as_json=as_json, json=_object)


@command(queue, context_settings={"allow_interspersed_args": False})
def work(
    context: CliContext,
    *,
    name: QueueName,
    handler: Annotated[tuple[str, ...], argument(metavar="COMMAND...", nargs=-1, required=True)],
    workers: Annotated[int, option("Messages that are handled at once.", type=Whole(1, MAX_WORKERS), default=1)],
    drain: Annotated[bool, option("End when no message is visible, in flight or waiting for its time.")],
) -> None:
    """Run COMMAND for each message of QUEUE, with the body on standard input, until Ctrl-C or SIGTERM.

    Exit code 0 acknowledges the message. With another exit code, the message is received again after a pause, and
    becomes a dead letter after the queue's max receives. Messages under way are finished before the command ends; the
    next Ctrl-C kills their programs and ends it at once. Ctrl-Z stops the programs, too.
    """
    # As for other commands that run a command: `eventsql queue work mails -- send-mail --fast`.
    program = handler[1:] if handler[0] == "--" and len(handler) > 1 else handler
    check_command(program)
    if program is handler and (same_named := {"--drain", "--workers"} & {word.partition("=")[0] for word in handler}):
        say(f"{handler[0]} gets {', '.join(sorted(same_named))}: options of this command are put before QUEUE")
    with context.platform() as platform:
        working = work_off(_existing(platform, name), program, workers=workers, drain=drain)
        handled, failed = counted(working.handled, "message"), counted(working.failed, "receive")
        dead = "".join(
            f", {counted(number, 'message')} given up: `{advised('queue peek', letters)}`"
            for letters, number in working.dead_letters.items()
        )
        say(f"{handled} of queue {name!r} handled, {failed} failed{dead}")
