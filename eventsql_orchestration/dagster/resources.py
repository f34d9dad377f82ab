"""Resources: the events platform, and one topic of it, as parameters of assets, ops and sensors."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, cast

import dagster as dg
import psycopg
from pydantic import Field, PrivateAttr, field_validator
from sqlalchemy import event

from eventsql_orchestration import NOT_PARTITIONED, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.lag import ConsumerLag
from eventsql_orchestration.dagster.kept_platforms import KEPT
from eventsql_orchestration.dagster.lineage.origin import ExecutionContext, lineage
from eventsql_orchestration.database import CallersConnection, is_pooled
from eventsql_orchestration.database.urls import parse_dsn
from eventsql_orchestration.errors import ConfigurationError, ValidationError
from eventsql_orchestration.model import check_partitions, check_schema_name, check_topic_name
from eventsql_orchestration.orchestration.access import PlatformAccess
from eventsql_orchestration.validation import DEFAULT_SCHEMA, split_urls

MASKED: Final = "********"
"""What Dagster's UI shows instead of a secret."""

RESOURCE_KEY = "eventsql"
"""The resource name of a code location's `EventSQLResource`; the builders of this package require it."""

CONNECT_SECONDS: Final = 3
"""The connect timeout of a tick in seconds, if there are several shards and a shard's URL has none. The tick looks at
the other shards after that time."""


class EventSQLResource(PlatformAccess, dg.ConfigurableResource[Any]):
    """The events platform on one database, or over several that are its shards.

    The first use of `platform` connects. The end of the run or the tick closes all connections. Only the ticks of the
    schedule `transfer` move events in the background.

    `dsn` takes the URLs of several shards, with spaces or line ends between them. Then `platform` covers all shards,
    and `shard(name)` covers one. A run consumes on one shard, and `claim.shard` names it.

    Give `dsn` as `dg.EnvVar(…)`, which keeps its password out of Dagster's UI and storage. A `dsn` in the code is
    checked when the location is loaded. A `dsn` from the environment is checked when a run or a tick begins.
    `ConfigurationError` names the field, never the password.
    """

    # The resource's text and Dagster's UI hide a URL that is written in the code.
    # The UI hides the name of a variable, too: its launchpad launches runs with `MASKED`.
    dsn: str = Field(
        repr=False,
        json_schema_extra={"dagster__is_secret": True},
        description="URL of the PostgreSQL database, postgresql://user:password@host:5432/database, or those of all "
        "shards with spaces between them",
    )
    db_schema: str = Field(default=DEFAULT_SCHEMA, description="The schema that holds the platform's tables")

    _platform: EventSQL | None = PrivateAttr(default=None)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    @field_validator("dsn", mode="before")
    @classmethod
    def _dsn_is_a_url(cls, value: object) -> object:
        # The message of a `ValueError` would repeat the password.
        if not isinstance(value, str):
            raise ConfigurationError(f"dsn of EventSQLResource must be text, not {type(value).__name__}")
        if not isinstance(value, dg.EnvVar):
            urls = split_urls(value)
            for position, url in enumerate(urls, start=1):
                try:
                    parse_dsn(url)
                except ConfigurationError as error:
                    which = f", URL {position} of {len(urls)}" if len(urls) > 1 else ""
                    raise ConfigurationError(f"dsn of EventSQLResource{which}: {error}") from None
        return value

    @field_validator("db_schema", mode="before")
    @classmethod
    def _schema_is_an_identifier(cls, value: str) -> str:
        if not isinstance(value, dg.EnvVar):
            check_schema_name(value)
        return value

    def _with_updated_values(self, values: Mapping[str, Any] | None) -> EventSQLResource:
        # `self` is the resource of the location, and `values` are its config in a run.
        given = dict(values or {})
        if given.get("dsn") == MASKED:
            given["dsn"] = self.dsn
            if isinstance(self.dsn, dg.EnvVar):
                given["dsn"] = self.dsn.get_value()
                if given["dsn"] is None:
                    raise ConfigurationError(f"variable {self.dsn.env_var_name}, which names the database, is not set")
        return cast("EventSQLResource", super()._with_updated_values(given))

    @property
    def platform(self) -> EventSQL:
        """The platform over all shards. Each use returns the same object."""
        with self._lock:
            if self._platform is None:
                self._platform = EventSQL(*split_urls(self.dsn), schema=self.db_schema, transfer=False)
            return self._platform

    def separate(self) -> EventSQL:
        """A platform that outlives the tick. The caller closes it. It never migrates the schema."""
        return EventSQL(*split_urls(self.dsn), schema=self.db_schema, migrate=False, transfer=False)

    def bounded(self, timeout: float) -> EventSQL:
        """A separate platform that limits each statement to `timeout` seconds. The caller closes it.

        After Dagster gave a tick up, the tick must not go on holding locks. It never migrates the schema, because a
        migration may take longer.
        """
        urls = split_urls(self.dsn)
        if len(urls) > 1:
            urls = tuple(_connecting_soon(url) for url in urls)
        platform = EventSQL(*urls, schema=self.db_schema, migrate=False, transfer=False)
        milliseconds = round(timeout * 1000)

        def limit(connection: Any, _record: object) -> None:
            driver: psycopg.Connection[Any] = getattr(connection, "driver_connection", connection)
            if is_pooled(driver):
                # Behind a pooler, the setting would bound the sessions of all clients (docs/poolers.md).
                return
            autocommit, driver.autocommit = driver.autocommit, True
            driver.execute(
                "SELECT pg_catalog.set_config('statement_timeout', %(ms)s, false), "
                "pg_catalog.set_config('lock_timeout', %(ms)s, false), "
                "pg_catalog.set_config('idle_in_transaction_session_timeout', %(ms)s, false)",
                {"ms": str(milliseconds)},
            )
            driver.autocommit = autocommit

        for shard in platform.shards:
            event.listen(shard.database.engine, "connect", limit)
        return platform

    def for_tick(self, timeout: float) -> AbstractContextManager[EventSQL]:
        """As `bounded`, for the block of a tick. Later ticks use the platform again, and `KEPT` closes it."""
        return KEPT.use((self.dsn, self.db_schema, timeout), lambda: self.bounded(timeout))

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002 - Dagster gives it
        with self._lock:
            if self._platform is not None:
                self._platform.close()
                self._platform = None


class TopicResource(dg.ConfigurableResource[Any]):
    """One topic: publishes events, reads events, and returns the lag.

    `partitions` is -1 for a topic without partitions. With `dead_letters`, `register` also creates the dead letter
    topic.
    """

    eventsql: EventSQLResource
    topic: str = Field(description="Name of the topic")
    partitions: int = Field(default=NOT_PARTITIONED, description="Number of partitions, -1 for a topic without")
    dead_letters: bool = Field(default=False, description="Whether it has a dead letter topic")

    @field_validator("topic", mode="before")
    @classmethod
    def _topic_has_a_name(cls, value: str) -> str:
        if not isinstance(value, dg.EnvVar):
            check_topic_name(value)
        return value

    @field_validator("partitions", mode="before")
    @classmethod
    def _partitions_are_possible(cls, value: int) -> int:
        # `EnvVar.int(…)` is an int that does not have its number yet.
        return check_partitions(value) if type(value) is int else value

    @property
    def platform(self) -> EventSQL:
        return self.eventsql.platform

    def register(self) -> Topic:
        """Create the topic and its dead letter topic if they do not exist. Raises `RedefinitionError`."""
        topic = Topic(self.topic, self.partitions)
        self.platform.registry.register_topic(topic)
        if self.dead_letters:
            self.platform.registry.register_topic(Topic(topic.dead_letter_topic))
        return topic

    def publish(
        self,
        event: Publication | bytes,
        *,
        key: str | None = None,
        metadata: Mapping[str, str] | None = None,
        partition: int | None = None,
        context: ExecutionContext | None = None,
        connection: CallersConnection | None = None,
    ) -> None:
        """Publish one event: a publication, or a value with `key`, `metadata` and `partition`.

        With `context`, the event's metadata names the run, the asset and its partition. The event is committed when
        this method returns. With `connection`, it is committed with the connection's transaction: a consumer that
        publishes through its own connection publishes exactly once.

        Raises `ValidationError` if `event` is neither a publication nor bytes, `TopicNotFoundError`,
        `InvalidPublicationError`, `PartitionOutOfRangeError`, `DatabaseError`.
        """
        if isinstance(event, bytes):
            event = Publication(self.topic, event, key=key, metadata=metadata or {}, partition=partition)
        elif key is not None or metadata is not None or partition is not None:
            raise ValidationError("a publication has its own key, metadata and partition: give them with a value only")
        self.platform.publisher.publish(self._mine(event, lineage(context)), connection=connection)

    def publish_all(
        self,
        publications: Iterable[Publication],
        *,
        context: ExecutionContext | None = None,
        connection: CallersConnection | None = None,
    ) -> int:
        """Publish any number of events in order, in one commit on each shard. Returns the number of events.

        Otherwise as `publish`; over several shards, as `EventSQL.publisher.publish_all`.
        """
        origin = lineage(context)
        return self.platform.publisher.publish_all(
            (self._mine(publication, origin) for publication in publications), connection=connection
        )

    def _mine(self, publication: object, origin: Mapping[str, str]) -> Publication:
        if not isinstance(publication, Publication):
            kind = f"{type(publication).__name__}{' (encode it first)' if isinstance(publication, str) else ''}"
            raise ValidationError(f"an event is a Publication (`publish` also takes its value as bytes), not {kind}")
        if publication.topic != self.topic:
            raise ValidationError(f"a publication for topic {publication.topic!r} was given to topic {self.topic!r}")
        if not origin:
            return publication
        return replace(publication, metadata={**publication.metadata, **origin})

    def read(
        self,
        *,
        after: int = 0,
        upto: int | None = None,
        partition: int | None = None,
        limit: int | None = None,
        shard: str | None = None,
    ) -> list[Event]:
        """At most `limit` events with `after < id <= upto`, of one partition or of all, in order.

        Offsets belong to one `shard`. Raises `ShardSetError` if there are several and none is named.
        """
        reader = self.eventsql.shard(shard).reader
        return reader.read(self.topic, after=after, upto=upto, partition=partition, limit=limit)

    def lag(self) -> list[ConsumerLag]:
        """The lag of each partition of each consumer of the topic, on each shard."""
        return self.platform.lag(self.topic)


def _connecting_soon(url: str) -> str:
    """The URL with a limit for connecting, unless it has one."""
    parsed = parse_dsn(url)
    if "connect_timeout" in parsed.query:
        return url
    return parsed.update_query_dict({"connect_timeout": str(CONNECT_SECONDS)}).render_as_string(hide_password=False)
