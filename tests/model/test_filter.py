"""A filter names events by key and metadata; one that is stored means the same when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventsql_orchestration import Event
from eventsql_orchestration.consumer import MAX_FILTER_KEYS, EventFilter
from eventsql_orchestration.errors import ValidationError

NOON = datetime(2024, 11, 20, 12, tzinfo=UTC)

# Characters that PostgreSQL stores.
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=5)


def event(key: str | None = None, **metadata: Any) -> Event:
    return Event("orders", 1, -1, key, b"", NOON, NOON, metadata)


@pytest.mark.parametrize(
    ("conditions", "matching", "others"),
    [
        (EventFilter(keys={"a", "b"}), [event("a"), event("b", x="1")], [event("ab"), event(""), event()]),
        (EventFilter(key_prefix="user:"), [event("user:"), event("user:7")], [event("User:7"), event("user"), event()]),
        (
            EventFilter(metadata={"x": "1", "y": ""}),
            [event(x="1", y=""), event("a", x="1", y="", z="2")],
            [event(x="1"), event(y=""), event(x="2", y=""), event(x=1, y=""), event(x=["1"], y=""), event()],
        ),
        (
            EventFilter(frozenset(["aa", "ab", "b"]), "a", {"x": "1"}),
            [event("aa", x="1"), event("ab", x="1")],
            [event("b", x="1"), event("ac", x="1"), event("aa", x="2"), event("aa")],
        ),
    ],
)
def test_an_event_matches_when_it_meets_every_condition(
    conditions: EventFilter, matching: list[Event], others: list[Event]
) -> None:
    assert [each for each in matching + others if conditions.matches(each)] == matching


def test_metadata_as_the_database_sends_it_is_looked_into() -> None:
    sent = Event("orders", 1, -1, None, b"", 0, 0, '{"x": "1"}')
    assert EventFilter(metadata={"x": "1"}).matches(sent)
    assert not EventFilter(metadata={"x": "2"}).matches(sent)


def test_metadata_with_more_levels_than_any_python_reads_are_one_text() -> None:
    deep = '{"x": ' * 1_000_000 + "1" + "}" * 1_000_000
    sent = Event("orders", 1, -1, None, b"", 0, 0, deep)
    assert sent.metadata == {"eventsql_unreadable": deep}
    assert not EventFilter(metadata={"x": "1"}).matches(sent)


@given(
    keys=st.none() | st.frozensets(text, min_size=1),
    prefix=st.none() | text.filter(bool),
    metadata=st.dictionaries(text, text),
)
def test_a_stored_filter_is_read_as_the_same_filter(
    keys: frozenset[str] | None, prefix: str | None, metadata: dict[str, str]
) -> None:
    if keys is not None and prefix is not None:
        keys |= {prefix}
    if keys is None and prefix is None and not metadata:
        metadata = {"x": "1"}
    conditions = EventFilter(keys, prefix, metadata)
    stored = json.dumps(conditions.as_json())
    assert EventFilter.from_json(json.loads(stored)) == conditions
    assert hash(EventFilter.from_json(json.loads(stored))) == hash(conditions)


def test_no_filter_is_stored_as_nothing() -> None:
    assert EventFilter.from_json(None) is None


@pytest.mark.parametrize("stored", [{}, {"sql": "true"}, {"keys": "a"}, {"keys": []}, [], "a", {"key_prefix": 7}])
def test_stored_text_that_is_no_filter_is_refused(stored: object) -> None:
    with pytest.raises(ValidationError):
        EventFilter.from_json(stored)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (EventFilter, "needs a condition"),
        (lambda: EventFilter(keys=frozenset()), "1 to 1000 keys, not 0"),
        (lambda: EventFilter(keys=frozenset(map(str, range(MAX_FILTER_KEYS + 1)))), "not 1001"),
        (lambda: EventFilter(keys="abc"), "a set of texts, not str"),  # type: ignore[arg-type]  # refused
        (lambda: EventFilter(keys=frozenset([7])), "must be text"),  # type: ignore[list-item]  # refused
        (lambda: EventFilter(keys=frozenset(["\x00"])), "NUL"),
        (lambda: EventFilter(key_prefix=""), "empty: leave it out"),
        (lambda: EventFilter(metadata={"x": 1}), "metadata 'x' of a filter must be text"),  # type: ignore[dict-item]  # refused
        (lambda: EventFilter(metadata=[("x", "1")]), "must be a mapping"),  # type: ignore[arg-type]  # refused
        (lambda: EventFilter(keys=frozenset(["b"]), key_prefix="a"), "none of the filter's keys begins with 'a'"),
    ],
)
def test_a_filter_that_says_nothing_or_cannot_be_stored_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        make()


def test_a_filter_does_not_change_with_what_it_was_made_of() -> None:
    metadata = {"x": "1"}
    conditions = EventFilter(metadata=metadata)
    metadata["x"] = "2"
    assert conditions.matches(event(x="1"))


def test_a_filter_is_printed_as_its_conditions() -> None:
    assert str(EventFilter(frozenset(["b", "a"]))) == "key a or b"
    assert str(EventFilter(key_prefix="user:", metadata={"x": "1"})) == "key user:*, x=1"
