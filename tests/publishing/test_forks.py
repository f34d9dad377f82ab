"""A process that is forked has connections and threads of its own, and leaves those of the other alone."""

from __future__ import annotations

import subprocess
import sys

from eventsql_orchestration import Consumer, EventSQL, Topic

FORKING = """
import os, sys
from eventsql_orchestration import EventSQL, Publication

platform = EventSQL(sys.argv[1])

def publish(name, count=30):
    for number in range(count):
        platform.publisher.publish(Publication("orders", f"{name} {number}".encode()))
        platform.reader.end("orders")

publish("before")
# Open in this thread when the other process begins.
with platform.database.transaction() as connection:
    connection.execute("INSERT INTO public.effect VALUES ('open')")
    children = []
    for child in range(2):
        children.append(os.fork())
        if not children[-1]:
            publish(f"child {child}")
            platform.close()
            os._exit(0)
    publish("parent")
    connection.execute("INSERT INTO public.effect VALUES ('still open')")
for child in children:
    assert os.waitpid(child, 0)[1] == 0
publish("after")
platform.close()
"""


def test_a_service_that_forks_after_it_published_goes_on_in_every_process(dsn: str, platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders")).register_consumer(Consumer("orders", "sums"))
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE public.effect (value text)")
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, dsn], check=True, timeout=120)
    platform.transfer.run_once()
    names = ("before", "child 0", "child 1", "parent", "after")
    values = [event.value.decode() for event in platform.reader.read("orders")]
    for name in names:
        assert [value for value in values if value.startswith(name)] == [f"{name} {number}" for number in range(30)]
    assert len(values) == 30 * len(names)
    with platform.database.connection() as connection:
        assert connection.execute("SELECT value FROM public.effect ORDER BY 1").fetchall() == [
            ("open",), ("still open",)
        ]  # fmt: skip
