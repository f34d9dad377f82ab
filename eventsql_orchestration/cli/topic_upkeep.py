"""`eventsql topic erase`, `erasures`, `compact` and `retain`: the upkeep of topics' logs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Final

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.keys import ErasedKeys, FileOfKeys, read_keys
from eventsql_orchestration.cli.output import say, say_plan, write_json
from eventsql_orchestration.cli.parameters import (
    POSITIVE,
    AsJson,
    OptionalTopicName,
    TopicName,
    TopicNames,
    command,
    executing,
    option,
)
from eventsql_orchestration.cli.tables import Columns, picked, same, show_fields, show_list
from eventsql_orchestration.orchestration.words import size
from eventsql_orchestration.validation import counted


@command()
def erase(
    context: CliContext,
    *,
    topic: TopicName,
    keys: ErasedKeys,
    key_file: FileOfKeys,
    requested_by: Annotated[str | None, option("A note for the record, such as a ticket.", metavar="TEXT")],
    execute: Annotated[bool, executing("Erase them")],
    as_json: AsJson,
) -> None:
    """Erase the values and metadata of a key's events in TOPIC: a plan and, with --execute, the erasure.

    They are erased in the log, the buffer and the dead letters. Keys, offsets and times stay: consumers get such an
    event without a value. This cannot be undone. Copies elsewhere stay, such as views, queues, archives, backups and
    the database's write-ahead log. If it is interrupted, run it again.

    If TOPIC has the changes of a captured table, first delete or change the rows of the key: the event of such a change
    holds the former row.
    """
    wanted = read_keys(keys, key_file)
    with context.platform() as platform:
        if execute:
            done = platform.eraser.execute(topic, wanted, requested_by=requested_by)
        else:
            done = platform.eraser.plan(topic, wanted)
    if as_json:
        write_json({**asdict(done), "executed": execute})
    else:
        show_fields(picked(done, {**same("keys", "events", "buffered"), "dead letters": "dead_letters"}))
    found = done.events or done.buffered or done.dead_letters
    nothing = "nothing to erase: these keys have no events, or their events are erased already"
    if not execute:
        say("a plan, nothing is erased: run it again with --execute" if found else nothing)
        return
    say(f"{'erased' if found else nothing}; `eventsql topic erasures {topic}` shows the record")
    if not done.vacuumed:
        say(
            "former rows may stay on the disk until the next vacuum: this role does not own the tables, or an open "
            "transaction or a standby's query sees these rows. When these have ended, run VACUUM (ANALYZE) as the "
            "tables' owner"
        )


@command()
def erasures(
    context: CliContext,
    topic: OptionalTopicName,
    key: Annotated[str | None, option("Only erasures of this key.", metavar="KEY")],
    limit: Annotated[int, option("List the newest N.", type=POSITIVE, default=100)],
    as_json: AsJson,
) -> None:
    """List what was erased from TOPIC, or from all topics: when, by whom, and how many events.

    A record has the SHA-256 of the key, not the key.
    """
    with context.platform() as platform:
        records = platform.eraser.records(topic, key=key, limit=limit)
    columns: Columns = {
        **same("shard", "topic"), "key (SHA-256)": "key_digest", "begun": "started_at",
        "finished": "finished_at", **same("role"), "requested by": "requested_by", **same("events", "buffered"),
        "dead letters": "dead_letters",
    }  # fmt: skip
    show_list(records, columns, as_json=as_json)


@command()
def compact(
    context: CliContext, *, topic: TopicName, execute: Annotated[bool, executing("Merge them")], as_json: AsJson
) -> None:
    """Merge the small blocks in the log of TOPIC: a plan and, with --execute, the compaction.

    A topic that is published to one event at a time has small blocks. Offsets, times and contents of events stay, and
    publishers and consumers go on. The newest 20,000 offsets may stay as they are. A segment whose table is much larger
    than its blocks is written anew, which gives the space back to the disk. `eventsql transfer` does it once a minute,
    and Dagster's housekeeping once an hour.
    """
    with context.platform() as platform:
        done = platform.compactor.execute(topic) if execute else platform.compactor.plan(topic)
    if as_json:
        write_json({**asdict(done), "executed": execute})
    else:
        executed = {"merged into": "into", "bytes given back": "freed"} if execute else {}
        show_fields(picked(done, {"small blocks": "blocks", **same("events"), **executed}))
        for each in done.unmerged:
            say(
                f"not merged: partition {each.partition}, offsets {each.after + 1} to {each.upto}, because a block is "
                "broken: run `eventsql doctor`"
            )
    if not execute:
        say("a plan, nothing is merged: run it again with --execute")


_DROPPED: Final[Columns] = same("topic", "segments", "events", "bytes", "upto", "held_by")


@command()
def retain(
    context: CliContext,
    topics: TopicNames,
    execute: Annotated[bool, executing("Drop them")],
    force: Annotated[bool, option("Also drop events that consumers have not consumed: they lose them.")],
    as_json: AsJson,
) -> None:
    """Drop the segments beyond the retention of each TOPIC, or of all topics: a plan and, with --execute, the drop.

    `eventsql transfer` does it once a minute, and Dagster's housekeeping once an hour.
    """
    with context.platform() as platform:
        dropped = platform.retention.run_once(topics or None, force=force, execute=execute)
    if not dropped and not as_json:
        say(
            "nothing to do: no topic has a retention (`eventsql topic alter` sets one), or another process applies it "
            "just now"
        )
        return
    columns: Columns = {
        **same("topic", "shard"),
        "dropped" if execute else "would drop": lambda each: counted(each.segments, "segment"),
        "events (about)": "events",
        "size": lambda each: size(each.bytes),
        "up to offset": lambda each: each.upto if each.segments else "",
        "kept for": lambda each: each.held_by or "",
    }
    context.show_items(dropped, as_json=as_json, json=_DROPPED, table=columns)
    if not as_json and any(not each.segments and each.held_by is None for each in dropped):
        say("a segment is dropped as a whole, when all of its events are beyond the retention")
    if not execute and (segments := sum(each.segments for each in dropped)):
        say_plan(f"{counted(segments, 'segment')} would be dropped")
