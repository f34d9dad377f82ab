"""A publication that exists can be stored: everything that PostgreSQL would refuse is refused when it is made."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from eventsql_orchestration import Event, Publication
from eventsql_orchestration.errors import InvalidNameError, InvalidPublicationError
from eventsql_orchestration.model import MAX_KEY_BYTES
from eventsql_orchestration.validation import MAX_VALUE_BYTES


def event(**changes: Any) -> Event:
    now = datetime.now(UTC)
    fields: dict[str, Any] = {
        "topic": "orders",
        "id": 7,
        "partition": 1,
        "key": "42",
        "value": b"{}",
        "buffered_at": now,
        "created_at": now,
        "metadata": {"source": "web"},
    }
    return Event(**{**fields, **changes})


@pytest.mark.parametrize("value", [b"", b"\x00\xff", bytearray(b"{}"), memoryview(b"{}")])
def test_a_value_is_any_bytes(value: Any) -> None:
    publication = Publication("t", value)
    assert publication.value == bytes(value)
    assert isinstance(publication.value, bytes)


@pytest.mark.parametrize("value", ["text", None, {}, 7])
def test_a_value_that_is_not_bytes_is_refused_with_the_remedy(value: Any) -> None:
    with pytest.raises(InvalidPublicationError, match="encode it first"):
        Publication("t", value)


def test_the_largest_value_passes_and_one_byte_more_does_not() -> None:
    assert len(Publication("t", bytes(MAX_VALUE_BYTES)).value) == MAX_VALUE_BYTES
    with pytest.raises(InvalidPublicationError, match="publish a reference"):
        Publication("t", bytes(MAX_VALUE_BYTES + 1))


def test_the_longest_key_is_counted_in_bytes() -> None:
    Publication("t", b"", key="ż" * (MAX_KEY_BYTES // 2))
    with pytest.raises(InvalidPublicationError, match="key"):
        Publication("t", b"", key="ż" * (MAX_KEY_BYTES // 2) + "x")


@pytest.mark.parametrize(
    "fields",
    [
        {"key": "nul\x00"},
        {"key": "\ud800"},
        {"key": 42},
        {"metadata": {"name": "nul\x00"}},
        {"metadata": {"nul\x00": "value"}},
        {"metadata": {"name": "\ud800"}},
        {"metadata": {"name": 1}},
        {"metadata": {1: "value"}},
        {"metadata": [("name", "value")]},
        {"metadata": None},
    ],
    ids=str,
)
def test_text_that_postgresql_cannot_store_is_refused(fields: Any) -> None:
    with pytest.raises(InvalidPublicationError):
        Publication("t", b"", **fields)


def test_a_topic_that_cannot_exist_is_refused() -> None:
    with pytest.raises(InvalidNameError):
        Publication("No Topic", b"")


def test_an_event_becomes_a_publication_of_another_topic_with_further_metadata() -> None:
    publication = event().as_publication("orders_dlt", reason="broken")
    assert publication == Publication("orders_dlt", b"{}", key="42", metadata={"source": "web", "reason": "broken"})


def test_metadata_that_another_publisher_wrote_as_other_json_becomes_text() -> None:
    publication = event(metadata={"attempt": 3, "tags": ["a"], "name": "x"}).as_publication()
    assert publication.metadata == {"attempt": "3", "tags": json.dumps(["a"]), "name": "x"}
