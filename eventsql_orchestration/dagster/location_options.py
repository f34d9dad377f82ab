"""Options of a code location: the parts that it has beside its consumers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Final, TypeAlias, TypedDict

import dagster as dg

from eventsql_orchestration import Shard, Topic
from eventsql_orchestration.dagster.consumers.options import DEFAULT_LAG, LagLimits
from eventsql_orchestration.dagster.housekeeping.schedule import DEFAULT_HISTORY, HistoryRetention
from eventsql_orchestration.dagster.monitoring.alerts import Notify
from eventsql_orchestration.dagster.monitoring.queues import DEFAULT_LIMITS as DEFAULT_QUEUE_LIMITS
from eventsql_orchestration.dagster.monitoring.queues import QueueLimits
from eventsql_orchestration.dagster.monitoring.topic_page import DEFAULT_SAMPLE, TopicSample
from eventsql_orchestration.dagster.queues.assets import WorkerDefinition
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.translator import EventSQLTranslator
from eventsql_orchestration.validation import check_kind, check_several

Prepare: TypeAlias = Callable[[Shard], object]
"""Prepares the targets of consumers, for example their tables. Each registration calls it again, once for each shard or
for the only database."""

GivenAsset: TypeAlias = dg.AssetsDefinition | dg.AssetSpec

_KINDS: Final[Mapping[str, type | UnionType]] = {
    "eventsql": EventSQLResource | None,
    "lag": LagLimits | None,
    "queue_lag": QueueLimits | None,
    "sample": TopicSample,
    "history": HistoryRetention,
    "dead_letters": bool,
    "backfills": bool,
    "platform": bool,
}


@dataclass(frozen=True, kw_only=True)
class LocationOptions:
    """The parts of a location beside its consumers.

    - `topics`: further topics. The job `register` creates them. They are external assets if no consumer publishes to
      them.
    - `eventsql`: the resource `eventsql`. None stands for the database, or the shards, that the environment names.
    - `resources`: further resources, by their keys.
    - `dead_letters`: whether the dead letter topics of the consumers' topics are created, and are external assets.
    - `backfills`: whether each consumer has the asset and the jobs of `build_backfill`.
    - `prepare`: prepares the consumers' targets, for example their tables. The job `register` calls it.
    - `lag`: the allowed lag of each consumer. None leaves out the check `lag`.
    - `notify`: a function. An alert sensor calls it when a check fails and when it passes again. None leaves out the
      sensor.
    - `name`: a part of the names of the job and the sensors (`register_<name>`, `lag_<name>`). If definitions are
      merged, each except the first needs a name.
    - `platform`: whether the definitions have the resource `eventsql`, the transfer, housekeeping, and the assets of
      topics outside of `topics`. If definitions are merged, only the first has the platform.
    - `assets`: further assets, external assets too. An asset with the metadata `topic`, which the IO manager reads, has
      an edge to this topic. An asset with the key of a topic or queue takes the place of the asset that would be made
      for it: an asset that publishes to the topic, or `topic_asset(…)` or `queue_asset(…)` with owners or `deps`.
    - `translator`: changes the assets of topics after all other options. Consumers have their own in `AssetOptions`.
    - `workers`: the workers of queues, with their assets, jobs and sensors. The job `register` creates their queues.
      The queues are external assets, and the sensor `queues` observes them.
    - `queue_lag`: the limits of each queue's checks. None leaves out the checks.
    - `sample`: the last events that the page of a topic shows if no consumer publishes to the topic.
    - `history`: how long housekeeping keeps old history.

    Raises `ValidationError` for fields of other kinds, and for topics, assets or workers that are a generator: it would
    give them only once.
    """

    topics: Sequence[Topic] = ()
    eventsql: EventSQLResource | None = None
    resources: Mapping[str, Any] | None = None
    dead_letters: bool = True
    backfills: bool = False
    prepare: Prepare | None = None
    lag: LagLimits | None = DEFAULT_LAG
    notify: Notify | None = None
    name: str | None = None
    platform: bool = True
    assets: Sequence[GivenAsset] = ()
    translator: EventSQLTranslator | None = None
    sample: TopicSample = DEFAULT_SAMPLE
    workers: Sequence[WorkerDefinition] = ()
    queue_lag: QueueLimits | None = DEFAULT_QUEUE_LIMITS
    history: HistoryRetention = DEFAULT_HISTORY

    def __post_init__(self) -> None:
        for name in ("topics", "assets", "workers"):
            check_several(name, getattr(self, name), Collection)
        for topic in self.topics:
            check_kind("each of topics", topic, Topic)
        for asset in self.assets:
            check_kind("each of assets", asset, GivenAsset)
        for name, kind in _KINDS.items():
            check_kind(name, getattr(self, name), kind)


class LocationFields(TypedDict, total=False):
    """The fields of `LocationOptions` as keywords."""

    topics: Sequence[Topic]
    eventsql: EventSQLResource | None
    resources: Mapping[str, Any] | None
    dead_letters: bool
    backfills: bool
    prepare: Prepare | None
    lag: LagLimits | None
    notify: Notify | None
    name: str | None
    platform: bool
    assets: Sequence[GivenAsset]
    translator: EventSQLTranslator | None
    sample: TopicSample
    workers: Sequence[WorkerDefinition]
    queue_lag: QueueLimits | None
    history: HistoryRetention


DEFAULT_LOCATION: Final = LocationOptions()
