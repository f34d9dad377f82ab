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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from eventsql_orchestration.bench import workload
from eventsql_orchestration.bench.figure import PROCESSOR
from eventsql_orchestration.bench.machine import Meter
from eventsql_orchestration.bench.processes import Crew, WorkerProcess
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.model import MAX_PARTITIONS
from eventsql_orchestration.orchestration.local_processes import HOST, free_port

HERE: Final = Path(__file__).parent
TOPIC: Final = "stream"
START_SECONDS: Final = 90.0
FETCH_SECONDS: Final = 600.0
PROGRAMS: Final = ("mvn", "java", "javac")
CLUSTER: Final = "MkU3OEVBNTcwNTJENDM2Qg"
"""The id of the cluster; any 16 bytes in base64."""


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
    parser.add_argument("--events", type=number, default=3_000_000, help="default: 3,000,000")
    parser.add_argument("--batch", type=number, default=5_000, help="events of a batch, default: 5,000")
    parser.add_argument("--partitions", type=partial(number, most=MAX_PARTITIONS), default=10, help="default: 10")
    parser.add_argument("--rounds", type=number, default=1, help="how often each is measured, in turns")
    given = parser.parse_args(arguments)
    size = Size(given.events, given.batch, given.partitions)

    # On the disk of the working directory, as the embedded server.
    with tempfile.TemporaryDirectory(prefix=".kafka-bench-", dir=Path.cwd()) as made:
        try:
            classpath = prepare(Path(made))
            rounds = [measure(Path(made), number, classpath, size) for number in range(given.rounds)]
        except (BenchmarkError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"{error}\n")
            return 1
        figures = [figure for found in rounds for figure in found]
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    return 0


def number(text: str, *, most: int = 1_000_000_000) -> int:
    """A whole number from 1 on, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {most:,}, not {text!r}")
    return int(text)


def prepare(home: Path) -> str:
    """Fetch Kafka, compile the clients, write the events. Gives the class path. Raises `BenchmarkError`."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        raise BenchmarkError(f"Kafka cannot be had here: {' and '.join(missing)} missing: install Maven and a JDK")

    found = home / "classpath"
    fetching = [
        "mvn", "--quiet", "--batch-mode", "--file", str(HERE / "pom.xml"), "dependency:build-classpath",
        f"-Dmdep.outputFile={found}",
    ]  # fmt: skip
    try:
        fetched = subprocess.run(fetching, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"Kafka cannot be had here: Maven did not fetch it in {FETCH_SECONDS:.0f} s") from None
    if fetched.returncode or not found.exists():
        raise BenchmarkError(
            f"Kafka cannot be had here: Maven could not fetch it\n{fetched.stdout[-2_000:]}{fetched.stderr[-2_000:]}"
        )

    archives = found.read_text().strip()
    compiling = [
        "javac", "-Werror", "-Xlint:all,-classfile", "-cp", archives, "-d", str(home), str(HERE / "Stream.java"),
    ]  # fmt: skip
    subprocess.run(compiling, check=True, timeout=START_SECONDS)

    with (home / "events").open("wb") as file:
        # As the first publisher of `eventsql bench stream` has them.
        for each in workload.publications(TOPIC, seed=1):
            for part in ((each.key or "").encode(), each.value):
                file.write(struct.pack(">i", len(part)) + part)
    return f"{home}:{archives}"


def measure(home: Path, number: int, classpath: str, size: Size) -> list[dict[str, Any]]:
    """One round: each way once, and the package's rate as a part of the others."""
    theirs = [
        kafka(home / f"{name}-{number}", classpath, size, name=name, flush=flush)
        for name, flush in (("kafka", False), ("kafka_flushed", True))
    ]
    *own, environment = eventsql(size)
    ratios = [
        {
            "name": f"publish_and_consume_of_{each['name']}", "value": own[0]["value"] / each["value"],
            "unit": f"of {each['name']}",
        }
        for each in theirs
    ]  # fmt: skip
    return [*theirs, *own, *ratios, environment]


def kafka(home: Path, classpath: str, size: Size, *, name: str, flush: bool) -> dict[str, Any]:
    """Publish and consume at once with a new broker. Its files are gone afterwards."""
    home.mkdir()
    java = ["java", "-Xmx1g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", classpath]
    with broker(home, java) as (server, process), Crew() as clients:
        create = [*java, "Stream", "create", server, TOPIC, str(size.partitions), str(flush).lower()]
        subprocess.run(create, check=True, timeout=START_SECONDS, stdin=subprocess.DEVNULL)

        sizes = [server, TOPIC, str(size.events), str(size.batch)]
        consumer = clients.run([*java, "Stream", "consume", *sizes], "Kafka's consumer")
        events = str(home.parent / "events")
        publisher = clients.run([*java, "Stream", "publish", *sizes, events], "Kafka's publisher")
        clients.ready(limit=START_SECONDS)
        groups = {"publishers": publisher, "consumers": consumer, "servers": process}
        meter = Meter({kind: [each.process.pid] for kind, each in groups.items()})
        clients.go()
        # A client ends with its input: an ended process has no processor time any more.
        published, consumed = (clients.outcome(each, limit=size.seconds) for each in (publisher, consumer))
        processor = meter.per_event(size.events)
    shutil.rmtree(home)

    if consumed["events"] != size.events:
        raise BenchmarkError(f"{name}: {consumed['events']} events were consumed of {size.events}")
    seconds = (consumed["ended"] - published["started"]) / 1_000
    return {
        "name": name, "value": size.events / seconds, "unit": "events/s",
        "details": {
            "seconds": seconds,
            "published_per_second": size.events / (published["ended"] - published["started"]) * 1_000,
            "processor": processor, "processor_unit": PROCESSOR,
        },
    }  # fmt: skip


@contextmanager
def broker(home: Path, java: Sequence[str]) -> Iterator[tuple[str, WorkerProcess]]:
    """A KRaft broker with its files in `home`. Gives its address and its process."""
    port, controller = free_port(0), free_port(0)
    properties = home / "broker.properties"
    properties.write_text(settings(home / "log", port, controller))

    format_storage = [*java, "kafka.tools.StorageTool", "format", "-c", str(properties), "-t", CLUSTER]
    subprocess.run(format_storage, check=True, stdout=subprocess.DEVNULL, timeout=START_SECONDS)
    with Crew() as crew:
        process = crew.run([*java, "Stream", "serve", str(properties)], "Kafka's broker")
        crew.wait(lambda: listens(port), limit=START_SECONDS, what="the start of Kafka's broker")
        yield f"{HOST}:{port}", process


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


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


if __name__ == "__main__":
    # The broker, the clients and their files go with this process. If it is killed, the files stay.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
