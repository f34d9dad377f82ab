"""`eventsql metrics`: the platform's figures for Prometheus."""

from __future__ import annotations

import re
import signal
import threading
from typing import Annotated, TypeAlias

import click

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import say, write
from eventsql_orchestration.cli.parameters import Seconds, Whole, command, option
from eventsql_orchestration.errors import ConfigurationError, DatabaseError
from eventsql_orchestration.signals import setting
from eventsql_orchestration.threads import SIGNAL_SECONDS

Partitions: TypeAlias = Annotated[bool, option("Add the lag of each consumer partition.")]


@click.group()
def metrics() -> None:
    """Serve or print the platform's figures in the text format of Prometheus.

    Rates, lag by its cause, the buffer, claims, dead letters and retention. A role that only reads is enough.
    """


@command(metrics)
def serve(
    context: CliContext,
    port: Annotated[int, option("The port; 0 takes a free one.", type=Whole(0, 65_535), default=9788, metavar="N")],
    address: Annotated[
        str,
        option(
            "The address to listen on; 0.0.0.0 for all addresses of this machine.", default="127.0.0.1", metavar="HOST"
        ),
    ],
    interval: Annotated[
        float, option("Read the database at most this often.", type=Seconds(1, 3_600), default=10.0, metavar="SECONDS")
    ],
    partitions: Partitions,
) -> None:
    """Serve the figures over HTTP until Ctrl-C or SIGTERM. While the database is down, eventsql_up is 0.

    Anybody who reaches the port can read the names of topics and consumers. It listens on this machine alone by
    default.
    """
    from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415 - an optional package

    from eventsql_orchestration.metrics import PlatformCollector  # noqa: PLC0415 - an optional package

    with context.platform() as platform:
        registry = CollectorRegistry()
        registry.register(PlatformCollector(platform, partitions=partitions, interval=interval))
        try:
            server, thread = start_http_server(port, address, registry)
        except (OSError, UnicodeError, ValueError) as error:
            raise ConfigurationError(
                f"cannot listen on {address}, port {port}: {error}; choose others with --address and --port"
            ) from None
        stop = threading.Event()
        with setting([stop], signal.SIGTERM):
            say(f"serving metrics on http://{address}:{server.server_port}/metrics; Ctrl-C ends it")
            try:
                while not stop.wait(SIGNAL_SECONDS):
                    pass
            finally:
                server.shutdown()
                server.server_close()
                thread.join()


@command(metrics, name="print")
def print_(context: CliContext, partitions: Partitions) -> None:
    """Print the figures once, for a look or for a file that another exporter serves.

    It fails if a database could not be read, after it has printed the figures of the others.
    """
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 - an optional package

    from eventsql_orchestration.metrics import PlatformCollector  # noqa: PLC0415 - an optional package

    with context.platform() as platform:
        # An endpoint says that the database is down; this command fails.
        platform.open()
        registry = CollectorRegistry()
        registry.register(PlatformCollector(platform, partitions=partitions))
        text = generate_latest(registry).decode()
        write(text)
        if re.search(r"^eventsql_up\{.*\} 0\.0$", text, re.MULTILINE):
            raise DatabaseError("a database could not be read, and its figures are missing: its `eventsql_up` is 0")
