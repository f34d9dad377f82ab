"""Resources: the events platform, and one topic of it, as parameters of assets, ops and sensors."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg
import psycopg
import sqlalchemy
from pydantic import Field, PrivateAttr, field_validator
from sqlalchemy import event

from eventsql_orchestration import NOT_PARTITIONED, Event, EventSQL, OffsetRange, Publication, Topic
from eventsql_orchestration.dagster.lineage import ExecutionContext, lineage
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.database import is_pooled, parse_dsn
from eventsql_orchestration.errors import ConfigurationError, ValidationError
from eventsql_orchestration.log.claims import Claim
from eventsql_orchestration.log.lag import ConsumerLag
from eventsql_orchestration.model import check_partitions, check_schema_name, check_topic_name
from eventsql_orchestration.rules import DEFAULT_SCHEMA
from eventsql_orchestration.spark import FORMAT, range_options
from eventsql_orchestration.spark.options import Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RESOURCE_KEY = "eventsql"
"""The name under which a code location provides its `EventSQLResource`; the builders of this package ask for it."""


class EventSQLResource(dg.ConfigurableResource[Any]):
    """The events platform on one database.

    Nothing connects before `platform` is used; what it opened is closed when the run or the tick ends. Runs and ticks
    never transfer in the background: that is the transfer schedule's work.

    Give `dsn` as `dg.EnvVar(…)`, which keeps its password out of Dagster's UI and storage. One that stands in the code
    is checked when the location is loaded, one of the environment when a run or a tick begins; `ConfigurationError`
    names the field, never the password.
    """

    dsn: str = Field(description="URL of the PostgreSQL database, postgresql://user:password@host:5432/database")
    db_schema: str = Field(default=DEFAULT_SCHEMA, description="The schema that holds the platform's tables")

    _platform: EventSQL | None = PrivateAttr(default=None)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    @field_validator("dsn", mode="before")
    @classmethod
    def _dsn_is_a_url(cls, value: object) -> object:
        # Not a `ValueError`, whose message would repeat the password.
        if isinstance(value, str) and not isinstance(value, dg.EnvVar):
            try:
                parse_dsn(value)
            except ConfigurationError as error:
                raise ConfigurationError(f"dsn of EventSQLResource: {error}") from None
        return value

    @field_validator("db_schema", mode="before")
    @classmethod
    def _schema_is_an_identifier(cls, value: str) -> str:
        if not isinstance(value, dg.EnvVar):
            check_schema_name(value)
        return value

    @property
    def platform(self) -> EventSQL:
        """The platform, the same object at each use."""
        with self._lock:
            if self._platform is None:
                self._platform = EventSQL(self.dsn, schema=self.db_schema, transfer=False)
            return self._platform

    def bounded(self, timeout: float) -> EventSQL:
        """A platform of its own, to be closed by the caller, on which no statement takes longer than `timeout` seconds.

        For ticks: one whose caller gave up must not go on holding locks. It finds the schema as it is and never
        migrates it, which may take longer.
        """
        platform = EventSQL(self.dsn, schema=self.db_schema, migrate=False, transfer=False)
        milliseconds = round(timeout * 1000)

        def limit(connection: Any, _record: object) -> None:
            driver: psycopg.Connection[Any] = getattr(connection, "driver_connection", connection)
            if is_pooled(driver):
                # It would bound everybody's sessions (docs/poolers.md).
                return
            autocommit, driver.autocommit = driver.autocommit, True
            driver.execute(
                "SELECT set_config('statement_timeout', %(ms)s, false), set_config('lock_timeout', %(ms)s, false), "
                "set_config('idle_in_transaction_session_timeout', %(ms)s, false)",
                {"ms": str(milliseconds)},
            )
            driver.autocommit = autocommit

        event.listen(platform.database.engine, "connect", limit)
        return platform

    def read_range(self, spark: SparkSession, events: Claim | OffsetRange, *, columns: str | None = None) -> DataFrame:
        """The events of a claim, or of a range, as a DataFrame of the `eventsql` data source.

        Of a claim these are the events that are not committed yet and that its consumer's filter lets through. Spark
        asks for them when the frame is first evaluated, which raises `ClaimLostError` where the claim is over by then.
        Of a range it is every event, whoever claimed it. `columns` is a schema such as `"key string, value binary"`: no
        other column is fetched.
        """
        wanted = {"claim": str(events.id)} if isinstance(events, Claim) else range_options(events)
        reader = spark.read.format(FORMAT).options(**self.spark_options(), **wanted)
        if columns is not None:
            reader = reader.schema(columns)
        return reader.load()

    def spark_options(self) -> Mapping[str, str]:
        """The options of the `eventsql` data source that name this database. They hold its password."""
        return {"dsn": self.platform.database.dsn, "schema": self.db_schema}

    def source(self) -> Source:
        """The database as Spark's tasks know it, password included."""
        database = self.platform.database
        return Source(database.dsn, database.schema, str(database))

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002 - Dagster gives it
        """Close what was opened."""
        with self._lock:
            if self._platform is not None:
                self._platform.close()
                self._platform = None


class TopicResource(dg.ConfigurableResource[Any]):
    """One topic, to publish to, to read and to ask for lag.

    `partitions` is -1 for a topic that is not partitioned. With `dead_letters`, `register` also creates the topic that
    takes its dead letters.
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
        # `EnvVar.int(…)` is an int that is no number yet.
        return check_partitions(value) if type(value) is int else value

    @property
    def platform(self) -> EventSQL:
        """The platform that the topic belongs to."""
        return self.eventsql.platform

    def register(self) -> Topic:
        """Create the topic, and its dead letter topic, or find them as they are. Raises `RedefinitionError`."""
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
        connection: Connection | sqlalchemy.Connection | None = None,
    ) -> None:
        """Publish one event: a publication as it is, or a value with `key`, `metadata` and `partition`.

        With `context`, the event's metadata names the run, the asset and its partition. It is committed when this
        returns or, with `connection`, with the transaction of that: a consumer that publishes through its own
        connection publishes exactly once.

        Raises `ValidationError` for what is neither a publication nor bytes, `TopicNotFoundError`,
        `InvalidPublicationError`, `PartitionOutOfRangeError`, `DatabaseError`.
        """
        if not isinstance(event, Publication | bytes):
            raise ValidationError(f"an event is a Publication, or its value as bytes, not {_kind(event)}")
        if isinstance(event, bytes):
            event = Publication(self.topic, event, key=key, metadata=metadata or {}, partition=partition)
        elif key is not None or metadata is not None or partition is not None:
            raise ValidationError("a publication has its own key, metadata and partition: give a value, or it alone")
        self.platform.publisher.publish(self._mine(event, lineage(context)), connection=connection)

    def publish_all(
        self,
        publications: Iterable[Publication],
        *,
        context: ExecutionContext | None = None,
        connection: Connection | sqlalchemy.Connection | None = None,
    ) -> int:
        """Publish any number of events in order and in one commit; gives their number. Otherwise as `publish`."""
        origin = lineage(context)
        return self.platform.publisher.publish_all(
            (self._mine(publication, origin) for publication in publications), connection=connection
        )

    def _mine(self, publication: Publication, origin: Mapping[str, str]) -> Publication:
        if not isinstance(publication, Publication):
            raise ValidationError(f"publish_all takes publications, not {_kind(publication)}")
        if publication.topic != self.topic:
            raise ValidationError(f"a publication for topic {publication.topic!r} was given to topic {self.topic!r}")
        if not origin:
            return publication
        return Publication(
            publication.topic,
            publication.value,
            key=publication.key,
            metadata={**publication.metadata, **origin},
            partition=publication.partition,
        )

    def read(
        self, *, after: int = 0, upto: int | None = None, partition: int | None = None, limit: int | None = None
    ) -> list[Event]:
        """At most `limit` events with `after < id <= upto`, of one partition or of all, in order."""
        return self.platform.reader.read(self.topic, after=after, upto=upto, partition=partition, limit=limit)

    def lag(self) -> list[ConsumerLag]:
        """The lag of each partition of each consumer of the topic."""
        return self.platform.lag(self.topic)


def _kind(value: object) -> str:
    return f"{type(value).__name__} (encode it first)" if isinstance(value, str) else type(value).__name__
