"""Every error has a message, and is caught as an `EventSQLError`."""

from __future__ import annotations

import inspect
import pickle

import pytest

from eventsql_orchestration import errors
from eventsql_orchestration.errors import (
    BrokenBlockError,
    ConnectionLostError,
    ConsumptionError,
    EventSQLError,
    MissingExtraError,
    PartlyPublishedError,
    PartlySentError,
    TopicNotFoundError,
    WrongShardError,
    first_error,
)

ALL = [member for _, member in inspect.getmembers(errors, inspect.isclass) if issubclass(member, EventSQLError)]
COMPOSED = (MissingExtraError, BrokenBlockError, ConsumptionError, PartlyPublishedError, PartlySentError)
PLAIN = [member for member in ALL if member not in COMPOSED]


@pytest.mark.parametrize("error", ALL)
def test_an_error_has_a_docstring_and_is_caught_as_an_eventsql_error(error: type[EventSQLError]) -> None:
    assert error.__doc__
    assert issubclass(error, EventSQLError)


@pytest.mark.parametrize("error", PLAIN)
def test_an_error_without_a_message_says_its_docstring_on_one_line(error: type[EventSQLError]) -> None:
    message = error().message
    assert message == " ".join((error.__doc__ or "").split())
    assert "\n" not in message


def test_a_message_of_ones_own_is_kept() -> None:
    assert TopicNotFoundError("no topic 'x'").message == str(TopicNotFoundError("no topic 'x'")) == "no topic 'x'"


@pytest.mark.parametrize(
    "error",
    [
        *(member("no") for member in PLAIN),
        MissingExtraError("spark", "the data source"),
        BrokenBlockError("orders", 2, 70),
        ConsumptionError(7, "no"),
    ],
)
def test_an_error_survives_the_way_between_processes(error: EventSQLError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), found.message, vars(found)) == (type(error), error.message, vars(error))


def test_errors_of_shards_survive_it_with_what_they_say_of_them() -> None:
    error = pickle.loads(pickle.dumps(WrongShardError("not here", shard="east")))
    assert (error.message, error.shard) == ("not here", "east")
    partly = pickle.loads(pickle.dumps(PartlyPublishedError({"east": 3}, {"west": TopicNotFoundError("no topic")})))
    assert partly.committed == {"east": 3}
    assert partly.failed["west"].message == "no topic"
    assert "published 3 events on 'east'" in partly.message
    sent = pickle.loads(pickle.dumps(PartlySentError([3, None], {"west": TopicNotFoundError("no queue")})))
    assert (sent.ids, sent.failed["west"].message) == ([3, None], "no queue")


def test_events_and_messages_that_may_have_been_committed_are_not_told_as_missing() -> None:
    failed = {"west": TopicNotFoundError("no topic"), "south": ConnectionLostError("it is gone")}
    partly = PartlyPublishedError({"east": 3}, failed).message
    assert partly.startswith(
        "published 3 events on 'east', and perhaps the events of 'south', and nothing on other shards"
    )
    assert "look first whether the messages of 'south' were sent" in PartlySentError([3, None], failed).message
    assert first_error(failed) is failed["south"]


def test_a_missing_extra_is_named_with_the_command_that_installs_it() -> None:
    error = MissingExtraError("spark", "the data source")
    assert error.extra == "spark"
    assert "pip install 'eventsql-orchestration[spark]'" in error.message
