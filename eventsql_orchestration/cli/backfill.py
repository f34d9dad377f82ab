"""`eventsql backfill`: replaying a range of a topic through a consumer, as Dagster runs, after a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Final

import click

from eventsql_orchestration.cli.backfill_output import conclude, drive, progress_of, show_backfill, summary_of
from eventsql_orchestration.cli.context import CliContext, open_platform, pass_context
from eventsql_orchestration.cli.output import say, show_table, write_json
from eventsql_orchestration.cli.parameters import (
    ConsumerName,
    Duration,
    LogPlace,
    consumer_argument,
    json_option,
    optional_topic_argument,
    partition_option,
    topic_argument,
)
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.dagster.backfills.driver import BackfillDriver
from eventsql_orchestration.dagster.backfills.launcher import Launcher
from eventsql_orchestration.dagster.backfills.local_launcher import CodeLocation, LocalRuns
from eventsql_orchestration.dagster.backfills.registry import Backfills
from eventsql_orchestration.dagster.backfills.remote_launcher import RemoteDagster
from eventsql_orchestration.dagster.backfills.windows import (
    DEFAULT_MAX_FAILURES,
    Backfill,
    Plan,
    ReplayRange,
    check_id,
    new_id,
    resume_command,
)
from eventsql_orchestration.dagster.local.dagster_process import running_url
from eventsql_orchestration.dagster.local.instance import instance_directory
from eventsql_orchestration.dagster.shards import shards_of
from eventsql_orchestration.errors import DatabaseBusyError, PartitionLeasedError, RegistryError, ShardSetError
from eventsql_orchestration.topics.offsets import Latest, Place

DEFINITIONS: Final = Path("definitions.py")

_NOT_RUN: Final = {False: "a plan, nothing runs", True: "the rest of it, nothing runs"}


class _RunByDefault(click.Group):
    """A group whose command `run` is the default."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=_RunByDefault,
    short_help="Replay a range of a topic through a consumer.",
    subcommand_metavar="[run] TOPIC CONSUMER | list | delete",
)
def backfill() -> None:
    """Replay a range of a topic through a consumer: a plan and, with --execute, Dagster runs.

    `eventsql backfill TOPIC CONSUMER --from …` is `eventsql backfill run TOPIC CONSUMER --from …`, whose --help tells
    its options.
    """


@backfill.command()
@topic_argument
@consumer_argument
@click.option(
    "--from",
    "start",
    type=LogPlace(),
    metavar="PLACE",
    help="Beginning of the range: earliest, the offset of its first event, the earliest time at which it entered the "
    "log, with its zone (2026-05-01T12:00:00Z), or its age (15m, 2h, 7d).",
)
@click.option(
    "--to",
    "end",
    type=LogPlace(),
    metavar="PLACE",
    help="End of the range: latest, the offset of its last event, or the time before which it entered the log  "
    "[default: latest].",
)
@click.option(
    "--window-events", type=click.IntRange(min=1), metavar="N", help="Cut the range into windows of N events."
)
@click.option("--window", type=Duration(), metavar="DURATION", help="Cut the range into windows of time: 1h, 1d.")
@partition_option
@click.option(
    "--parallel", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N", help="At most N runs at once."
)
@click.option(
    "--into", type=ConsumerName(), metavar="NAME", help="Leave a new consumer NAME at the end of the range, when done."
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Move CONSUMER's own offset to the end of the range first. Without this, the offset stays.",
)
@click.option(
    "--max-failures", type=click.IntRange(min=1), metavar="N",
    help=f"Stop after N dead letters and failed runs together  [default: {DEFAULT_MAX_FAILURES}].",
)  # fmt: skip
@click.option("--id", "backfill_id", metavar="ID", help="Id of the backfill; by default it gets one.")
@click.option("--resume", metavar="ID", help="Run the rest of backfill ID, instead of a range.")
@click.option("--execute", is_flag=True, help="Run it. Without this, only the plan is shown.")
@click.option("--dagster-url", metavar="URL", help="Webserver of the Dagster to run it in: http://127.0.0.1:3000.")
@click.option(
    "-f", "--file", "file", type=click.Path(dir_okay=False, path_type=Path),
    help="Run it in processes, without a running Dagster, with the definitions of this file.",
)  # fmt: skip
@click.option("-m", "--module", metavar="NAME", help="The same, with the definitions of this module.")
@json_option
@pass_context
def run(
    context: CliContext,
    *,
    topic: str,
    consumer: str,
    start: Place | None,
    end: Place | None,
    window_events: int | None,
    window: timedelta | None,
    partition: int | None,
    parallel: int,
    into: str | None,
    take_over: bool,
    max_failures: int | None,
    backfill_id: str | None,
    resume: str | None,
    execute: bool,
    dagster_url: str | None,
    file: Path | None,
    module: str | None,
    as_json: bool,
) -> None:
    """Replay a range of TOPIC through CONSUMER: a plan and, with --execute, Dagster runs.

    Effects through the consumer's connection happen once for each window, also after kills and double starts. The
    consumer's own offset stays. After Ctrl-C, --resume ID --execute runs the rest.

    It runs in the Dagster of --dagster-url, with the definitions of -f or -m, in the `eventsql dev` of this directory,
    or with definitions.py, whichever comes first.
    """
    if (start is None) == (resume is None):
        raise click.UsageError("give the beginning of the range by --from, or a backfill to go on with by --resume ID")
    _check_resume(resume, given={"--to": end, "--id": backfill_id, "--into": into, "--window-events": window_events,
                                 "--window": window, "--partition": partition})  # fmt: skip
    if backfill_id is not None:
        check_id(backfill_id)
    if into == consumer:
        raise click.UsageError("--into must name another consumer than CONSUMER")
    wanted = None if start is None else ReplayRange(start, end or Latest(), window_events, window, partition)
    with (
        _platform(context) as platform,
        _launcher(context, platform, dagster_url, file, module) as launcher,
    ):
        backfills = _backfills(context, platform)
        work: Plan | Backfill
        if wanted is None:
            work = backfills.get(topic, str(resume), consumer)
            runs = backfills.runs_of(work)
        else:
            backfills.check_into(into)
            work = backfills.plan(topic, consumer, wanted)
            runs = work.runs
        job = launcher.job(topic, consumer)
        summary = summary_of(work, runs, job, into)
        if not execute or not runs:
            show_backfill(summary, runs, executed=False, as_json=as_json)
            say(f"{_NOT_RUN[wanted is None]}: run it again with --execute" if runs else "there is nothing to replay")
            return

        if isinstance(work, Backfill):
            found = work
            backfills.renew(found)
        else:
            backfill_id = backfill_id or new_id()
            launcher.require_running()
            if launcher.was_run(job, backfill_id) and backfills.find(topic, backfill_id, consumer) is None:
                raise RegistryError(f"backfill {backfill_id} has run before: give another --id, or none")
            found = backfills.register(work, backfill_id, into=into)
        if take_over:
            _take_over(backfills, found, new=resume is None)
        if not as_json:
            show_backfill(summary, runs, executed=True, as_json=False)
        outcome = drive(BackfillDriver(
            backfills, found, runs, launcher=launcher, job=job, parallel=parallel, max_failures=max_failures
        ), found, outlives=launcher.outlives)  # fmt: skip
        outcome = replace(outcome, given_up=_given_up(platform, found))
        if as_json:
            show_backfill({**summary, "id": found.id}, runs, executed=True, as_json=True, outcome=outcome)
        conclude(found, runs, outcome)


def _given_up(platform: EventSQL, found: Backfill) -> int:
    """The number of dead letters of a backfill. Its windows count them too, but the windows may be deleted by now."""
    source = platform.dead_letters.topic_of(found.topic)
    if source is None:
        return 0
    # The last dead letters can still be in the buffer.
    platform.transfer.run_once([source])
    return platform.dead_letters.of_backfills(found.topic).get(found.id, 0)


def _platform(context: CliContext) -> EventSQL:
    """The platform with all shards: runs find their shard by its name, and a single database does not know the name."""
    return open_platform(context.settings)


def _backfills(context: CliContext, platform: EventSQL) -> Backfills:
    """The backfills of all shards, or of the shard of --shard."""
    shards = shards_of(platform)
    named = [shard for shard in shards if context.shard in {None, shard.name}]
    if not named:
        names = ", ".join(sorted(shard.name for shard in shards if shard.name is not None))
        raise ShardSetError(f"there is no shard {context.shard!r}" + (f", but {names}" if names else ""))
    return Backfills(named)


def _check_resume(resume: str | None, *, given: dict[str, object]) -> None:
    named = [name for name, value in given.items() if value is not None]
    if resume is not None and named:
        raise click.UsageError(f"a backfill that is resumed has its windows already: leave {', '.join(named)} out")


@contextmanager
def _launcher(
    context: CliContext, platform: EventSQL, url: str | None, file: Path | None, module: str | None
) -> Iterator[Launcher]:
    named = [option for option in (url, file, module) if option is not None]
    if len(named) > 1:
        raise click.UsageError("give one of --dagster-url, -f and -m")
    if not named:
        url = running_url(instance_directory(context.settings.home))
        file = DEFINITIONS if url is None else None
    if file is not None and not file.exists():
        raise click.UsageError(
            f"{file} does not exist, and no `eventsql dev` runs here: name a running Dagster with --dagster-url, or "
            "definitions with -f or -m"
        )
    launcher: Launcher
    if url is not None:
        launcher = RemoteDagster(url)
    else:
        environment = {
            "EVENTSQL_DSN": " ".join(shard.database.dsn for shard in platform.shards),
            "EVENTSQL_SCHEMA": platform.shards[0].database.schema,
            "PYSPARK_PYTHON": sys.executable,
        }
        launcher = LocalRuns(CodeLocation(file, module), environment=environment)
    try:
        yield launcher
    finally:
        launcher.close()


def _take_over(backfills: Backfills, found: Backfill, *, new: bool) -> None:
    moved = 0
    try:
        for move in backfills.take_over(found):
            on = f"({move.skipped} events)" if move.shard is None else f"on {move.shard} ({move.skipped} events)"
            say(f"consumer {found.consumer!r} moved from offset {move.offset} to {move.target} {on}")
            moved += 1
    except (RegistryError, PartitionLeasedError, DatabaseBusyError):
        # No offset of this shard has moved. After any other error, one may have moved: the backfill must stay.
        if new and not moved:
            backfills.delete(found)
        elif moved:
            resume = resume_command(found.topic, found.consumer, found.id)
            say(f"the events of the shards that moved are left to it: `{resume}`")
        raise


@backfill.command("list")
@optional_topic_argument
@json_option
@pass_context
def list_backfills(context: CliContext, *, topic: str | None, as_json: bool) -> None:
    """List the backfills that are not done, of TOPIC or of all topics."""
    with _platform(context) as platform:
        found = _backfills(context, platform).registered(topic)
    if as_json:
        write_json([progress_of(each) for each in found])
        return
    show_table(
        [
            "topic", "consumer", "id", "from", "to", "replayed", "windows", "done", "under way", "failing", "given up",
            "since",
        ],
        [tuple(value for name, value in progress_of(each).items() if name != "into") for each in found],
    )  # fmt: skip


@backfill.command()
@topic_argument
@consumer_argument
@click.argument("backfill_id", metavar="ID")
@pass_context
def delete(context: CliContext, *, topic: str, consumer: str, backfill_id: str) -> None:
    """Give up backfill ID: its effects stay, the rest is not replayed. Its runs commit nothing more."""
    with _platform(context) as platform:
        backfills = _backfills(context, platform)
        backfills.delete(backfills.get(topic, backfill_id, consumer))
    say(f"backfill {backfill_id} is deleted")
