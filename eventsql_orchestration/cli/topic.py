"""`eventsql topic`: the topics of the registry."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import click

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import counted, say, show_table, write_json
from eventsql_orchestration.cli.parameters import Duration, Size, json_option, options, topic_argument
from eventsql_orchestration.cli.topic_output import description, form, kept, size, topic_object
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.errors import TopicNotFoundError
from eventsql_orchestration.model import NOT_PARTITIONED, Retention, Topic, check_partitions

_retention_options = options(
    click.option("--retention-age", type=Duration(), metavar="DURATION", help="Keep events for 7d, 12h, PT36H."),
    click.option("--retention-size", type=Size(), metavar="SIZE", help="Keep the newest 10GiB, 500MB."),
    click.option("--retention-events", type=click.IntRange(min=1), metavar="N", help="Keep the newest N events."),
    click.option("--keep-forever", is_flag=True, help="Keep all events: remove the bounds."),
)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The options of retention. Raises `ValidationError`, and `click.UsageError` if they contradict each other."""

    retention_age: timedelta | None
    retention_size: int | None
    retention_events: int | None
    keep_forever: bool

    def __post_init__(self) -> None:
        if self.keep_forever and self.named:
            raise click.UsageError("--keep-forever contradicts the bounds of retention")
        self.on_top_of(None)

    @property
    def named(self) -> dict[str, Any]:
        age = self.retention_age
        bounds = {
            "seconds": None if age is None else age.total_seconds(),
            "bytes": self.retention_size,
            "events": self.retention_events,
        }
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def on_top_of(self, before: Retention | None) -> Retention | None:
        """A topic's retention, with these bounds in place of its own bounds. None without bounds."""
        if self.keep_forever:
            return Retention()
        return replace(before or Retention(), **self.named) if self.named else None


@click.group()
def topic() -> None:
    """Create, list, describe, alter and delete topics, and drop events beyond their retention."""


@topic.command()
@topic_argument
@click.option(
    "--partitions",
    type=int,
    default=NOT_PARTITIONED,
    metavar="N",
    help="1 to 32767; without it the topic is not partitioned (-1).",
)
@click.option("--dead-letters", is_flag=True, help="Also create TOPIC_dlt for the events that its consumers give up.")
@_retention_options
@pass_context
def create(context: CliContext, /, *, topic: str, partitions: int, dead_letters: bool, **retention: Any) -> None:
    """Create TOPIC, or change it.

    A topic that exists gets the bounds of retention that options name. If it has no events and no consumers, it also
    gets the number of partitions.
    """
    wanted, bounds = Topic(topic, partitions), _Bounds(**retention)
    letters = Topic(wanted.dead_letter_topic) if dead_letters else None
    with context.definitions() as platform:
        _register(platform, wanted, bounds)
        if letters is not None:
            before = _find(platform, letters.name)
            if before is None:
                platform.registry.register_topic(letters)
            done = "created" if before is None else "exists already"
            say(f"topic {letters.name!r} {done}, {form(before or letters)}")


@topic.command()
@topic_argument
@click.option("--partitions", type=int, metavar="N", help="1 to 32767, or -1 for none.")
@_retention_options
@pass_context
def alter(context: CliContext, /, *, topic: str, partitions: int | None, **retention: Any) -> None:
    """Change the partitions or the retention of TOPIC.

    The number of partitions of a partitioned topic can change while publishers and consumers go on: every consumer
    finishes the old partitions before it begins with the new ones, so that keys stay in their order (`eventsql topic
    describe` shows consumers that have not finished). Retention drops whole old segments of the log, and keeps segments
    that a consumer has not passed.
    """
    bounds = _Bounds(**retention)
    if partitions is not None:
        check_partitions(partitions)
    elif not bounds.named and not bounds.keep_forever:
        raise click.UsageError("nothing to alter: give --partitions, a bound of retention or --keep-forever")
    with context.definitions() as platform:
        found = platform.registry.topic(topic)
        if partitions is not None and found.partitioned and partitions != NOT_PARTITIONED:
            _repartition(platform, found, partitions)
            if not bounds.named and not bounds.keep_forever:
                return
            found = platform.registry.topic(topic)
        elif partitions is not None:
            found = replace(found, partitions=partitions)
        _register(platform, found, bounds)


def _repartition(platform: EventSQL, topic: Topic, partitions: int) -> None:
    changed = platform.repartitioner.repartition(topic.name, partitions)
    if changed is None:
        say(f"topic {topic.name!r} has {counted(partitions, 'partition')} already")
        return
    # Each shard has its own offsets: `topic describe` shows them.
    after = f" after offset {changed.after:,}" if len(platform.shards) == 1 else " on every shard"
    say(f"topic {topic.name!r} has {counted(partitions, 'partition')}{after}; it had {changed.before:,}")
    if waiting := {name for shard in platform.shards for name in shard.layouts.unsettled(topic.name)}:
        say(
            f"yet to finish the old partitions before the new ones: {', '.join(sorted(waiting))}; sensors and "
            "deployments that name partitions need the new number"
        )


def _register(platform: EventSQL, wanted: Topic, bounds: _Bounds) -> None:
    before = _find(platform, wanted.name)
    retention = bounds.on_top_of(None if before is None else before.retention)
    platform.registry.register_topic(replace(wanted, retention=retention))
    after = platform.registry.topic(wanted.name)
    if before is None:
        say(f"topic {after.name!r} created, {form(after)}")
    elif form(before) == form(after):
        say(f"topic {after.name!r} exists already, {form(after)}")
    else:
        say(f"topic {after.name!r} is {form(after)} now; it was {form(before)}")


def _find(platform: EventSQL, name: str) -> Topic | None:
    try:
        return platform.registry.topic(name)
    except TopicNotFoundError:
        return None


@topic.command("list")
@json_option
@pass_context
def list_topics(context: CliContext, *, as_json: bool) -> None:
    """List the topics."""
    with context.platform() as platform:
        topics = platform.registry.topics()
    if as_json:
        write_json([{**context.on_shard(None), **topic_object(each)} for each in topics])
    else:
        rows = [
            (each.name, each.partitions if each.partitioned else None, each.created_at, kept(each)) for each in topics
        ]
        show_table(["topic", "partitions", "created (UTC)", "kept"], rows)


@topic.command()
@topic_argument
@json_option
@pass_context
def describe(context: CliContext, *, topic: str, as_json: bool) -> None:
    """Show TOPIC: its partitions, their events, and its consumers."""
    with context.platform() as platform:
        described = description(platform, topic)
    if as_json:
        write_json(described.as_json(context))
    else:
        described.show()


@topic.command()
@topic_argument
@click.option("--force", is_flag=True, help="Delete its events and consumers with it.")
@pass_context
def delete(context: CliContext, *, topic: str, force: bool) -> None:
    """Delete TOPIC; one that has events or consumers only with --force."""
    with context.definitions() as platform:
        platform.registry.unregister_topic(topic, force=force)
    say(f"topic {topic!r} deleted")


@topic.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--dry-run", is_flag=True, help="Only say what would be dropped.")
@click.option("--force", is_flag=True, help="Also drop events that consumers have not consumed: they lose them.")
@json_option
@pass_context
def retain(context: CliContext, *, topics: tuple[str, ...], dry_run: bool, force: bool, as_json: bool) -> None:
    """Drop the segments beyond the retention of each TOPIC, or of all topics.

    `eventsql transfer` does it once a minute, and Dagster's housekeeping once an hour.
    """
    with context.platform() as platform:
        dropped = platform.retention.run_once(topics or None, force=force, execute=not dry_run)
    if as_json:
        write_json([asdict(each) for each in dropped])
    elif not dropped:
        say("nothing has a retention: give one with `eventsql topic alter`")
    else:
        show_table(
            ["topic", "would drop" if dry_run else "dropped", "events (about)", "size", "up to offset", "kept for"],
            [
                (
                    each.topic,
                    counted(each.segments, "segment"),
                    each.events,
                    size(each.bytes),
                    each.upto if each.segments else "",
                    each.held_by or "",
                )
                for each in dropped
            ],
        )
