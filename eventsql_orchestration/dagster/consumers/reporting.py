"""The report of a consuming run: its metadata, its dead letters, and the event that blocks its partition."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer
from eventsql_orchestration.client.dead_letters import ClusterDeadLetters
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.failures import Failure
from eventsql_orchestration.dagster.consumers.reexecution import forbid_retries
from eventsql_orchestration.dagster.lineage.origin import input_metadata
from eventsql_orchestration.dagster.lineage.published import add_up, leave_out
from eventsql_orchestration.dagster.metadata_keys import PUBLISHED_EVENTS, PUBLISHED_TOPIC, ROW_COUNT
from eventsql_orchestration.model import how_often
from eventsql_orchestration.orchestration.drain import Drained, advice_after
from eventsql_orchestration.orchestration.errors import FinalRunError
from eventsql_orchestration.orchestration.shards import partition_label
from eventsql_orchestration.validation import counted


def report(
    context: dg.AssetExecutionContext,
    key: dg.AssetKey,
    consumer: Consumer,
    drained: Drained,
    dead_letters: ClusterDeadLetters,
    *,
    missing: str | None = None,
) -> None:
    """Report dead letters and failures. `missing` says why a lost claim has no consumer any more.

    Raises `dagster.Failure` for an event that blocks its partition, and for a lost claim whose consumer is `missing`;
    otherwise `ClaimLostFailure` if a claim was lost.
    """
    if drained.note is not None:
        context.log.info("the run ends: %s", drained.note)
    for letter in drained.dead_letters:
        context.log.warning(
            "event %d of topic %s is a dead letter now: %s", letter.event_id, consumer.topic, letter.error
        )
    if drained.dead_letters:
        context.log_event(
            dg.AssetObservation(
                asset_key=key,
                description=counted(len(drained.dead_letters), "new dead letter"),
                metadata=_dead_letters(drained),
            )
        )
    if drained.failures:
        raise _failure(consumer, *drained.failures[0], accepts=dead_letters.accepts(consumer.topic))
    if drained.lost is not None:
        # The claim's new owner consumes its events, so a retry has nothing to do.
        forbid_retries(context.run, context.instance)
        if missing is not None:
            raise dg.Failure(f"the run lost its claim: {missing}", allow_retries=False)
        raise ClaimLostFailure(consumer, drained.lost)


class ClaimLostFailure(dg.Failure):
    """A run lost its claim. If it succeeded, Dagster would show that the run had consumed the claim's events."""

    def __init__(self, consumer: Consumer, lost: str) -> None:
        super().__init__(
            f"the run lost its claim: {lost}. Usually the cause is a process that stood still, or was cut off from the "
            "database, for longer than its lease. No event is lost, and no event takes effect twice: the batches that "
            "this run committed stay, and the partition's new owner consumes the rest. You need not do anything. "
            "Dagster does not retry the run",
            metadata={"topic": consumer.topic, "consumer": consumer.name, "lost": lost},
            allow_retries=False,
        )


def _failure(consumer: Consumer, claim: Claim, failure: Failure, *, accepts: bool) -> dg.Failure:
    topic, advice = consumer.topic, advice_after(failure, consumer.topic, consumer.name, accepts=accepts)
    return dg.Failure(
        f"event {failure.event_id} of topic {partition_label(topic, claim.range.partition)} failed "
        f"{how_often(failure.attempts)} in consumer {consumer.name} ({failure.error}): {advice}",
        metadata={
            "topic": topic,
            "consumer": consumer.name,
            **({} if failure.partition == NOT_PARTITIONED else {"partition": failure.partition}),
            "event": failure.event_id,
            "attempts": failure.attempts,
            "error": failure.error,
            "outcome": failure.outcome,
            "advice": advice,
        },
        # The claim is released: a tick claims the range again when the event is due.
        allow_retries=False,
    )


def _dead_letters(drained: Drained) -> dict[str, Any]:
    """Metadata for the new dead letters; empty without any."""
    letters = [
        {"event": letter.event_id, "partition": letter.partition, "error": letter.error}
        for letter in drained.dead_letters
    ]
    return {"dead letters": len(letters), "events given up": dg.MetadataValue.json(letters)} if letters else {}


def results(
    key: dg.AssetKey, consumer: Consumer, publishes: Sequence[dg.AssetKey], drained: Drained,
    *, awaited: Collection[dg.AssetKey] = (),
) -> Iterator[tuple[dg.AssetKey, dict[str, Any]]]:  # fmt: skip
    """The metadata of a run's asset, and of each topic that it publishes to.

    A run without a claim has published nothing, and its topics would hide their last publications from inputs that read
    them. So it has only the topics for which other steps of the run wait (`awaited`).
    """
    topics = {topic: topic.path[-1] for topic in publishes}
    partitions = {claim.range.partition for claim, _ in drained.claims} - {NOT_PARTITIONED}
    metadata: dict[str, Any] = {
        **{name: value for said in drained.said for name, value in leave_out(said, topics.values()).items()},
        **input_metadata(consumer.topic, drained.ranges(), consumer=consumer.name),
        **({"partition": partitions.pop()} if len(partitions) == 1 else {}),
        "events": drained.events,
        ROW_COUNT: drained.events,
        "claims": len(drained.claims),
        **_dead_letters(drained),
    }
    if (note := drained.lost or drained.note) is not None:
        metadata["note"] = note
    yield key, metadata
    for topic, name in topics.items():
        if drained.claims:
            yield topic, add_up(drained.said, name)
        elif topic in awaited:
            yield topic, {PUBLISHED_TOPIC: name, PUBLISHED_EVENTS: 0, ROW_COUNT: 0}


def storable(returned: object, log: logging.Logger) -> object:
    """The metadata that a function has returned, without the entries that Dagster cannot store.

    The range is committed by then. An error would fail its run, and the range would not be consumed again.
    """
    if not isinstance(returned, Mapping):
        return returned
    kept: dict[str, Any] = {}
    for name, value in returned.items():
        try:
            # Dagster takes some values that it cannot store: a number of NumPy is a float, too.
            dg.serialize_value(dg.AssetMaterialization("function", metadata={str(name): value}))
            kept[str(name)] = value
        except Exception:  # noqa: BLE001 - the value itself may raise any error
            log.warning(
                "Dagster cannot store metadata %r of type %s, so it is left out: return a number, a text, JSON or a "
                "MetadataValue",
                name, type(value).__name__,
            )  # fmt: skip
    return kept


@contextmanager
def without_retries() -> Iterator[None]:
    """Raise a `FinalRunError` of the block as `dagster.Failure`, which Dagster does not retry: it would only repeat."""
    try:
        yield
    except FinalRunError as error:
        cause = error.__cause__
        facts = {**error.facts, **(cause.metadata if isinstance(cause, dg.Failure) else {})}
        raise dg.Failure(error.message, metadata=facts, allow_retries=False) from cause
