"""The program `eventsql`: its commands, the options before the commands, and its exit codes."""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import (
    OutputClosedError,
    OutputFailedError,
    be_quiet,
    begin_with,
    complain,
    discard,
    keep_secret,
    say,
    show_traceback,
)
from eventsql_orchestration.cli.parameters import FILE, Name, command, option
from eventsql_orchestration.cli.urls import ASK, ask_for_url, urls_of_file
from eventsql_orchestration.errors import ConfigurationError, EventSQLError, MissingExtraError, ValidationError
from eventsql_orchestration.validation import split_urls

DONE: Final = 0
FAILED: Final = 1
WRONG_USAGE: Final = 2
INTERRUPTED: Final = 130
"""128 + SIGINT, as shells have it."""

_PACKAGE: Final = "eventsql_orchestration"


class _LoadedWhenCalled(click.Command):
    """A command that the program lists without loading its module, which may import optional packages."""

    def __init__(self, name: str, help: str, module: str | None = None) -> None:  # noqa: A002 - click's name for it
        super().__init__(name, short_help=help)
        self.module: Final = f"{_PACKAGE}.cli.{module or name}"

    def load(self) -> click.Command:
        """The command itself, with its options. In a list, it has the line that it has here."""
        loaded = getattr(importlib.import_module(self.module), str(self.name))
        assert isinstance(loaded, click.Command)
        loaded.short_help = self.short_help
        return loaded

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        return self.load().make_context(*arguments, **extra)


def _secret_part(argument: str) -> str | None:
    """The part of an argument that may hold a password: a URL from its scheme on, or a connection string.

    The time is proportional to the length of the argument, which may be an event of 128 KiB. A web page's URL without a
    user holds no password.
    """
    before, separator, after = argument.partition("://")
    if separator:
        reversed_scheme = re.match(r"[\w+]*", before[::-1])
        assert reversed_scheme is not None
        scheme = reversed_scheme[0][::-1]
        return None if scheme in {"http", "https"} and "@" not in after else f"{scheme}://{after}"
    return argument if re.search(r"password\s*=", argument, re.IGNORECASE) else None


class Application(click.Group):
    """A group that ends with the program's exit codes (0 done, 1 failed, 2 wrong usage) and a line that says why."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        """The commands in the order of their adding."""
        return list(self.commands)

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *more: Any, **settings: Any
    ) -> NoReturn:
        # The interpreter collects garbage at its end, which takes two seconds on a busy machine if Dagster is loaded.
        # The system takes the memory back anyway.
        atexit.unregister(gc.freeze)
        atexit.register(gc.freeze)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # The encoding of a terminal may lack characters of help texts and trends. Data is UTF-8 in any case.
            sys.stdout.reconfigure(errors="replace")
        given = sys.argv[1:] if args is None else args
        begin_with([*filter(None, map(_secret_part, given)), *split_urls(os.environ.get("EVENTSQL_DSN", ""))])
        try:
            code = super().main(args, prog_name or "eventsql", *more, **{**settings, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = WRONG_USAGE
        except click.ClickException as error:
            complain(_usage(error))
            code = error.exit_code
        except click.Abort:
            code = INTERRUPTED
        except OSError as error:
            # The output of the help or the version failed. No command has run.
            discard(sys.stdout)
            complain(f"standard output cannot be written: {error.strerror or error}")
            code = FAILED
        sys.exit(code if isinstance(code, int) else DONE)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            # The pipe of a command's help broke: click ends as for the program's help. `write` raises its own error.
            raise
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except (OutputClosedError, OutputFailedError) as error:
            discard(sys.stdout)
            if isinstance(error, OutputClosedError):
                ctx.exit(DONE)
            complain(str(error))
            ctx.exit(FAILED)
        except Exception as error:  # noqa: BLE001 - for every error, the user gets one line and the exit code
            if ctx.params["debug"]:
                with suppress(EventSQLError):
                    keep_secret(*ctx.obj.settings.dsns)
                show_traceback(error)
            complain(lazy.message_of(error))
            wrong = isinstance(error, ValidationError | ConfigurationError) and not isinstance(error, MissingExtraError)
            ctx.exit(WRONG_USAGE if wrong else FAILED)


def _usage(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return message
    global_options = {name for parameter in main.params for name in parameter.opts}
    if isinstance(error, click.NoSuchOption) and error.ctx.parent is not None and error.option_name in global_options:
        command = error.ctx.command_path.removeprefix("eventsql ")
        return f"{error.option_name} stands before the command: eventsql {error.option_name} … {command}"
    return f"{message}; see `{error.ctx.command_path} --help`"


class _Messages(logging.Handler):
    """Shows the library's log records as lines of the program: with `debug` all, else warnings and their ends."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__(logging.DEBUG if debug else logging.INFO)

    def filter(self, record: logging.LogRecord) -> bool:
        return self.level == logging.DEBUG or record.levelno >= logging.WARNING or hasattr(record, "recovery")

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "recovery"):
            say(record.getMessage())
            return
        complain(f"{record.levelname.lower()}: {record.getMessage()}")
        shown = record.exc_text or (record.exc_info and record.exc_info[1])
        if shown and self.level <= logging.DEBUG:
            show_traceback(shown)


@contextmanager
def _shown_log(*, debug: bool) -> Iterator[None]:
    messages, logger = _Messages(debug=debug), logging.getLogger(_PACKAGE)
    before = logger.level
    logger.addHandler(messages)
    logger.setLevel(messages.level)
    # Hide the drivers' log records: errors are raised as well, and other records, such as of a query that Ctrl-C ended,
    # help nobody.
    drivers, unseen = [logging.getLogger(name) for name in ("sqlalchemy", "psycopg")], logging.NullHandler()
    if not debug:
        for driver in drivers:
            driver.addHandler(unseen)

    try:
        yield
    finally:
        logger.removeHandler(messages)
        for driver in drivers:
            driver.removeHandler(unseen)
        logger.setLevel(before)


_DATABASE: Final = (
    "The database: postgresql://user@host:5432/database; repeat it for shards. The list of processes shows this "
    "option. To hide the password, give `-`, which asks for the URL, or set EVENTSQL_DSN, or `dsn` in eventsql.toml. "
    "Without a URL, the embedded server of --home is used."
)
_SCHEMA: Final = "The schema of the platform's tables; or EVENTSQL_SCHEMA  [default: eventsql]."
_SHARD: Final = Name("shard", str)
_HOME: Final = "The directory of the embedded server and its files; or EVENTSQL_HOME  [default: .eventsql]."


@click.version_option(package_name="eventsql-orchestration", message="eventsql %(version)s")
@command(
    name="eventsql",
    cls=Application,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="A command that loses something, or lets events be handled again, only shows a plan. With --execute, it "
    "acts without a question. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. Data goes to standard "
    "output, messages to standard error.",
)
def _program(
    context: CliContext,
    *,
    dsn: Annotated[tuple[str, ...], option(_DATABASE, metavar="URL")],
    dsn_file: Annotated[Path | None, option("A file with the URL, or with the URLs of all shards.", type=FILE)],
    shard: Annotated[str | None, option("Use only the shard of this name.", type=_SHARD, metavar="NAME")],
    schema: Annotated[str | None, option(_SCHEMA, metavar="NAME")],
    home: Annotated[Path | None, option(_HOME, type=click.Path(path_type=Path, file_okay=False))],
    quiet: Annotated[bool, option("Print only data and errors.", "-q", "--quiet")],
    debug: Annotated[bool, option("Show the traceback of an error, and the log of the library.")],
) -> None:
    """An event log in the PostgreSQL that you already run."""
    if quiet:
        be_quiet()
    if dsn and dsn_file is not None:
        raise click.UsageError("--dsn and --dsn-file both name the database: give one of them")
    if dsn:
        context.dsn = " ".join(ask_for_url() if value == ASK else value for value in dsn)
    elif dsn_file is not None:
        context.dsn, context.dsn_option = urls_of_file(dsn_file), "--dsn-file"
    context.schema, context.home, context.shard = schema, home, shard
    click.get_current_context().with_resource(_shown_log(debug=debug))


assert isinstance(_program, Application)
main: Final = _program

_COMMANDS: Final = (
    _LoadedWhenCalled("init", "Make a small project with a topic, a consumer and a test."),
    _LoadedWhenCalled("dev", "Run the whole system on this machine."),
    _LoadedWhenCalled("migrate", "Create the platform's tables, or bring them up to date."),
    _LoadedWhenCalled("doctor", "Tell what is wrong here, and what fixes it."),
    _LoadedWhenCalled(
        "topic",
        "Create, list, describe, alter and delete topics, drop events by retention, and erase the events of a key.",
    ),
    _LoadedWhenCalled("consumer", "Create, list, describe, pause, resume and delete consumers."),
    _LoadedWhenCalled("publish", "Publish JSON lines, CSV or Parquet to TOPIC."),
    _LoadedWhenCalled("capture", "Publish the changes of a table's rows to a topic."),
    _LoadedWhenCalled("transfer", "Move published events into their topics' logs."),
    _LoadedWhenCalled(
        "consume", "Print the events that a consumer has not consumed, and commit its offsets.", "events"
    ),
    _LoadedWhenCalled("tail", "Print events as JSON lines, without committing anything.", "events"),
    _LoadedWhenCalled("lag", "Show how far consumers are behind, and why."),
    _LoadedWhenCalled("top", "Show rates, lag and what stands still, on a screen that refreshes."),
    _LoadedWhenCalled("metrics", "Serve or print the platform's figures in the text format of Prometheus."),
    _LoadedWhenCalled("seek", "Move a consumer to another place in its topic's log."),
    _LoadedWhenCalled("dlt", "List, show, redrive and dismiss dead letters.", "dead_letters"),
    _LoadedWhenCalled("queue", "Create, inspect, fill, process, empty and delete queues."),
    _LoadedWhenCalled(
        "view", "List and drop views, apply their retention, sort logs, and clean up killed rebuilds.", "views"
    ),
    _LoadedWhenCalled("timeline", "Show what happened to a resource.", "views"),
    _LoadedWhenCalled("rollup", "Show counts per bucket of time.", "views"),
    _LoadedWhenCalled("logs", "Search the lines of logs.", "views"),
    _LoadedWhenCalled("trace", "Show where an event comes from."),
    _LoadedWhenCalled("backfill", "Replay a range of a topic through a consumer."),
    _LoadedWhenCalled(
        "store", "Look at the event store, append to it, replay subscriptions, and dismiss their dead letters."
    ),
    _LoadedWhenCalled("shard", "List shards, and add one while events flow."),
    _LoadedWhenCalled("roles", "Create, list and drop roles with the least rights for each task."),
    _LoadedWhenCalled("server", "Show, start and stop the embedded server of this directory."),
    _LoadedWhenCalled("completion", "Print the script that makes Tab complete names in a shell."),
    _LoadedWhenCalled("bench", "Measure events per second, latency and retention here."),
)

for _command in _COMMANDS:
    main.add_command(_command)


def whole_program() -> click.Group:
    """The program with all commands loaded, for the reference of the commands: a page has all options."""
    commands = {str(each.name): each.load() for each in _COMMANDS}
    return Application("eventsql", commands, params=main.params, help=main.help, epilog=main.epilog)
