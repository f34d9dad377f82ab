"""The shards that a write stages events for, by what each of them knows of the set."""

from __future__ import annotations

import uuid

import pytest

from eventsql_orchestration import Topic
from eventsql_orchestration.errors import ShardPendingError, ShardSetError, TopicNotFoundError
from eventsql_orchestration.sharding import ShardSet
from eventsql_orchestration.spark.write_targets import _taking

SET = str(uuid.uuid4())
BOTH = ("a", "b")


def knowing(own: str, names: tuple[str, ...] = BOTH, *, generation: int = 2, active: bool = True) -> list[Topic]:
    return [Topic("orders", shards=ShardSet(SET, own, generation, names, active))]


def test_a_shard_that_is_only_prepared_gets_no_events() -> None:
    assert _taking({"a": knowing("a"), "b": knowing("b"), "c": []}, "orders") == ["a", "b"]


def test_the_only_shard_of_a_set_is_one_database() -> None:
    assert _taking({None: knowing("a", ("a",))}, "orders") == [None]


def test_a_shard_that_lacks_the_topic_or_has_no_url_is_told_apart() -> None:
    with pytest.raises(TopicNotFoundError):
        _taking({"a": knowing("a"), "b": []}, "orders")
    with pytest.raises(ShardSetError, match="no URL leads to shard 'b'"):
        _taking({"a": knowing("a")}, "orders")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (knowing("a"), knowing("b", active=False)),
        (knowing("a", ("a",), generation=1), knowing("b")),
    ],
    ids=["it is joining", "another shard does not know it yet"],
)
def test_an_addition_that_is_not_finished_is_waited_for(first: list[Topic], second: list[Topic]) -> None:
    with pytest.raises(ShardPendingError) as pending:
        _taking({"a": first, "b": second}, "orders")
    assert pending.value.shard == "b"
