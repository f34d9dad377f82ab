"""`eventsql backfill`: replaying a range of a topic through a consumer, as runs of an orchestrator, after a plan."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final, Literal, TypedDict, Unpack, get_args

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.airflow_url import AirflowUrl, local_airflow
from eventsql_orchestration.cli.backfill_output import (
    UNFINISHED,
    conclude,
    drive,
    show_backfill,
    show_finished,
    summary_of,
)
from eventsql_orchestration.cli.context import CliContext, open_platform
from eventsql_orchestration.cli.output import say, say_plan
from eventsql_orchestration.cli.parameters import (
    CONSUMER,
    FILE,
    POSITIVE,
    AsJson,
    ConsumerName,
    OptionalTopicName,
    Partition,
    TopicName,
    Whole,
    argument,
    command,
    executing,
    leave_out,
    option,
)
from eventsql_orchestration.cli.tables import picked, show_list
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.errors import DatabaseBusyError, PartitionLeasedError, RegistryError
from eventsql_orchestration.orchestration.backfills.driver import BackfillDriver
from eventsql_orchestration.orchestration.backfills.launcher import Launcher
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.windows import (
    DEFAULT_MAX_FAILURES,
    Backfill,
    Plan,
    ReplayRange,
    check_id,
    new_id,
    resume_command,
)
from eventsql_orchestration.orchestration.shards import shard_named, shards_of
from eventsql_orchestration.topics.positions import Latest, Place
from eventsql_orchestration.validation import counted

Orchestrator = Literal["dagster", "airflow"]
ORCHESTRATORS: Final = get_args(Orchestrator)


class _RunByDefault(click.Group):
    """A group whose command `run` is the default."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_RunByDefault, subcommand_metavar="[run] TOPIC CONSUMER | list | delete")
def backfill() -> None:
    """Replay a range of a topic through a consumer: a plan and, with --execute, runs of Dagster or Airflow.

    `eventsql backfill TOPIC CONSUMER --from …` is `eventsql backfill run TOPIC CONSUMER --from …`, whose --help tells
    its options.
    """


_FROM: Final = (
    "Beginning of the range: earliest, the offset of its first event, a time with its zone (2026-05-01T12:00:00Z), or "
    "a duration before now (15m, 2h, 7d). Times are those when events entered the log."
)
_TO: Final = "End of the range: latest, the offset of its last event, or a time, which is excluded  [default: latest]."


_FAILURES: Final = f"Stop after N dead letters and failed runs together  [default: {DEFAULT_MAX_FAILURES}]."


class _Options(TypedDict):
    start: Annotated[Place | None, option(_FROM, "--from")]
    end: Annotated[Place | None, option(_TO, "--to")]
    window_events: Annotated[
        int | None, option("Cut the range into windows of N events, all partitions together.", type=POSITIVE)
    ]
    window: Annotated[timedelta | None, option("Cut the range into windows of time: 1h, 1d.")]
    partition: Partition
    parallel: Annotated[int, option("At most N runs at once.", type=Whole(1, 64), default=2)]
    into: Annotated[
        str | None,
        option("When done, leave a new consumer NAME at the end of the range.", type=CONSUMER, metavar="NAME"),
    ]
    take_over: Annotated[bool, option("First move CONSUMER's own offset to the end of the range. By default it stays.")]
    max_failures: Annotated[int | None, option(_FAILURES, type=POSITIVE)]
    backfill_id: Annotated[str | None, option("Id of the backfill; by default a new one.", "--id", metavar="ID")]
    resume: Annotated[str | None, option("Run the rest of backfill ID, instead of a range.", metavar="ID")]
    execute: Annotated[bool, executing("Run it")]
    orchestrator: Annotated[Orchestrator, option("Where it runs.", type=click.Choice(ORCHESTRATORS), default="dagster")]
    airflow_url: AirflowUrl
    dag: Annotated[str | None, option("DAG to run; by default the DAG that CONSUMER's claims schedule.")]
    dagster_url: Annotated[
        str | None, option("Webserver of the Dagster to run it in: http://127.0.0.1:3000.", metavar="URL")
    ]
    file: Annotated[
        Path | None, option("Run it in processes, with the definitions of this file.", "-f", "--file", type=FILE)
    ]
    module: Annotated[
        str | None, option("Run it in processes, with definitions of this module.", "-m", "--module", metavar="NAME")
    ]


@command(backfill)
def run(
    context: CliContext, topic: TopicName, consumer: ConsumerName, as_json: AsJson, **options: Unpack[_Options]
) -> None:
    """Replay a range of TOPIC through CONSUMER: a plan and, with --execute, runs of Dagster or Airflow.

    Without --window or --window-events, the range is one window. Effects through the consumer's connection happen once
    for each window, even after kills and double starts. The consumer's own offset stays. After Ctrl-C, --resume ID
    --execute runs the rest.

    It runs in the Dagster of --dagster-url, with the definitions of -f or -m, in the `eventsql dev` of this directory,
    or with the `dg` project or the definitions.py of this directory, whichever comes first. With --orchestrator
    airflow, it runs in the Airflow of --airflow-url, or of the `eventsql dev --dags` of this directory.
    """
    wanted = _range(consumer, options)
    with _platform(context) as platform, closing(_launcher(context, platform, topic, consumer, options)) as launcher:
        backfills = _backfills(context, platform)
        work: Plan | Backfill
        if wanted is None:
            resumed = str(options["resume"])
            if backfills.is_finished(topic, resumed, consumer):
                show_finished(topic, consumer, resumed, as_json=as_json)
                return
            work = backfills.get(topic, resumed, consumer)
            runs = backfills.runs_of(work)
        else:
            backfills.check_into(options["into"])
            work = backfills.plan(topic, consumer, wanted)
            runs = work.runs

        summary = summary_of(work, runs, launcher.job, options["into"])
        if not options["execute"] or not runs:
            show_backfill(summary, runs, executed=False, as_json=as_json)
            say("a plan, nothing runs: run it again with --execute" if runs else "there is nothing to replay")
            return

        found = _begin(backfills, work, launcher, options)
        if not as_json:
            show_backfill(summary, runs, executed=True, as_json=False)
        driver = BackfillDriver(
            backfills, found, runs,
            launcher=launcher, parallel=options["parallel"], max_failures=options["max_failures"],
        )  # fmt: skip
        outcome = drive(driver)
        outcome = replace(outcome, given_up=_given_up(platform, found))
        if as_json:
            show_backfill({**summary, "id": found.id}, runs, executed=True, as_json=True, outcome=outcome)
        conclude(driver, outcome)


def _range(consumer: str, options: _Options) -> ReplayRange | None:
    """The range to replay, None for the rest of a backfill. Raises `click.UsageError` for contradicting options."""
    start, resume = options["start"], options["resume"]
    if (start is None) == (resume is None):
        raise click.UsageError("give the beginning of the range with --from, or the backfill to resume with --resume")
    if options["backfill_id"] is not None:
        check_id(options["backfill_id"])
    if options["into"] == consumer:
        raise click.UsageError("--into must name another consumer than CONSUMER")

    if start is not None:
        events, window, partition = options["window_events"], options["window"], options["partition"]
        return ReplayRange(start, options["end"] or Latest(), events, window, partition)
    leave_out("is not for --resume", "end", "backfill_id", "into", "window_events", "window", "partition")
    return None


def _begin(backfills: Backfills, work: Plan | Backfill, launcher: Launcher, options: _Options) -> Backfill:
    """Register a plan, or renew the backfill that is resumed, and move the consumer's own offset if that is wanted."""
    if isinstance(work, Backfill):
        backfills.renew(work)
        found = work
    else:
        backfill_id = options["backfill_id"] or new_id()
        launcher.require_running()
        if launcher.was_run(backfill_id) and backfills.find(work.topic, backfill_id, work.consumer) is None:
            raise RegistryError(f"backfill {backfill_id} has run before: give another --id, or none")
        found = backfills.register(work, backfill_id, into=options["into"])
    if options["take_over"]:
        _take_over(backfills, found, launcher.resume_options, new=work is not found)
    return found


def _given_up(platform: EventSQL, found: Backfill) -> int:
    """The number of dead letters of a backfill. Its windows count them too, but the windows may be deleted by now."""
    source = platform.dead_letters.topic_of(found.topic)
    if source is None:
        return 0
    # The last dead letters can still be in the buffer.
    platform.transfer.run_once([source])
    return platform.dead_letters.of_backfills(found.topic).get(found.id, 0)


def _platform(context: CliContext) -> EventSQL:
    """The platform with all shards, even with --shard: runs find their shard by its name."""
    return open_platform(context.settings)


def _backfills(context: CliContext, platform: EventSQL) -> Backfills:
    """The backfills of all shards, or of the shard of --shard."""
    shards = shards_of(platform)
    return Backfills(shards if context.shard is None else [shard_named(shards, context.shard)])


def _launcher(context: CliContext, platform: EventSQL, topic: str, consumer: str, options: _Options) -> Launcher:
    """The place where runs are launched. The caller closes it. Raises `click.UsageError` for contradicting options."""
    airflow = options["orchestrator"] == "airflow"
    # An environment may name the Airflow for other commands.
    foreign = ("dagster_url", "file", "module") if airflow else ("airflow_url", "dag")
    leave_out(f"is not for --orchestrator {options['orchestrator']}", *foreign)
    if airflow:
        url = options["airflow_url"] or local_airflow(context.settings.home)
        if url is None:
            raise click.UsageError("no `eventsql dev --dags` runs here: name a running Airflow with --airflow-url")
        return lazy.AirflowRuns(url, topic, consumer, dag=options["dag"])
    return lazy.dagster_launcher(
        context.settings.home, platform, topic, consumer,
        url=options["dagster_url"], file=options["file"], module=options["module"],
    )  # fmt: skip


def _take_over(backfills: Backfills, found: Backfill, resume_options: str, *, new: bool) -> None:
    moved = 0
    try:
        for move in backfills.take_over(found):
            on = "" if move.shard is None else f" on {move.shard}"
            over = "" if move.skipped is None else f" ({counted(move.skipped, 'event')})"
            say(f"consumer {found.consumer!r} moved from offset {move.offset} to {move.target}{on}{over}")
            moved += 1
    except (RegistryError, PartitionLeasedError, DatabaseBusyError):
        # No offset of this shard has moved. After any other error, an offset may have moved: the backfill must stay.
        if new and not moved:
            backfills.delete(found)
        elif moved:
            resume = resume_command(found.topic, found.consumer, found.id, resume_options)
            say(f"the offsets of some shards have moved: `{resume}` replays their events")
        raise


@command(backfill, "list")
def list_backfills(context: CliContext, topic: OptionalTopicName, as_json: AsJson) -> None:
    """List the backfills that are not done, of TOPIC or of all topics."""
    with _platform(context) as platform:
        found = _backfills(context, platform).registered(topic)
    table = {name.replace("_", " "): column for name, column in UNFINISHED.items() if name != "into"}
    show_list(found, table, as_json=as_json, json=lambda each: picked(each, UNFINISHED))


@command(backfill)
def delete(
    context: CliContext, topic: TopicName, consumer: ConsumerName, backfill_id: Annotated[str, argument(metavar="ID")],
    execute: Annotated[bool, executing("Give it up")],
) -> None:  # fmt: skip
    """Give up backfill ID: its effects stay, the rest is not replayed. Its runs commit nothing more.

    A plan and, with --execute, the deletion.
    """
    with _platform(context) as platform:
        backfills = _backfills(context, platform)
        found = backfills.get(topic, backfill_id, consumer)
        if execute:
            backfills.delete(found)
    if execute:
        say(f"backfill {backfill_id} is deleted")
        return
    left = sum(not part.done for part in found.parts)
    say_plan(
        f"backfill {backfill_id} would be given up with {left:,} of its {counted(len(found.parts), 'window')} left"
    )
