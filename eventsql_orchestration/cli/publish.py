"""`eventsql publish`: files and streams of events into a topic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.csv_input import CsvForm
from eventsql_orchestration.cli.input import batches, open_source, stdin_is_terminal
from eventsql_orchestration.cli.output import progress_bar, say, write_json
from eventsql_orchestration.cli.parameters import POSITIVE, Number, TopicName, command, option
from eventsql_orchestration.cli.sources import BadRecord, Record, Source
from eventsql_orchestration.errors import EventSQLError, InputError, InvalidPublicationError
from eventsql_orchestration.model import Publication, check_partition
from eventsql_orchestration.validation import counted, shown

if TYPE_CHECKING:
    from eventsql_orchestration.client.publisher import ClusterPublisher

_BATCH: Final = 5_000
"""Events per commit of a stream. Larger commits are hardly faster."""

_COMMITS_PER_SECOND: Final = 10
"""Commits over which `--rate` spreads the events of a second."""

_SKIPPED_LINES_SHOWN: Final = 20

_RECORDS_PER_UPDATE: Final = 200
"""Records between two updates of the progress bar."""

_FILE: Final = (
    ".jsonl, .json, .ndjson (JSON lines), .csv or .tsv (with a header), also with .gz, or .parquet. Without it, or "
    "with -, JSON lines are read from standard input."
)

_DELIMITER: Final = "The character between the fields of a CSV file, or tab. By default a comma, and a tab in .tsv."

_TYPE: Final = (
    "The type of a field of a CSV file: integer, number, boolean, json or text; repeat it. Fields are text without it. "
    "An empty field of another type is null."
)

_COMMITS: Final = (
    f"Commit every N events. Without it, a stream (standard input, or --rate) commits every {_BATCH:,}, and a file is "
    "one commit."
)


@command()
def publish(
    context: CliContext,
    *,
    topic: TopicName,
    path: Annotated[
        Path | None,
        option(_FILE, "--file", type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True)),
    ],
    key: Annotated[str | None, option("The field whose value, as text, is the event's key.", metavar="FIELD")],
    delimiter: Annotated[str | None, option(_DELIMITER, metavar="CHARACTER")],
    types: Annotated[tuple[tuple[str, str], ...], option(_TYPE, "--type", metavar="FIELD=TYPE")],
    metadata: Annotated[tuple[tuple[str, str], ...], option("For every event; repeat it.")],
    partition: Annotated[int | None, option("Every event goes to this partition.")],
    rate: Annotated[float | None, option("At most N events per second.", type=Number(0, min_open=True), metavar="N")],
    batch: Annotated[int | None, option(_COMMITS, type=POSITIVE)],
    on_bad_line: Annotated[
        Literal["stop", "skip"],
        option("End at a bad line, or report it and go on.", type=click.Choice(["stop", "skip"]), default="stop"),
    ],
    transfer: Annotated[
        bool,
        option(
            "Also move the events into the topic's log, or leave that to another transfer.",
            "--transfer/--no-transfer",
            default=True,
        ),
    ],
    as_json: Annotated[bool, option("Print the summary as JSON.", "--json")],
) -> None:
    """Publish JSON lines, CSV or Parquet to TOPIC.

    A JSON line is the value of its event, byte for byte. A row of CSV or Parquet becomes a JSON object. A file is
    published in one transaction: with a bad line, nothing is published, and the error names the line. A stream is
    committed batch by batch: the events before a bad line are published, and the error tells their number.
    """
    template = Publication(topic, b"", metadata=dict(metadata), partition=partition)
    if path is not None and str(path) == "-":
        path = None
    form = CsvForm("\t" if delimiter in ("tab", r"\t") else delimiter, dict(types))
    with open_source(path, form) as source, context.platform(transfer=transfer) as platform:
        found = platform.registry.topic(topic)
        if partition is not None:
            check_partition(topic, partition, found.partitions)
        if path is None and stdin_is_terminal():
            say("reading JSON lines from the terminal; Ctrl-D ends it")
        with _progress_bar(source) as update:
            publishing = _Publishing(source, template, key, skip=on_bad_line == "skip", update=update)
            if path is not None and rate is None and batch is None:
                publishing.at_once(platform.publisher)
            else:
                publishing.in_batches(platform.publisher, batch or _BATCH, rate)
            seconds = time.monotonic() - publishing.began
        publishing.summarise(seconds, as_json=as_json)


@dataclass
class _Publishing:
    """One run of the command, with the number of skipped and of published events.

    `update` takes the number of records read.
    """

    source: Source
    template: Publication
    key: str | None
    skip: bool
    update: Callable[[int], None]
    skipped: int = 0
    published: int = 0
    began: float = field(default_factory=time.monotonic)

    def at_once(self, publisher: ClusterPublisher) -> None:
        """Publish everything in one commit, or nothing."""
        try:
            self.published = publisher.publish_all(
                publication for publication in self._publications() if publication is not None
            )
        except InputError as error:
            raise InputError(f"{error.message}; nothing was published") from error

    def in_batches(self, publisher: ClusterPublisher, batch: int, rate: float | None) -> None:
        """Publish in commits of at most `batch` events, with at most `rate` events per second."""
        if rate is not None:
            batch = max(1, min(batch, round(rate / _COMMITS_PER_SECOND)))
        under_way = 0
        try:
            for publications in batches(self._publications(), batch):
                if rate is not None:
                    due = self.began + self.published / rate
                    time.sleep(max(0.0, due - time.monotonic()))
                under_way = len(publications)
                self.published += publisher.publish_all(publications)
                under_way = 0
        except InputError as error:
            raise InputError(f"{error.message}; {self._before('before it')}") from error
        except EventSQLError as error:
            raise EventSQLError(f"{error.message}; {self._before('before that')}") from error
        except KeyboardInterrupt:
            # The server may have committed the batch, and the process does not know.
            unknown = f"; {counted(under_way, 'further event')} may have been" if under_way else ""
            say(f"interrupted; {self._before('until then')}{unknown}")
            raise

    def _before(self, when: str) -> str:
        if not self.published:
            return "nothing was published"
        return f"{counted(self.published, 'event')} {'was' if self.published == 1 else 'were'} published {when}"

    def _publications(self) -> Iterator[Publication | None]:
        """The events, and None after a moment without input."""
        read = 0
        for record in self.source.records():
            if record is None:
                yield None
                continue

            read += 1
            publication = self._publication(record)
            if publication is not None:
                yield publication
            self.update(read)

    def _publication(self, record: Record | BadRecord) -> Publication | None:
        """The event of a record, or None for a skipped record."""
        try:
            return _event(record, self.template, self.key)
        except (InputError, InvalidPublicationError) as error:
            line = f"{self.source.name}, {self.source.unit} {record.number}: {error.message}"
            if not self.skip:
                raise InputError(line) from error
            self.skipped += 1
            if self.skipped <= _SKIPPED_LINES_SHOWN:
                say(f"skipped {line}")
            elif self.skipped == _SKIPPED_LINES_SHOWN + 1:
                say(f"further skipped {self.source.unit}s are only counted")
            return None

    def summarise(self, seconds: float, *, as_json: bool) -> None:
        rate = self.published / seconds if seconds > 0 else 0.0
        if as_json:
            summary = {
                "topic": self.template.topic, "published": self.published, "skipped": self.skipped,
                "seconds": round(seconds, 3), "events_per_second": round(rate, 1),
            }  # fmt: skip
            write_json(summary, indent=None)
            return
        skipped = f", skipped {counted(self.skipped, self.source.unit)}" if self.skipped else ""
        say(
            f"published {counted(self.published, 'event')} to topic {self.template.topic!r} "
            f"in {seconds:,.2f} s ({rate:,.0f} events/s){skipped}"
        )


def _event(record: Record | BadRecord, template: Publication, key_field: str | None) -> Publication:
    """The event of a record. Raises `InputError` or `InvalidPublicationError` if the record is not an event."""
    if isinstance(record, BadRecord):
        raise InputError(record.reason)
    key = None if key_field is None else _key(record.content, key_field)
    return Publication(template.topic, record.value, key, template.metadata, template.partition)


def _key(content: object, field: str) -> str:
    """The key in an event's content. Raises `InputError` if there is none."""
    if not isinstance(content, Mapping):
        raise InputError(f"not a JSON object, so it has no field {field!r} for the key")
    if field not in content:
        raise InputError(f"field {field!r} for the key is missing; the fields are {shown([*content])}")
    match content[field]:
        case str(text):
            return text
        case bool(truth):
            return "true" if truth else "false"
        case None:
            raise InputError(f"field {field!r} for the key is null")
        case _:
            raise InputError(f"field {field!r} for the key is neither text nor a number")


@contextmanager
def _progress_bar(source: Source) -> Iterator[Callable[[int], None]]:
    """Show the progress of the reading on a terminal. The yielded function takes the number of records."""
    progress = progress_bar(
        lazy.SpinnerColumn(), "{task.description}", lazy.BarColumn(), "{task.fields[events]:,} events",
        lazy.TimeElapsedColumn(),
        *([lazy.TimeRemainingColumn()] if source.total is not None else []),
    )  # fmt: skip
    task = progress.add_task(Path(source.name).name, total=source.total, events=0)

    def update(events: int) -> None:
        if events % _RECORDS_PER_UPDATE == 0 and not progress.disable:
            progress.update(task, completed=source.position(), events=events)

    with progress:
        yield update
