"""A consumer as a component of `dg`: a `defs.yaml` beside a Python file with its function.

`dg scaffold defs eventsql_orchestration.dagster.EventSQLConsumerComponent NAME` writes both.
"""

from pathlib import Path
from typing import Final

import dagster as dg
from pydantic import BaseModel, Field, field_validator

from eventsql_orchestration import NOT_PARTITIONED, Topic
from eventsql_orchestration.dagster.assembly import build_definitions
from eventsql_orchestration.dagster.consumers import consumer_asset
from eventsql_orchestration.dagster.definition import DEFAULT_MAX_ATTEMPTS
from eventsql_orchestration.errors import ConfigurationError, ValidationError
from eventsql_orchestration.model import check_partitions, check_topic_name
from eventsql_orchestration.rules import check_name, check_whole

FUNCTION_FILE: Final = "consume.py"

_FUNCTION: Final = '''"""What the consumer does with a batch of events."""

from collections.abc import Sequence

from eventsql_orchestration import Event
from eventsql_orchestration.database import Connection


def consume(events: Sequence[Event], connection: Connection) -> None:
    """What is written through `connection` commits together with the consumer's offset: exactly once."""
    raise NotImplementedError("say what becomes of these events")
'''


class ConsumerParams(BaseModel):
    """What `dg scaffold` asks for."""

    topic: str = Field(default="orders", description="Name of the topic")
    partitions: int = Field(default=NOT_PARTITIONED, description="Its number of partitions, -1 for one without")


class ConsumerScaffolder(dg.Scaffolder[ConsumerParams]):
    """Writes a consumer's `defs.yaml`, and a file for its function."""

    @classmethod
    def get_scaffold_params(cls) -> type[ConsumerParams]:
        return ConsumerParams

    def scaffold(self, request: dg.ScaffoldRequest[ConsumerParams]) -> None:
        """Write the files; a function that is there already stays."""
        name = request.target_path.name
        attributes = {
            "name": name,
            "topic": request.params.topic,
            "partitions": request.params.partitions,
            "consumer": name,
            "partitioned": request.params.partitions != NOT_PARTITIONED,
        }
        dg.scaffold_component(request, attributes)
        function = request.target_path / FUNCTION_FILE
        if not function.exists():
            function.write_text(_FUNCTION, encoding="utf-8")


@dg.scaffold_with(ConsumerScaffolder)
class EventSQLConsumerComponent(dg.Component, dg.Model, dg.Resolvable):
    """A consumer of a topic with all that it needs: asset, job, sensors, checks, transfer, lag, housekeeping.

    Its function stands in `file` beside `defs.yaml`, as `consumer_asset` takes it. A project with several such
    components leaves `platform: true` to one of them, which has the resource `eventsql`, the transfer and
    housekeeping, and gives the others `platform: false`.
    """

    name: str
    topic: str
    consumer: str
    partitions: int = NOT_PARTITIONED
    partitioned: bool = False
    file: str = FUNCTION_FILE
    function: str = "consume"
    max_events: int = 10_000
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    max_lag_events: int | None = None
    max_lag_seconds: float | None = 300.0
    lag_grace: float = 60.0
    platform: bool = True

    # What the platform would refuse is refused here, where the message names the field of the file.

    @field_validator("topic")
    @classmethod
    def _topic_has_a_name(cls, value: str) -> str:
        return check_topic_name(value)

    @field_validator("consumer")
    @classmethod
    def _consumer_has_a_name(cls, value: str) -> str:
        return check_name("consumer name", value)

    @field_validator("partitions")
    @classmethod
    def _partitions_are_possible(cls, value: int) -> int:
        return check_partitions(value)

    @field_validator("max_events", "max_attempts")
    @classmethod
    def _is_one_at_least(cls, value: int) -> int:
        return check_whole("it", value, least=1)

    @field_validator("max_lag_events", "max_lag_seconds", "lag_grace")
    @classmethod
    def _is_not_negative(cls, value: float | None) -> float | None:
        if value is not None and value < 0:
            raise ValidationError(f"it must not be negative: {value}")
        return value

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Raises `ConfigurationError` where the file or its function is not there."""
        if not (context.path / self.file).is_file():
            raise ConfigurationError(f"file: {context.path / self.file} does not exist")
        module = context.load_defs_relative_python_module(Path(self.file))
        function = getattr(module, self.function, None)
        if not callable(function):
            raise ConfigurationError(f"function: {context.path / self.file} has no function {self.function!r}")
        definition = consumer_asset(
            topic=Topic(self.topic, self.partitions),
            consumer=self.consumer,
            partitioned=self.partitioned,
            name=self.name,
            max_events=self.max_events,
            max_attempts=self.max_attempts,
        )(function)
        return build_definitions(
            [definition],
            name=None if self.platform else self.name,
            platform=self.platform,
            max_lag_events=self.max_lag_events,
            max_lag_seconds=self.max_lag_seconds,
            lag_grace=self.lag_grace,
        )
