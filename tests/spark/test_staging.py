"""Staging in a process that a signal interrupts, as when a run is canceled."""

from __future__ import annotations

import uuid
from contextlib import closing
from functools import partial
from itertools import count

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.spark.commit_protocol import Publications
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import _Staging
from eventsql_orchestration.threads import in_thread
from tests.interrupting import interrupted
from tests.waiting import PATIENCE


def test_a_signal_at_any_moment_of_a_copy_lets_its_transaction_end(platform: EventSQL, dsn: str) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    rows = pa.record_batch({"value": [b"1", b"2"]})
    with Publications(Source(dsn, "eventsql", "the database")) as publications:
        (target,) = publications.write_targets("orders", {})

    def moment(after: int) -> bool:
        with closing(_Staging(target, uuid.uuid4())) as staging:
            return interrupted(after, partial(staging.add, "orders", rows), module="contextlib.py")

    for after in count():
        # In a thread, in case that the transaction never ends.
        if not in_thread("staging", partial(moment, after)).result(PATIENCE):
            break
    assert after > 5
