"""The output of `eventsql backfill`: a plan, its runs and how they ended, and the backfills that are not done."""

from __future__ import annotations

import time
from typing import Any, Final

from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

from eventsql_orchestration.cli.output import on_shard, progress_bar, say, write_json
from eventsql_orchestration.cli.tables import Columns, partition_name, picked, same, show_fields, show_items
from eventsql_orchestration.orchestration.backfills.driver import BackfillDriver, DriverProgress, Outcome
from eventsql_orchestration.orchestration.backfills.launcher import BackfillJob
from eventsql_orchestration.orchestration.backfills.windows import (
    Backfill,
    Plan,
    PlannedRun,
    letters_command,
    resume_command,
)
from eventsql_orchestration.orchestration.errors import RunFailedError
from eventsql_orchestration.validation import counted

RUNS_SHOWN: Final = 50

PROGRESS_SECONDS: Final = 10.0
"""Seconds between two lines of progress, if there is no terminal for a bar."""


def drive(driver: BackfillDriver) -> Outcome:
    """Drive a backfill to its end with a progress bar, or a line every 10 s if there is no terminal."""
    found, launcher = driver.backfill, driver.launcher
    resume = f"`{resume_command(found.topic, found.consumer, found.id, launcher.resume_options)}`"
    say(f"backfill {found.id} runs; if it is interrupted, {resume} goes on with it")
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "events", TimeElapsedColumn())
    progress = progress_bar(*columns, transient=False)
    told, told_at = "", time.monotonic()
    try:
        with progress:
            task = progress.add_task("Replaying", total=None)

            def show(now: DriverProgress) -> None:
                nonlocal told, told_at
                failed = f", {now.failed} failed" if now.failed else ""
                given_up = f", {counted(now.given_up, 'event')} given up" if now.given_up else ""
                runs = f"{now.done_runs} of {counted(now.runs, 'run')}, {now.running} under way"
                how = f"{runs}{failed}{given_up}"
                progress.update(task, total=now.events, completed=now.done_events, description=how)
                failing = f"; {now.failing}" if now.failing else ""
                line = f"{now.done_events:,} of {counted(now.events, 'event')} replayed, {how}{failing}"
                if progress.disable and line != told and time.monotonic() >= told_at + PROGRESS_SECONDS:
                    told, told_at = line, time.monotonic()
                    say(line)

            return driver.run(show)
    except KeyboardInterrupt:
        go_on = launcher.outlives and driver.running
        left = f"; {counted(driver.running, 'run')} go on in {launcher.orchestrator}" if go_on else ""
        say(f"interrupted{left}: {resume} goes on with the rest")
        raise


def show_finished(topic: str, consumer: str, backfill_id: str, *, as_json: bool) -> None:
    """Say that a backfill to be resumed has ended already."""
    if as_json:
        finished = {"topic": topic, "consumer": consumer, "id": backfill_id, "done": True}
        write_json({**finished, "executed": False, "runs": []})
    say(f"backfill {backfill_id} is done: there is nothing to replay")


def conclude(driver: BackfillDriver, outcome: Outcome) -> None:
    """Say that it is done. Raises `RunFailedError` if a run failed."""
    found, runs, options = driver.backfill, driver.runs, driver.launcher.resume_options
    letters = letters_command(found.topic, found.id)
    if outcome.done:
        given_up = f", {outcome.given_up} of them given up: `{letters}`" if outcome.given_up else ""
        say(f"backfill {found.id} is done: {counted(sum(run.events for run in runs), 'event')}{given_up}")
        return
    if not outcome.failures and not outcome.stopped:
        raise RunFailedError(
            f"the runs of backfill {found.id} have ended, but it is not done: it was deleted, or an offset was set "
            f"back meanwhile; `eventsql backfill list {found.topic}` shows if something is left"
        )
    example = "".join(f", {key} for example: {why}" for key, why in list(outcome.failures.items())[:1])
    resume = f"`{resume_command(found.topic, found.consumer, found.id, options)}` goes on with the rest"
    if outcome.stopped:
        raise RunFailedError(
            f"backfill {found.id} stopped after too many failures (--max-failures): "
            f"{counted(outcome.given_up, 'event')} given up (`{letters}`), "
            f"{counted(len(outcome.failures), 'run')} failed{example}; "
            f"correct the consumer's function, then {resume}"
        )
    raise RunFailedError(f"{len(outcome.failures)} of {counted(len(runs), 'run')} failed{example}; {resume}")


def summary_of(
    work: Plan | Backfill, runs: tuple[PlannedRun, ...], job: BackfillJob, into: str | None
) -> dict[str, Any]:
    """A plan, or the rest of a backfill. Over several shards, only the runs have offsets."""
    plan = work if isinstance(work, Plan) else None
    return {
        **picked(work, same("topic", "consumer")),
        "id": work.id if isinstance(work, Backfill) else None,
        **_ends(work.range),
        "events": sum(run.events for run in runs),
        "first_at": plan and plan.first_at,
        "last_at": plan and plan.last_at,
        "into": work.into if isinstance(work, Backfill) else into,
        "job": job.name,
        "assets": list(job.assets),
        "remarks": plan.remarks if plan else [],
    }


def _ends(offsets: tuple[int, int] | None) -> dict[str, int | None]:
    return {"from": None, "to": None} if offsets is None else {"from": offsets[0] + 1, "to": offsets[1]}


def show_backfill(
    summary: dict[str, Any],
    runs: tuple[PlannedRun, ...],
    *,
    executed: bool,
    as_json: bool,
    outcome: Outcome | None = None,
) -> None:
    """The summary and the runs of a backfill, and how each run ended if there is an `outcome`."""
    if as_json:
        listed = [_object(run, summary["id"], outcome) for run in runs]
        result = {} if outcome is None else {"done": outcome.done, "given_up": outcome.given_up}
        write_json({**summary, "executed": executed, **result, "runs": listed})
        return
    texts = {name: ", ".join(value) if isinstance(value, list) else value for name, value in summary.items()}
    show_fields({name.replace("_", " "): value for name, value in texts.items() if value and name != "remarks"})
    for remark in summary["remarks"]:
        say(f"note: {remark}")
    if runs:
        rows = [
            {"run": number, **_object(run, None, None), "partition": partition_name(run.partition)}
            for number, run in enumerate(runs[:RUNS_SHOWN], start=1)
        ]
        show_items(rows, same(*rows[0]))
    if len(runs) > RUNS_SHOWN:
        say(f"and {counted(len(runs) - RUNS_SHOWN, 'run')} more; --json lists them all")


def _object(run: PlannedRun, backfill_id: str | None, outcome: Outcome | None) -> dict[str, Any]:
    planned = {
        **on_shard(run.window.shard),
        "partition": run.partition,
        "from": run.window.after + 1,
        "to": run.window.upto,
        "events": run.events,
    }
    if outcome is None or backfill_id is None:
        return planned
    key = run.key(backfill_id)
    state = "done" if key in outcome.done_keys else "failed" if key in outcome.failures else "left"
    return {**planned, "key": key, "state": state, "failure": outcome.failures.get(key)}


UNFINISHED: Final[Columns] = {
    **same("topic", "consumer", "id"),
    "from": lambda each: _ends(each.range)["from"],
    "to": lambda each: _ends(each.range)["to"],
    "replayed": lambda each: sum(part.consumed for part in each.parts),
    "windows": lambda each: len(each.parts),
    "done": lambda each: sum(part.done for part in each.parts),
    "under_way": lambda each: sum(part.owner is not None and not part.done for part in each.parts),
    "failing": lambda each: sum(part.failed_event is not None and not part.done for part in each.parts),
    **same("given_up"),
    "since": "created_at",
    **same("into"),
}
"""A backfill that is not done, and how far it is."""
