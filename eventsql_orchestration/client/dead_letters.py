"""Dead letters on one database or over several shards."""

from __future__ import annotations

from builtins import list as list_of
from collections import Counter

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consuming.dead_letters import DeadLetter, DeadLetterFactory, LetterFilter, RedrivePlan
from eventsql_orchestration.errors import ShardError, ValidationError
from eventsql_orchestration.shards.cluster import ONE_SHARD, Cluster


@checked
class ClusterDeadLetters:
    """Dead letters. A letter lies on the shard of its event, and is redriven there."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lone = None if cluster.lone is None else cluster.lone.dead_letters
        self._factory: DeadLetterFactory | None = None

    @property
    def factory(self) -> DeadLetterFactory | None:
        """The configured factory."""
        return self._factory

    def configure(self, factory: DeadLetterFactory | None) -> None:
        """Make the dead letters of this object's consumers by `factory(event, cause)`; None restores the default.

        The factory runs in the transaction that locks the partition, which also publishes its publication, to any
        topic. `list` and `redrive` know the dead letters of `{topic}_dlt`. If it returns None, the partition stops at
        the event until the consumer is resumed. If it raises, or if its publication fails, the event is tried again
        with backoff, and the partition's failure says so.
        """
        self._factory = factory
        for shard in self._cluster.shards:
            shard.dead_letters.configure(factory)

    def topic_of(self, topic: str) -> str | None:
        """The name of the topic's dead letter topic; None if none is registered."""
        return self._cluster.up()[0].dead_letters.topic_of(topic)

    def accepts(self, topic: str) -> bool:
        """Whether a factory or a dead letter topic may take an event of `topic` whose attempts are spent."""
        return self._cluster.up()[0].dead_letters.accepts(topic)

    def plan_redrive(
        self, topic: str, letters: LetterFilter | None = None, *, limit: int | None = None, again: bool = False
    ) -> RedrivePlan:
        """Plan a redrive without writing. Raises as `redrive`."""
        self._check_ids(letters)
        plans = [
            plan
            for _, plan in self._cluster.each_up(
                lambda shard: shard.dead_letters.plan_redrive(topic, letters, limit=limit, again=again)
            )
        ]
        redrives = sum(plan.redrives for plan in plans)
        return RedrivePlan(
            letters=sum(plan.letters for plan in plans),
            redriven_before=sum(plan.redriven_before for plan in plans),
            redrives=redrives if limit is None else min(limit, redrives),
        )

    def redrive(
        self, topic: str, letters: LetterFilter | None = None, *, limit: int | None = None, again: bool = False
    ) -> int:
        """Publish the oldest `limit` selected dead letters of `topic` to it again, in order. Gives their number.

        Every consumer of the topic gets the events, also one that has handled them. Their metadata `redriven_consumer`
        names the consumer that had given them up.

        Each letter is redriven once, even if several redrives run at the same time, or one crashes. With `again`,
        letters that were redriven or dismissed before are redriven too. Every 1,000 letters are one transaction, which
        stays committed if a later transaction fails. Letters that come while this runs are left for the next redrive,
        so that the call ends even if events fail again at once. Several shards redrive one after the other. Letters on
        a shard that is down stay there.

        Raises `TopicNotFoundError` if the topic or its dead letter topic does not exist, `EventSQLError` for ids that
        no dead letter has, and `ValidationError` for a filter by offsets if there are several shards, before anything
        is redriven; otherwise as `ClusterPublisher.publish_all`.
        """
        self._check_ids(letters)
        redriven = 0
        for shard in self._cluster.up():
            left = None if limit is None else limit - redriven
            with self._cluster.using(shard):
                redriven += shard.dead_letters.redrive(topic, letters, limit=left, again=again)
        return redriven

    def dismiss(self, topic: str, letters: LetterFilter | None = None, *, limit: int | None = None) -> int:
        """Close the oldest `limit` selected dead letters of `topic` that are open, without publishing them.

        For events that somebody has put right in another way, or that need no handling. Gives their number. They stay
        in the log, and no check, figure or later redrive counts them; `redrive` with `again` publishes them all the
        same. Every 1,000 letters are one transaction. Raises as `redrive`.
        """
        self._check_ids(letters)
        dismissed = 0
        for shard in self._cluster.up():
            left = None if limit is None else limit - dismissed
            with self._cluster.using(shard):
                dismissed += shard.dead_letters.dismiss(topic, letters, limit=left)
        return dismissed

    def prune(self, topic: str | None = None) -> int:
        """Delete the marks of letters that retention has removed, of `topic` or of all; gives their number.

        Raises `TopicNotFoundError` if the topic has no dead letter topic.
        """
        return sum(count for _, count in self._cluster.each_up(lambda shard: shard.dead_letters.prune(topic)))

    def show(self, topic: str, letter_id: int) -> DeadLetter:
        """One dead letter of `topic` by its offset.

        Raises `TopicNotFoundError`, `EventSQLError` if no letter has this offset, and `ShardError` if there are several
        shards. Offsets are per shard: use `platform.shards[i].dead_letters`.
        """
        if self._lone is not None:
            return self._lone.show(topic, letter_id)
        raise ShardError(f"each shard counts its dead letters of topic {topic!r} by itself: {ONE_SHARD}")

    def of_backfills(self, topic: str) -> dict[str, int]:
        """The number of open dead letters of `topic`, by the id of their backfill.

        Raises `TopicNotFoundError` if the topic has no dead letter topic.
        """
        found: Counter[str] = Counter()
        for _, counts in self._cluster.each_up(lambda shard: shard.dead_letters.of_backfills(topic)):
            found.update(counts)
        return dict(found)

    def list(
        self, topic: str, letters: LetterFilter | None = None, *, limit: int = 100, redriven: bool | None = None
    ) -> list_of[DeadLetter]:
        """The oldest selected dead letters of `topic`, all of them unless `redriven` is given.

        True selects those that were redriven or dismissed, and False the open ones: they are not erased either. Each
        letter has its shard if there are several. Raises `TopicNotFoundError` if the topic has no dead letter topic,
        `EventSQLError` for ids that no letter has, and `ValidationError` as `redrive`.
        """
        if self._lone is not None:
            return self._lone.list(topic, letters, limit=limit, redriven=redriven)
        self._check_ids(letters)
        found: list_of[DeadLetter] = []
        for shard, listed in self._cluster.each_up(
            lambda shard: shard.dead_letters.list(topic, letters, limit=limit, redriven=redriven)
        ):
            for letter in listed:
                letter.shard = shard.label
            found += listed
        return sorted(found, key=lambda letter: letter.buffered_at)[:limit]

    def _check_ids(self, letters: LetterFilter | None) -> None:
        if self._lone is not None or letters is None:
            return
        if letters.ids is not None or letters.after or letters.upto is not None:
            raise ValidationError(f"each shard counts its dead letters by itself: give no offsets, or {ONE_SHARD}")
