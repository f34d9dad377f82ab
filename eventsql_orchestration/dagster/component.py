"""A consumer as a component of `dg`: a `defs.yaml` beside a Python file with its function.

`dg scaffold defs eventsql_orchestration.dagster.EventSQLConsumerComponent NAME` writes both.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Literal, Self

import dagster as dg
import yaml  # type: ignore[import-untyped]  # it comes without types
from pydantic import BaseModel, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from eventsql_orchestration import NOT_PARTITIONED, Topic
from eventsql_orchestration.consumer import EVERY_EVENT, DeclaredFilter, EventFilter
from eventsql_orchestration.dagster.build_definitions import common_definitions, consumer_checks, definitions_of
from eventsql_orchestration.dagster.consumers.assets import consumer_asset
from eventsql_orchestration.dagster.consumers.definition import ConsumerDefinition, check_distinct
from eventsql_orchestration.dagster.consumers.options import DEFAULT_LAG, AssetOptions, LagLimits, RunLimits
from eventsql_orchestration.dagster.location_options import LocationOptions
from eventsql_orchestration.dagster.monitoring.checks import ConsumerCheck
from eventsql_orchestration.errors import ConfigurationError, ValidationError
from eventsql_orchestration.model import check_partitions, check_topic_name
from eventsql_orchestration.topics.positions import parse_place
from eventsql_orchestration.validation import check_name, check_whole

FUNCTION_FILE: Final = "consume.py"

_FUNCTION: Final = '''"""The function that handles the consumer's events."""

from collections.abc import Sequence

from eventsql_orchestration import Connection, Event


def consume(events: Sequence[Event], connection: Connection) -> None:
    """Writes through `connection` commit together with the consumer's offset: exactly once."""
    raise NotImplementedError("handle the events here")
'''


class ConsumerParams(BaseModel):
    """Parameters of `dg scaffold`."""

    topic: str = Field(default="orders", description="Name of the topic")
    partitions: int = Field(default=NOT_PARTITIONED, description="Its number of partitions, -1 for none")


class ConsumerScaffolder(dg.Scaffolder[ConsumerParams]):
    """Writes a consumer's `defs.yaml`, and a file for its function."""

    @classmethod
    def get_scaffold_params(cls) -> type[ConsumerParams]:
        return ConsumerParams

    def scaffold(self, request: dg.ScaffoldRequest[ConsumerParams]) -> None:
        """Write the files. A function that already exists stays.

        The consumer gets the name of its folder, changed to a name that Dagster accepts. It gets `platform: true` if no
        other component of the project has it.
        """
        folder, name = request.target_path, usable_name(request.target_path.name)
        others = [file for file in with_platform(request.project_root or folder.parent) if file.parent != folder]
        attributes: dict[str, Any] = {
            "name": name,
            "topic": request.params.topic,
            "partitions": request.params.partitions,
            "consumer": name,
            "partitioned": request.params.partitions != NOT_PARTITIONED,
            **({"platform": False} if others else {}),
        }
        dg.scaffold_component(request, attributes)
        if not (folder / FUNCTION_FILE).exists():
            (folder / FUNCTION_FILE).write_text(_FUNCTION, encoding="utf-8")


def usable_name(text: str) -> str:
    """Turn a folder's name into a valid asset name: `my-consumer` gives `my_consumer`."""
    name = re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_")
    # Dagster reserves some names, for example `type`.
    return name if _is_name(name) else f"{name}_consumer".lstrip("_")


def _is_name(text: str) -> bool:
    try:
        dg.GraphDefinition(name=text)
    except dg.DagsterInvalidDefinitionError:
        return False
    return bool(text)


def with_platform(root: Path) -> list[Path]:
    """The files below a folder with components that have `platform: true`. A file occurs once for each of them."""
    found = []
    for folder, folders, files in os.walk(root):
        # Skip hidden folders and environments.
        folders[:] = sorted(
            each for each in folders if not each.startswith(".") and not Path(folder, each, "pyvenv.cfg").exists()
        )
        for file in sorted({"defs.yaml", "defs.yml"}.intersection(files)):
            path = Path(folder, file)
            found += [path for document in _documents(path) if _has_platform(document)]
    return found


def _documents(file: Path) -> list[Any]:
    """The YAML documents of a file; no documents if the file is invalid, because Dagster reports that."""
    try:
        return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError):
        return []


def _has_platform(document: Any) -> bool:
    """Whether a document is a component of this package that has `platform: true`."""
    kind = str(document.get("type")) if isinstance(document, dict) else ""
    if not kind.startswith("eventsql_orchestration.") or not kind.endswith(".EventSQLConsumerComponent"):
        return False
    attributes = document.get("attributes")
    # The value of a template is not known here.
    return isinstance(attributes, dict) and attributes.get("platform", True) is True


class ComponentTopic(dg.Model, dg.Resolvable):
    """A further topic. `partitions` is -1 for a topic without partitions."""

    name: str
    partitions: int = NOT_PARTITIONED

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        _ = self.declared
        return self

    @property
    def declared(self) -> Topic:
        """Raises `ValidationError`, `InvalidNameError`."""
        return Topic(self.name, self.partitions)


class ComponentFilter(dg.Model, dg.Resolvable):
    """The filter of a consumer, as `EventFilter`: an event must meet every condition that is given."""

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


def _check_asset_name(value: str) -> None:
    if not _is_name(value):
        raise ValidationError(
            f"{value!r} is not a name for an asset: use letters, digits and _, for example {usable_name(value)!r}"
        )


_CHECKS: Final[Mapping[str, Callable[[Any], object]]] = {
    "name": _check_asset_name,
    "topic": check_topic_name,
    "consumer": partial(check_name, "consumer name"),
    "partitions": check_partitions,
    "batch": partial(check_whole, "it", least=1),
    "max_attempts": partial(check_whole, "it", least=1),
    "start": parse_place,
}
"""The checks of fields. They refuse an invalid value early, so that the message names the field of the file."""


@dg.scaffold_with(ConsumerScaffolder)
class EventSQLConsumerComponent(dg.Component, dg.Model, dg.Resolvable):
    """A consumer of a topic with everything that it needs: asset, job, sensors, checks, transfer, lag, housekeeping.

    Its function is in `file` beside `defs.yaml`, in the form that `consumer_asset` takes. In a project with several of
    these components, one has `platform: true`. It has the resource `eventsql`, the transfer and housekeeping, and for
    all components the sensor `lag` and the job `register`. The others have `platform: false`, which `dg scaffold`
    writes. `topics` are further topics: the job `register` creates them, and they are external assets as in
    `build_definitions`. With `backfills`, ranges can be replayed. `batch`, `limits`, `options`, `sensor`,
    `default_status`, `max_attempts`, `filter` and `start` are those of `consumer_asset`; `filter: every event` removes
    a filter.
    """

    name: str
    topic: str
    consumer: str
    partitions: int = NOT_PARTITIONED
    partitioned: bool = False
    file: str = FUNCTION_FILE
    function: str = "consume"
    batch: int = 1_000
    limits: RunLimits = RunLimits()
    options: AssetOptions = AssetOptions()
    sensor: Literal["partition", "consumer"] | None = None
    default_status: Literal["RUNNING", "STOPPED"] = "RUNNING"
    max_attempts: int | None = None
    filter: ComponentFilter | Literal["every event"] | None = None
    start: str = "earliest"
    lag: LagLimits | None = DEFAULT_LAG
    topics: Sequence[ComponentTopic] = ()
    backfills: bool = False
    platform: bool = True

    _context: dg.ComponentLoadContext | None = PrivateAttr(default=None)

    @field_validator("name", "topic", "consumer", "partitions", "batch", "max_attempts", "start")
    @classmethod
    def _is_possible(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            _CHECKS[str(info.field_name)](value)
        return value

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        component = super().load(attributes, context)
        # It has the path of the component's file.
        component._context = context  # noqa: SLF001 - of its own class
        return component

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Raises `ConfigurationError` if file or function is missing, or another component has `platform: true`."""
        if self.platform:
            self._has_the_platform_alone(context.defs_module_path)
        self._context = context
        own = definitions_of([self.consumer_definition], self.checks, backfills=self.backfills)
        project = context.component_tree.get_all_components(EventSQLConsumerComponent)
        is_loaded = any(each is self for each in project)
        if not self.platform and is_loaded and any(each.platform for each in project):
            # The component with `platform: true` has the sensor `lag` and the job `register` for this component.
            return own

        parts = [self, *(each for each in project if each is not self)] if self.platform else [self]
        consumers = [each.consumer_definition for each in parts]
        check_distinct(consumers)
        return dg.Definitions.merge(
            own,
            common_definitions(
                consumers,
                [check for each in parts for check in each.checks],
                LocationOptions(
                    topics=[topic.declared for each in parts for topic in each.topics],
                    name=None if self.platform else self.name,
                    platform=self.platform,
                ),
            ),
        )

    @cached_property
    def consumer_definition(self) -> ConsumerDefinition:
        """Raises `ConfigurationError` if the file or its function is missing."""
        context = self._context
        if context is None:
            raise ConfigurationError(f"component {self.name!r} has no context: Dagster has to load it")
        if not (context.path / self.file).is_file():
            raise ConfigurationError(f"file: {context.path / self.file} does not exist")
        module = context.load_defs_relative_python_module(Path(self.file))
        function = getattr(module, self.function, None)
        if not callable(function):
            raise ConfigurationError(f"function: {context.path / self.file} has no function {self.function!r}")
        declared: DeclaredFilter = None
        if self.filter is not None:
            declared = self.filter.event_filter if isinstance(self.filter, ComponentFilter) else EVERY_EVENT
        return consumer_asset(
            topic=Topic(self.topic, self.partitions),
            consumer=self.consumer,
            partitioned=self.partitioned,
            name=self.name,
            batch=self.batch,
            limits=self.limits,
            options=self.options,
            max_attempts=self.max_attempts,
            filter=declared,
            start=parse_place(self.start),
            sensor=self.sensor,
            default_status=dg.DefaultSensorStatus(self.default_status),
        )(function)

    @cached_property
    def checks(self) -> list[ConsumerCheck]:
        return consumer_checks([self.consumer_definition], self.lag)

    def _has_the_platform_alone(self, root: Path) -> None:
        having = with_platform(root)
        if len(having) > 1:
            # Dagster's own message only says that resources differ.
            files = " and ".join(str(file.relative_to(root)) for file in having)
            raise ConfigurationError(
                f"platform: {files} each have the resource `eventsql`, the transfer and housekeeping, but a location "
                "needs these once: write `platform: false` in all of them except one"
            )
