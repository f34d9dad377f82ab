"""The output of the commands: data on standard output, messages on standard error, and no password on either."""

from __future__ import annotations

import base64
import csv
import errno
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, TypeAlias

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.model import NOT_PARTITIONED, Event
from eventsql_orchestration.redaction import hide_passwords

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.progress import Progress, ProgressColumn
    from rich.segment import Segment
    from rich.table import Table

Column: TypeAlias = str | Callable[[Any], object]
"""The name of an attribute, or a function of the object."""

Columns: TypeAlias = Mapping[str, Column]
"""The columns of a table, or the fields of a JSON object, by their names."""

_UNBOUNDED: Final = 100_000
"""Width of a pipe or a file: a row there is one line of any length."""

_SECRETS: Final = (
    # Match up to the last @: an unquoted password may contain an @.
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://[^:/@\s'\"]*:)[^\s'\"]*@", re.IGNORECASE), r"\1***@"),
    (re.compile(r"(password\s*=\s*)('[^']*'|[^\s&'\"]+)", re.IGNORECASE), r"\1***"),
)


class OutputClosedError(BaseException):
    """The reader of standard output has closed it.

    It is not an `Exception`, so that a handler of events that raises it does not count as failed and is not retried.
    """


class OutputFailedError(BaseException):
    """Standard output takes no more, for example because its disk is full. Not an `Exception`, for the same reason."""


_urls: Final[list[str]] = []
"""The URLs of this invocation."""


def begin_with(urls: Iterable[str]) -> None:
    """Forget the URLs and options of an earlier invocation, and keep the passwords of these URLs secret."""
    _urls[:] = urls
    _quiet[:] = [False]


def keep_secret(*urls: str) -> None:
    """Write no password of these URLs from now on."""
    _urls.extend(url for url in urls if url not in _urls)


def redact(text: str) -> str:
    """`text` without the passwords of its database URLs and connection strings, and of this invocation's URLs."""
    text = hide_passwords(text, *_urls)
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


_quiet: Final[list[bool]] = [False]
"""The answer of `is_quiet`."""


def be_quiet() -> None:
    """From now on, print only messages of `complain`."""
    _quiet[:] = [True]


def is_quiet() -> bool:
    """Whether this invocation prints only messages of `complain`."""
    return _quiet[0]


def say(message: str) -> None:
    """One line for the user, on standard error; with --quiet nothing."""
    if not is_quiet():
        complain(message)


def complain(message: str) -> None:
    """Write a warning or an error on standard error, as one line."""
    _tell(f"eventsql: {' '.join(redact(message).split())}\n")


def show_traceback(error: BaseException) -> None:
    """Write the traceback of an error on standard error."""
    _tell(redact("".join(traceback.format_exception(error))))


def _tell(text: str) -> None:
    """Write on standard error. If that fails, the command goes on: its exit code says what it has done."""
    try:
        click.echo(harmless(text), err=True, nl=False)
    except OSError:
        discard(sys.stderr)


def write(text: str) -> None:
    """Write data to standard output, and flush it to the reader.

    Raises `OutputClosedError` or `OutputFailedError`.
    """
    write_bytes(text.encode())


def write_bytes(data: bytes) -> None:
    """As `write`, for data that may not be text."""
    if sys.stdout is None:
        raise OutputFailedError("standard output is closed")
    left = memoryview(data)
    try:
        while left:
            # An unbuffered stream writes as much as a pipe takes, and returns the amount.
            written = sys.stdout.buffer.write(left)
            if written is None:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            left = left[written:]
        sys.stdout.buffer.flush()
    except BrokenPipeError as error:
        raise OutputClosedError from error
    except OSError as error:
        raise OutputFailedError(f"standard output cannot be written: {error.strerror or error}") from error


def discard(stream: TextIO) -> None:
    """Discard the further output of a standard stream: the interpreter would fail at its end on the rest."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, and two further kinds. Some characters turn the direction of text, so that a line looks different
from its content. Halves of characters cannot be written; JSON can name them."""


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def harmless(text: str) -> str:
    """A text with its control characters escaped, except line feeds and tabs: a terminal would obey them."""
    return _CONTROLS.sub(lambda found: found[0] if found[0] in "\n\t" else _escaped(found), text)


def write_json(value: object, *, indent: int | None = 2) -> None:
    """Write one JSON document; with `indent=None` it is one line."""
    write(_json(value, indent=indent) + "\n")


def _json(value: object, *, indent: int | None = None) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=_as_json)
    # JSON escapes only control characters below U+0020, but a terminal also obeys control characters from U+007F on.
    return harmless(text)


def _as_json(value: object) -> object:
    if isinstance(value, datetime):
        return timestamp(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def event_object(event: Event, *, shard: str | None) -> dict[str, Any]:
    """An event as the commands print it. `timestamp` is the time of its publication; `shard` is there if it has one."""
    return {
        **on_shard(shard),
        "topic": event.topic,
        "offset": event.id,
        "partition": event.partition,
        "key": event.key,
        **({"value": None} if event.erased else bytes_field("value", event.value)),
        "timestamp": timestamp(event.buffered_at),
        "metadata": dict(event.metadata),
    }


def bytes_field(name: str, data: bytes) -> dict[str, str]:
    """Bytes for a JSON object: a text; base64, and a field `encoding` that says so, if they are not UTF-8."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: base64.b64encode(data).decode(), "encoding": "base64"}


def on_shard(shard: str | None) -> dict[str, Any]:
    """The name of a shard for a JSON object, if there are several shards."""
    return {} if shard is None else {"shard": shard}


def write_events(events: Iterable[Event], *, shard: str | None) -> None:
    """Write events as JSON lines."""
    write_lines(event_object(event, shard=shard) for event in events)


def write_lines(items: Iterable[Mapping[str, Any]]) -> None:
    """Write objects as JSON lines."""
    if lines := [f"{_json(item)}\n" for item in items]:
        write("".join(lines))


def write_csv(items: Iterable[Mapping[str, Any]], columns: Sequence[str], *, header: bool) -> None:
    """Write the columns of objects as lines of CSV, after a line with the names of the columns."""
    text = io.StringIO()
    # Quote all texts: before Python 3.13, the writer does not quote a lone carriage return, which would end the line.
    lines = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    if header:
        text.write(",".join(columns) + "\n")
    lines.writerows([item.get(name) for name in columns] for item in items)
    write(harmless(text.getvalue()) if stdout_is_terminal() else text.getvalue())


EVENT_FORMATS: Final = ("json", "csv", "value")


class EventWriter:
    """Writes events in a format of EVENT_FORMATS."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._begun = False

    def write(self, events: Sequence[Event], *, shard: str | None) -> None:
        """Write events. CSV begins with the header."""
        if self._form == "json" or not events:
            write_events(events, shard=shard)
        elif self._form == "value":
            write_bytes(b"".join((event.value or b"") + b"\n" for event in events))
        else:
            self._write_csv([event_object(event, shard=shard) for event in events])

    def _write_csv(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            event["metadata"] = _json(event["metadata"])
        columns = ["shard", *_CSV] if "shard" in events[0] else _CSV
        write_csv(events, columns, header=not self._begun)
        self._begun = True


_CSV: Final = ("topic", "offset", "partition", "key", "value", "encoding", "timestamp", "metadata")


def timestamp(value: datetime) -> str:
    """A time as text, in UTC."""
    return value.astimezone(UTC).isoformat()


def stdout_is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def progress_bar(*columns: str | ProgressColumn, transient: bool = True) -> Progress:
    """A progress bar on standard error. It is disabled with --quiet, and if that is not a terminal."""
    shown = sys.stderr is not None and sys.stderr.isatty() and not is_quiet()
    return lazy.Progress(*columns, console=lazy.Console(stderr=True), transient=transient, disable=not shown)


def same(*names: str) -> dict[str, Column]:
    """Columns that have the names of their attributes."""
    return {name: name for name in names}


def without(item: Any, *names: str) -> dict[str, Any]:
    """The fields of an object of a data class, except those of `names`."""
    return {name: value for name, value in asdict(item).items() if name not in names}


def picked(item: object, columns: Columns) -> dict[str, Any]:
    """The columns of an object by their names."""
    return {name: getattr(item, each) if isinstance(each, str) else each(item) for name, each in columns.items()}


_GAP: Final = 2
"""The space between two columns."""

_FOLDED: Final = 8
"""The narrowest column into which a text is folded."""

_SENTENCE: Final = 24
"""The narrowest column in which a text of several words is easy to read."""


def table_of(
    items: Sequence[Any], columns: Columns, *, right: Collection[str] = (), spare: Collection[str] = ()
) -> Listing:
    """A table for people with a row for each object. A column `shard` without values is left out.

    Numbers and the columns of `right` are right-aligned, with groups of digits. None is a dash. A terminal in which
    names would be folded leaves out the columns of `spare`.
    """
    rows = [picked(item, columns) for item in items]
    shown = [name for name in columns if name != "shard" or any(row[name] is not None for row in rows)]
    drawn = lazy.Table(box=None, pad_edge=False, header_style="bold")
    least = wanted = -_GAP
    for name in shown:
        cells = [row[name] for row in rows]
        numeric = bool(cells) and all(isinstance(cell, int | float | None) for cell in cells)
        # A narrow terminal folds texts. Numbers stay whole: a number that is cut short is another number.
        whole = not any(isinstance(cell, str) for cell in cells)
        justify: Literal["right", "left"] = "right" if numeric or name in right else "left"
        natural = max(len(text) for text in (name, *map(cell, cells)))
        least += (natural if whole else min(natural, _FOLDED)) + _GAP
        words = not whole and any(" " in str(each) for each in cells)
        wanted += (min(natural, _SENTENCE) if words else natural) + _GAP
        drawn.add_column(name, justify=justify, no_wrap=whole, overflow="fold")
    for row in rows:
        drawn.add_row(*(lazy.Text(cell(row[name])) for name in shown))
    fewer = {name: column for name, column in columns.items() if name not in spare}
    return Listing(drawn, least, wanted, table_of(items, fewer, right=right) if spare else None)


class Listing:
    """A table that is at least as wide as its numbers and the words of its texts need.

    In a terminal that is narrower, the terminal breaks its lines. A refreshing screen shows the left part. In a
    terminal that is narrower than `wanted`, it is the table `narrow`, if there is one.
    """

    def __init__(self, drawn: Table, least: int, wanted: int = 0, narrow: Listing | None = None) -> None:
        self._drawn = drawn
        self._least = least
        self._wanted = wanted
        self._narrow = narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        if self._narrow is not None and options.max_width < self._wanted:
            yield from self._narrow.__rich_console__(console, options)
            return
        yield from console.render(self._drawn, options.update_width(max(options.max_width, self._least)))


def cell(value: object) -> str:
    """A value as one line of text, for people."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.1f}"
        case datetime():
            # In this machine's time zone, in the form that options take.
            return value.astimezone().isoformat(" ", "seconds")
        case _:
            # A row is one line, so line breaks become spaces. A terminal would obey other control characters.
            text = _json(value) if isinstance(value, dict) else str(value)
            return _CONTROLS.sub(_escaped, " ".join(text.splitlines()))


def show(renderable: RenderableType) -> None:
    """Write an object of rich to standard output."""
    terminal = stdout_is_terminal()
    console = lazy.Console(
        file=io.StringIO() if not terminal else None, width=None if terminal else _UNBOUNDED, highlight=False
    )
    with console.capture() as capture:
        # Uncropped: see `Listing`.
        console.print(renderable, crop=False)
    lines = capture.get().splitlines()
    write("".join(f"{line if terminal else line.rstrip()}\n" for line in lines))


def show_items(
    items: Sequence[Any], columns: Columns, *, right: Collection[str] = (), spare: Collection[str] = ()
) -> None:
    show(table_of(items, columns, right=right, spare=spare))


def show_list(
    items: Sequence[Any], columns: Columns, *, as_json: bool, json: Callable[[Any], object] = asdict,
    spare: Collection[str] = (),
) -> None:  # fmt: skip
    """Write objects as a table or, with `as_json`, as a JSON list of what `json` makes of each."""
    if as_json:
        write_json([json(item) for item in items])
    else:
        show_items(items, columns, spare=spare)


def show_fields(fields: Mapping[str, object]) -> None:
    """Write names with their values, one to a line."""
    grid = lazy.Table.grid(padding=(0, 2))
    for name, value in fields.items():
        grid.add_row(lazy.Text(cell(name), style="bold"), lazy.Text(cell(value)))
    show(grid)


def partition_of(item: Any) -> str:
    """The partition of an object, for people."""
    return partition_name(item.partition)


def partition_name(partition: int) -> str:
    """A partition for people. Without partitioning, it has no number."""
    return "all" if partition == NOT_PARTITIONED else str(partition)
