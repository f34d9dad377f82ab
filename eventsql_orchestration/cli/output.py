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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.model import Event
from eventsql_orchestration.redaction import hide_passwords

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

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


def say_plan(would: str, options: str = "--execute", *, number: int | None = None) -> None:
    """Say what a command would do, and the options with which it does that. Nothing to do if `number` is 0."""
    say(f"nothing to do: {would}" if number == 0 else f"a plan, nothing is done: {would}; run it again with {options}")


def complain(message: str) -> None:
    """Write a warning or an error on standard error, as one line."""
    _tell(f"eventsql: {' '.join(redact(message).split())}\n")


def show_traceback(error: BaseException | str) -> None:
    """Write the traceback of an error, or one that is text already, on standard error."""
    _tell(redact(error if isinstance(error, str) else "".join(traceback.format_exception(error))))


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


def one_line(text: str) -> str:
    """A text as one line, with its control characters escaped. Line breaks become spaces."""
    return _CONTROLS.sub(_escaped, " ".join(text.splitlines()))


def write_json(value: object, *, indent: int | None = 2) -> None:
    """Write one JSON document; with `indent=None` it is one line."""
    write(json_text(value, indent=indent) + "\n")


def json_text(value: object, *, indent: int | None = None) -> str:
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
    if lines := [f"{json_text(item)}\n" for item in items]:
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


_CSV: Final = ("topic", "offset", "partition", "key", "value", "encoding", "timestamp", "metadata")


class EventWriter:
    """Writes events in a format of EVENT_FORMATS. CSV begins with a header at once, even if there are no events."""

    def __init__(self, form: str, *, sharded: bool) -> None:
        self._form = form
        self._columns = ["shard", *_CSV] if sharded else [*_CSV]
        if form == "csv":
            write_csv([], self._columns, header=True)

    def write(self, events: Sequence[Event], *, shard: str | None) -> None:
        if self._form == "json":
            write_events(events, shard=shard)
        elif self._form == "value":
            write_bytes(b"".join((event.value or b"") + b"\n" for event in events))
        else:
            objects = (event_object(event, shard=shard) for event in events)
            texts = ({**each, "metadata": json_text(each["metadata"])} for each in objects)
            write_csv(texts, self._columns, header=False)


def timestamp(value: datetime) -> str:
    """A time as text, in UTC."""
    return value.astimezone(UTC).isoformat()


def stdout_is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def progress_bar(*columns: str | ProgressColumn, transient: bool = True) -> Progress:
    """A progress bar on standard error. It is disabled with --quiet, and if that is not a terminal."""
    shown = sys.stderr is not None and sys.stderr.isatty() and not is_quiet()
    return lazy.Progress(*columns, console=lazy.Console(stderr=True), transient=transient, disable=not shown)
