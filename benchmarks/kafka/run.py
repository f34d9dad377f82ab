"""Kafka beside `eventsql bench stream` in one run: a single KRaft broker of this machine, and its Java clients.

    python benchmarks/kafka/run.py --events 3000000 --batch 5000

It needs Maven, which fetches Kafka, and a JDK of Java 17 or later. It prints a JSON list of figures: Kafka that leaves
writing to the page cache, Kafka that flushes each batch to the disk, the package on its embedded server, and the
package's rate as a part of either. Everything listens on loopback only. docs/benchmarks.md says what is measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from eventsql_orchestration.bench import workload
from eventsql_orchestration.bench.processor import Meter

HERE: Final = Path(__file__).parent
TOPIC: Final = "stream"
START_SECONDS: Final = 90.0
FETCH_SECONDS: Final = 600.0
STOP_SECONDS: Final = 30.0
PROGRAMS: Final = ("mvn", "java", "javac")
CLUSTER: Final = "MkU3OEVBNTcwNTJENDM2Qg"
"""The id of the cluster; any 16 bytes in base64."""


class UnavailableError(Exception):
    """Kafka cannot be had on this machine."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is published: events, events of a batch, partitions of the topic."""

    events: int
    batch: int
    partitions: int

    @property
    def seconds(self) -> float:
        """When a run is given up."""
        return 60.0 + self.events / 2_000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kafka beside `eventsql bench stream` in one run.")
    parser.add_argument("--events", type=_positive, default=3_000_000, help="default: 3,000,000")
    parser.add_argument("--batch", type=_positive, default=5_000, help="events of a batch, default: 5,000")
    parser.add_argument("--partitions", type=_positive, default=10, help="default: 10")
    parser.add_argument("--rounds", type=_positive, default=1, help="how often each is measured, in turns")
    given = parser.parse_args(arguments)
    size = Size(given.events, given.batch, given.partitions)

    # On the disk of the working directory, as the embedded server.
    with tempfile.TemporaryDirectory(prefix=".kafka-bench-", dir=Path.cwd()) as made:
        try:
            classpath = prepare(Path(made))
        except UnavailableError as error:
            sys.stderr.write(f"Kafka cannot be had here: {error}\n")
            return 1
        figures = [figure for number in range(given.rounds) for figure in measure(Path(made), number, classpath, size)]
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def prepare(home: Path) -> str:
    """Fetch Kafka, compile the clients, write the events. Gives the class path. Raises `UnavailableError`."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        raise UnavailableError(f"{' and '.join(missing)} missing: install Maven and a JDK")

    found = home / "classpath"
    fetching = [
        "mvn", "--quiet", "--batch-mode", "--file", str(HERE / "pom.xml"), "dependency:build-classpath",
        f"-Dmdep.outputFile={found}",
    ]  # fmt: skip
    try:
        fetched = subprocess.run(fetching, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"Maven did not fetch it in {FETCH_SECONDS:.0f} s") from None
    if fetched.returncode or not found.exists():
        raise UnavailableError(f"Maven could not fetch it\n{fetched.stdout[-2_000:]}{fetched.stderr[-2_000:]}")

    archives = found.read_text().strip()
    compiling = [
        "javac",
        "-Werror",
        "-Xlint:all,-classfile",
        "-cp",
        archives,
        "-d",
        str(home),
        str(HERE / "Stream.java"),
    ]
    subprocess.run(compiling, check=True, timeout=START_SECONDS)

    with (home / "events").open("wb") as file:
        for each in workload.publications(TOPIC):
            for part in ((each.key or "").encode(), each.value):
                file.write(struct.pack(">i", len(part)) + part)
    return f"{home}:{archives}"


def measure(home: Path, number: int, classpath: str, size: Size) -> Iterator[dict[str, Any]]:
    """One round: each way once, and the package's rate as a part of the others."""
    rates = {}
    for name, flush in (("kafka", False), ("kafka_flushed", True)):
        figure = kafka(home / f"{name}-{number}", classpath, size, name=name, flush=flush)
        rates[name] = figure["value"]
        yield figure

    *own, environment = eventsql(size)
    yield from own
    for name, rate in rates.items():
        yield {"name": f"publish_and_consume_of_{name}", "value": own[0]["value"] / rate, "unit": f"of {name}"}
    yield environment


def kafka(home: Path, classpath: str, size: Size, *, name: str, flush: bool) -> dict[str, Any]:
    """Publish and consume at once with a new broker. Its files are gone afterwards."""
    home.mkdir()
    java = ["java", "-Xmx1g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", classpath]
    with broker(home, java) as (server, process):
        create = [*java, "Stream", "create", server, TOPIC, str(size.partitions), str(flush).lower()]
        subprocess.run(create, check=True, timeout=START_SECONDS, stdin=subprocess.DEVNULL)

        sizes = [server, TOPIC, str(size.events), str(size.batch)]
        with ExitStack() as running:
            consumer = running.enter_context(client(home / "consumer", [*java, "Stream", "consume", *sizes]))
            events = str(home.parent / "events")
            publisher = running.enter_context(client(home / "publisher", [*java, "Stream", "publish", *sizes, events]))
            meter = Meter({"publishers": [publisher.pid], "consumers": [consumer.pid], "servers": [process.pid]})
            go(consumer)
            go(publisher)
            # A client ends when it is told to: an ended process has no processor time any more.
            published, consumed = (outcome(each, size.seconds) for each in (publisher, consumer))
            processor = meter.taken()
    shutil.rmtree(home)

    (started, published_at, _), (_, ended, events_consumed) = published, consumed
    if events_consumed != size.events:
        raise SystemExit(f"{name}: {events_consumed} events were consumed of {size.events}")
    seconds = (ended - started) / 1_000
    return {
        "name": name, "value": size.events / seconds, "unit": "events/s",
        "details": {
            "seconds": seconds, "published_per_second": size.events / (published_at - started) * 1_000,
            "processor": {kind: each / size.events * 1e6 for kind, each in processor.items()},
            "processor_unit": "CPU µs per event",
        },
    }  # fmt: skip


@contextmanager
def broker(home: Path, java: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A KRaft broker with its files in `home`. Gives its address and its process."""
    port, controller = free_ports(2)
    properties = home / "broker.properties"
    properties.write_text(settings(home / "log", port, controller))
    words = home / "broker.out"

    format_storage = [*java, "kafka.tools.StorageTool", "format", "-c", str(properties), "-t", CLUSTER]
    subprocess.run(format_storage, check=True, stdout=subprocess.DEVNULL, timeout=START_SECONDS)
    with words.open("wb") as output:
        process = subprocess.Popen(
            [*java, "Stream", "serve", str(properties)], stdin=subprocess.PIPE, stdout=output, stderr=output
        )
        try:
            until_listening(port, process, words)
            yield f"127.0.0.1:{port}", process
        finally:
            end(process)


def settings(log: Path, port: int, controller: int) -> str:
    """A broker that is its own controller. Its topics have one replica, because there is one broker."""
    return "\n".join((
        "process.roles=broker,controller", "node.id=1", f"controller.quorum.voters=1@127.0.0.1:{controller}",
        f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
        f"advertised.listeners=PLAINTEXT://127.0.0.1:{port}", "controller.listener.names=CONTROLLER",
        f"log.dirs={log}", "offsets.topic.replication.factor=1", "offsets.topic.num.partitions=1",
        "transaction.state.log.replication.factor=1", "transaction.state.log.min.isr=1",
        "group.initial.rebalance.delay.ms=0", "message.max.bytes=8388608", "",
    ))  # fmt: skip


@contextmanager
def client(words: Path, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A client that is ready and waits for the word to go. It writes its errors to the file `words`."""
    with words.open("wb") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            if read_line(process, START_SECONDS) != "ready":
                raise SystemExit(f"a client of Kafka did not start:\n{words.read_text()[-2_000:]}")
            yield process
        finally:
            end(process)


def go(process: subprocess.Popen[str]) -> None:
    pipe(process.stdin).write("g")
    pipe(process.stdin).flush()


def outcome(process: subprocess.Popen[str], seconds: float) -> tuple[int, int, int]:
    """When a client began and ended, in milliseconds, and the number of its events."""
    line = read_line(process, seconds)
    if not line:
        raise SystemExit(f"a client of Kafka said nothing within {seconds:.0f} s")
    started, ended, events = map(int, line.split())
    return started, ended, events


def read_line(process: subprocess.Popen[str], seconds: float) -> str:
    """The next line that a client says; empty if it ends, or is killed because it says none in time."""
    with ExitStack() as watched:
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        watched.callback(timer.cancel)
        return pipe(process.stdout).readline().strip()


def pipe(end_of_pipe: IO[str] | None) -> IO[str]:
    assert end_of_pipe is not None, "clients have pipes"
    return end_of_pipe


def end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)


def eventsql(size: Size) -> list[dict[str, Any]]:
    """The package's own figures, on the database that `eventsql bench` takes here."""
    command = [
        sys.executable, "-m", "eventsql_orchestration.cli", "bench", "stream", "--storage", "blocks", "--json",
        "--events", str(size.events), "--batch", str(size.batch), "--max-events", str(size.batch),
        "--partitions", str(size.partitions), "--raw-events", str(min(size.events, 1_000_000)),
    ]  # fmt: skip
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120.0 + 2 * size.seconds)
    figures: list[dict[str, Any]] = json.loads(done.stdout)
    return figures


def free_ports(number: int) -> list[int]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def until_listening(port: int, process: subprocess.Popen[bytes], words: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"the broker did not start:\n{words.read_text()[-2_000:]}")


if __name__ == "__main__":
    # The broker, the clients and their files go with this process. If it is killed, the files stay.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
