"""The retry state of rejected commits: how often the same events are tried again, and how large the next batch is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eventsql_orchestration.consuming import commit_retry
from eventsql_orchestration.consuming.commit_retry import CommitRetry, CommitRetryLimits


def retry(*, attempts: int = 2, batches: int = 0) -> CommitRetry:
    return CommitRetry(CommitRetryLimits(attempts=attempts, seconds=0.0, batches=batches))


def test_without_limits_no_event_is_ever_blamed() -> None:
    unlimited = CommitRetry()
    assert all(unlimited.try_again(1) for _ in range(100))


def test_several_events_are_tried_again_until_their_attempts_are_spent() -> None:
    state = retry(attempts=3)
    assert [state.try_again(None) for _ in range(3)] == [True, True, False]


def test_a_single_event_has_its_own_attempts_and_none_once_it_is_blamed() -> None:
    state = retry()
    state.isolate()
    assert [state.try_again(None), state.try_again(7), state.try_again(7)] == [False, True, False]
    assert not state.try_again(7)
    assert state.try_again(8)


def test_attempts_count_over_time_too() -> None:
    state = CommitRetry(CommitRetryLimits(attempts=1, seconds=3600.0))
    assert all(state.try_again(1) for _ in range(10))


def test_batches_double_after_an_isolated_event() -> None:
    state = retry()
    state.isolate()
    sizes = []
    for _ in range(5):
        sizes.append(state.size(6))
        state.committed(6)
    assert sizes == [1, 2, 4, 6, 6]


def test_a_smaller_batch_is_not_larger_than_what_the_caller_takes() -> None:
    state = retry()
    state.halve(16)
    assert (state.size(100), state.size(2)) == (8, 2)
    state.halve(1)
    assert state.size(100) == 1


def test_batches_are_full_again_once_they_are_as_large_as_the_caller_takes() -> None:
    state = retry()
    state.isolate()
    assert not state.try_again(None)
    state.committed(2)
    assert state.try_again(None)


def test_a_full_batch_forgets_earlier_rejections(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(commit_retry, "time", SimpleNamespace(monotonic=lambda: now[0]))
    state = CommitRetry(CommitRetryLimits(attempts=2, seconds=60.0))
    assert state.try_again(None)
    state.committed(10)
    now[0] = 3_600.0
    assert [state.try_again(None) for _ in range(2)] == [True, True]
    assert state.try_again(7)
    now[0] += 60.0
    assert not state.try_again(7)
    state.committed(10)
    # A consumer that was sought back comes to the event again.
    assert state.try_again(7)


def test_a_batch_that_was_too_large_to_read_is_tried_again_after_some_smaller_ones() -> None:
    state = retry(batches=2)
    state.halve(8)
    sizes = []
    for _ in range(4):
        sizes.append(state.size(8))
        state.committed(8)
    assert sizes == [4, 4, 4, 8]
