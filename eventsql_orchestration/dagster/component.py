"""A consumer as a component of `dg`: a `defs.yaml` beside a Python file with its function.

`dg scaffold defs eventsql_orchestration.dagster.EventSQLConsumerComponent NAME` writes both.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

import dagster as dg
import yaml  # type: ignore[import-untyped]  # it comes without types
from pydantic import BaseModel, Field, field_validator, model_validator

from eventsql_orchestration import NOT_PARTITIONED, Topic
from eventsql_orchestration.dagster.assembly import build_definitions
from eventsql_orchestration.dagster.backfill_asset import read_place
from eventsql_orchestration.dagster.consumers import consumer_asset
from eventsql_orchestration.errors import ConfigurationError, ValidationError
from eventsql_orchestration.model import EVERY_EVENT, DeclaredFilter, EventFilter, check_partitions, check_topic_name
from eventsql_orchestration.rules import check_name, check_whole

FUNCTION_FILE: Final = "consume.py"

_COMPONENT_FILES: Final = frozenset({"defs.yaml", "defs.yml"})

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
        """Write the files; a function that is there already stays.

        The consumer is called as its folder, as far as Dagster takes that for a name. It has the platform where no
        other component of the project has it.
        """
        name = usable_name(request.target_path.name)
        own = [request.target_path / file for file in _COMPONENT_FILES]
        others = [file for file in with_platform(request.project_root or request.target_path.parent) if file not in own]
        attributes: dict[str, Any] = {
            "name": name,
            "topic": request.params.topic,
            "partitions": request.params.partitions,
            "consumer": name,
            "partitioned": request.params.partitions != NOT_PARTITIONED,
            **({"platform": False} if others else {}),
        }
        dg.scaffold_component(request, attributes)
        function = request.target_path / FUNCTION_FILE
        if not function.exists():
            function.write_text(_FUNCTION, encoding="utf-8")


def usable_name(text: str) -> str:
    """A name that Dagster takes for an asset, from that of a folder: `my-consumer` gives `my_consumer`."""
    name = re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_")
    # `type` for example is not free.
    return name if _is_name(name) else f"{name}_consumer".lstrip("_")


def _is_name(text: str) -> bool:
    try:
        dg.GraphDefinition(name=text)
    except dg.DagsterInvalidDefinitionError:
        return False
    return bool(text)


def with_platform(root: Path) -> list[Path]:
    """The files of components below a folder that have `platform: true`, each once for each such component in it."""
    return [file for file in _component_files(root) for having in _consumers(file) if having]


def _component_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        # Neither hidden folders nor environments.
        folders[:] = sorted(
            each for each in folders if not each.startswith(".") and not Path(folder, each, "pyvenv.cfg").exists()
        )
        yield from (Path(folder, file) for file in sorted(_COMPONENT_FILES.intersection(files)))


def _consumers(file: Path) -> list[bool]:
    """Whether each component of ours in a file has the platform; of a file that is none Dagster complains."""
    try:
        documents = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    ours = [each for each in documents if isinstance(each, dict) and _is_ours(each.get("type"))]
    given = [each.get("attributes") for each in ours]
    # What a template says is not known here.
    return [isinstance(each, dict) and each.get("platform", True) is True for each in given]


def _is_ours(kind: object) -> bool:
    return str(kind).startswith("eventsql_orchestration.") and str(kind).endswith(".EventSQLConsumerComponent")


class ComponentTopic(dg.Model, dg.Resolvable):
    """A topic beside the one that is consumed: `partitions` is -1 for one without."""

    name: str
    partitions: int = NOT_PARTITIONED

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        return check_topic_name(value)

    @field_validator("partitions")
    @classmethod
    def _partitions_are_possible(cls, value: int) -> int:
        return check_partitions(value)


class ComponentFilter(dg.Model, dg.Resolvable):
    """The events that a consumer is handed, as of `EventFilter`: those that meet every condition that is given."""

    keys: Sequence[str] | None = None
    key_prefix: str | None = None
    metadata: Mapping[str, str] | None = None

    @model_validator(mode="after")
    def _some_event_can_match(self) -> Self:
        _ = self.event_filter
        return self

    @property
    def event_filter(self) -> EventFilter:
        """Raises `ValidationError`."""
        return EventFilter(None if self.keys is None else frozenset(self.keys), self.key_prefix, self.metadata or {})


@dg.scaffold_with(ConsumerScaffolder)
class EventSQLConsumerComponent(dg.Component, dg.Model, dg.Resolvable):
    """A consumer of a topic with all that it needs: asset, job, sensors, checks, transfer, lag, housekeeping.

    Its function stands in `file` beside `defs.yaml`, as `consumer_asset` takes it. A project with several such
    components leaves `platform: true` to one of them, which has the resource `eventsql`, the transfer and
    housekeeping, and gives the others `platform: false`; `dg scaffold` sees to that. `topics` are further ones that the
    job `register` creates, external assets as of `build_definitions`. With `backfills`, ranges can be replayed.
    `max_attempts`, `filter` and `start` are those of `consumer_asset`; `filter: every event` ends a filter.
    """

    name: str
    topic: str
    consumer: str
    partitions: int = NOT_PARTITIONED
    partitioned: bool = False
    file: str = FUNCTION_FILE
    function: str = "consume"
    max_events: int = 10_000
    max_attempts: int | None = None
    filter: ComponentFilter | Literal["every event"] | None = None
    start: str = "earliest"
    max_lag_events: int | None = None
    max_lag_seconds: float | None = 300.0
    lag_grace: float = 60.0
    topics: Sequence[ComponentTopic] = ()
    backfills: bool = False
    platform: bool = True

    # What the platform would refuse is refused here, where the message names the field of the file.

    @field_validator("name")
    @classmethod
    def _name_is_one_of_dagster(cls, value: str) -> str:
        if not _is_name(value):
            raise ValidationError(
                f"{value!r} is no name for an asset: take letters, digits and _, such as {usable_name(value)!r}"
            )
        return value

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
    def _is_one_at_least(cls, value: int | None) -> int | None:
        return None if value is None else check_whole("it", value, least=1)

    @field_validator("start")
    @classmethod
    def _start_is_a_place(cls, value: str) -> str:
        read_place(value)
        return value

    @field_validator("max_lag_events", "max_lag_seconds", "lag_grace")
    @classmethod
    def _is_not_negative(cls, value: float | None) -> float | None:
        if value is not None and value < 0:
            raise ValidationError(f"it must not be negative: {value}")
        return value

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Raises `ConfigurationError` where the file or its function is not there, or another has the platform too."""
        if self.platform:
            self._has_the_platform_alone(context.defs_module_path)
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
            filter=self._declared_filter(),
            start=read_place(self.start),
        )(function)
        return build_definitions(
            [definition],
            topics=[Topic(topic.name, topic.partitions) for topic in self.topics],
            backfills=self.backfills,
            name=None if self.platform else self.name,
            platform=self.platform,
            max_lag_events=self.max_lag_events,
            max_lag_seconds=self.max_lag_seconds,
            lag_grace=self.lag_grace,
        )

    def _declared_filter(self) -> DeclaredFilter:
        if self.filter is None:
            return None
        return self.filter.event_filter if isinstance(self.filter, ComponentFilter) else EVERY_EVENT

    def _has_the_platform_alone(self, root: Path) -> None:
        having = with_platform(root)
        if len(having) > 1:
            # Dagster would only say that resources differ.
            files = " and ".join(str(file.relative_to(root)) for file in having)
            raise ConfigurationError(
                f"platform: {files} would all bring the resource `eventsql`, the transfer and housekeeping, and a "
                "location has these once: leave it true in one of them, and write `platform: false` in the others"
            )
