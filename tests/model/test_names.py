"""Rules for names and for numbers of partitions, which are checked when a value is made."""

from __future__ import annotations

from typing import Any

import pytest

from eventsql_orchestration import NOT_PARTITIONED, Consumer, OffsetRange, Topic
from eventsql_orchestration.errors import EventSQLError, InvalidNameError, PartitionOutOfRangeError, ValidationError
from eventsql_orchestration.model import check_partition, check_schema_name


@pytest.mark.parametrize("name", ["a", "account_created", "v2", "a" * 57, "AccountCreated"])
def test_a_topic_name_is_an_identifier_and_leaves_room_for_the_suffix_of_its_table(name: str) -> None:
    """With capitals where EventSQL's Java library made it; the registry makes none."""
    assert Topic(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1st",
        "_private",
        "with space",
        "with-dash",
        "żółw",
        "a" * 58,
        'a"; DROP TABLE topic; --',
        "a\n",
        7,
    ],
)
def test_other_topic_names_are_refused(name: Any) -> None:
    with pytest.raises(InvalidNameError, match="topic name"):
        Topic(name)


@pytest.mark.parametrize("name", ["mailer", "Mailer 2, täglich", "eventsql.redrive", "x" * 200])
def test_a_consumer_name_is_any_printable_text(name: str) -> None:
    assert Consumer("t", name).name == name


@pytest.mark.parametrize("name", ["", " mailer", "mailer ", "two\nlines", "nul\x00", "x" * 201, "\ud800", None])
def test_other_consumer_names_are_refused(name: Any) -> None:
    with pytest.raises(InvalidNameError, match="consumer name"):
        Consumer("t", name)


@pytest.mark.parametrize("name", ["eventsql", "_private", "events_2", "user", "x" * 63])
def test_a_schema_name_is_a_lower_case_identifier(name: str) -> None:
    assert check_schema_name(name) == name


@pytest.mark.parametrize("name", ["", "Events", "1st", 'x"y', "a b", "x" * 64, "żółw", None])
def test_other_schema_names_are_refused(name: Any) -> None:
    with pytest.raises(InvalidNameError, match="schema name"):
        check_schema_name(name)


@pytest.mark.parametrize("partitions", [NOT_PARTITIONED, 1, 32_767])
def test_a_topic_has_one_to_32767_partitions_or_is_not_partitioned(partitions: int) -> None:
    assert Topic("t", partitions).partitions == partitions


@pytest.mark.parametrize("partitions", [0, -2, 32_768, True, 1.0, "3", None])
def test_other_numbers_of_partitions_are_refused(partitions: Any) -> None:
    with pytest.raises(ValidationError, match="partitions"):
        Topic("t", partitions)


def test_the_partitions_of_a_topic_are_counted_from_0() -> None:
    assert Topic("t", 3).all_partitions == (0, 1, 2)
    assert Topic("t").all_partitions == (NOT_PARTITIONED,)


@pytest.mark.parametrize(("partition", "partitions"), [(0, 1), (9, 10), (NOT_PARTITIONED, NOT_PARTITIONED)])
def test_a_partition_that_the_topic_has_passes(partition: int, partitions: int) -> None:
    assert check_partition("t", partition, partitions) == partition


@pytest.mark.parametrize(
    ("partition", "partitions"),
    [(1, 1), (-1, 3), (0, NOT_PARTITIONED), (True, 3), (0.5, 3), ("1", 3), (-1.0, NOT_PARTITIONED), (None, 3)],
)
def test_a_partition_that_the_topic_does_not_have_is_refused(partition: Any, partitions: int) -> None:
    with pytest.raises(PartitionOutOfRangeError, match="partition"):
        check_partition("t", partition, partitions)


def test_a_topic_is_equal_to_one_that_was_read_back() -> None:
    assert Topic("t", 3) == Topic("t", 3, created_at=None)
    assert Topic("t", 3) != Topic("t", 4)


def test_a_range_of_offsets_excludes_its_beginning_and_includes_its_end() -> None:
    assert str(OffsetRange("t", 2, 10, 20)) == "t[2](10, 20]"
    assert str(OffsetRange("t", NOT_PARTITIONED, 0, 20)) == "t(0, 20]"
    assert OffsetRange("t", 0, 7, 7).empty


@pytest.mark.parametrize(("after", "upto"), [(-1, 3), (4, 3)])
def test_a_range_of_offsets_does_not_end_before_it_begins(after: int, upto: int) -> None:
    with pytest.raises(ValidationError):
        OffsetRange("t", 0, after, upto)


def test_a_value_that_breaks_a_rule_raises_a_value_error_of_the_package() -> None:
    for error in (InvalidNameError, PartitionOutOfRangeError, ValidationError):
        assert issubclass(error, ValueError)
        assert issubclass(error, EventSQLError)
