"""Options of a consumer's runs, its asset and its sensors."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final

import dagster as dg

from eventsql_orchestration import Topic
from eventsql_orchestration.dagster.topics import (
    KINDS,
    TOPIC_GROUP,
    TOPIC_KINDS,
    Columns,
    Dependencies,
    declared_columns,
    described_topic,
    freshness_policy,
    topic_key,
)
from eventsql_orchestration.dagster.translator import EventSQLTranslator, translated
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration import limits
from eventsql_orchestration.orchestration.limits import check_not_negative
from eventsql_orchestration.validation import check_seconds, check_several


def _keys(context: dg.ResolutionContext, model: Sequence[str]) -> Sequence[dg.AssetKey]:
    return [dg.AssetKey.from_user_string(each) for each in context.resolve_value(model, as_type=list[str])]


def _freshness(context: dg.ResolutionContext, model: float | str | None) -> dg.FreshnessPolicy | timedelta | None:
    found: Any = context.resolve_value(model) if isinstance(model, str) else model
    return timedelta(seconds=found) if isinstance(found, int | float) else found


def _retry_policy(_context: dg.ResolutionContext, model: Any) -> dg.RetryPolicy | None:
    return None if model is None else dg.RetryPolicy(max_retries=model.max_retries, delay=model.delay)


class RetryModel(dg.Model, dg.Resolvable):
    """A retry policy in `defs.yaml`. `delay` is in seconds."""

    max_retries: int = 1
    delay: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunLimits(limits.RunLimits, dg.Resolvable):
    __doc__ = limits.RunLimits.__doc__


@dataclass(frozen=True, kw_only=True)
class RangeLimits(RunLimits):
    """The limits of a range asset's runs: its ranges are larger by default."""

    max_events: int = 100_000
    drain_events: int = 10_000_000


@dataclass(frozen=True, kw_only=True)
class AssetOptions(dg.Resolvable):
    """How Dagster shows and runs a consumer's asset. `defs.yaml` takes the same fields.

    - `description`: the function's docstring by default.
    - `key_prefix`: the beginning of the asset's key; its last part is the asset's name.
    - `group_name`, `owners`, `code_version`, `metadata`: as for any asset. The topics that the consumer publishes to
      have the same owners and code version.
    - `automation_condition`: launches runs in addition to the runs of the consumer's sensors. Its runs claim the
      waiting events themselves.
    - `freshness`: the time without a materialization after which the asset is stale, or a policy; seconds in
      `defs.yaml`. The sensors request runs only if there are events.
    - `columns`: the columns that the consumer writes, with their types.
    - `translator`: changes the asset, and the assets of the topics that the consumer publishes to, after all other
      options.
    - `deps`: further assets that the consumer reads, in addition to its topic.
    - `kinds`: added to the kinds of every consumer. None adds `pyspark` for `range_asset`, and nothing for
      `consumer_asset`.
    - `tags`: the tags of its runs, and not of the asset. A `translator` gives tags to the asset.
    - `pool`: the pool that limits its runs (docs/dagster_operations.md). An asset of kind `pyspark` is in `SPARK_POOL`
      by default; name that pool for any other function that starts a session.
    - `retry_policy`: Dagster's retry policy, for faults outside of events, for example an unreachable database. The run
      goes on with its claim from the offset reached. Its delays must be shorter than the lease of the limits.
      A failing event is tried `max_attempts` times, whatever the policy.

    Raises `ValidationError` for `deps` or `kinds` that are a text.
    """

    # The component's pydantic model holds these options, and pydantic does not know the classes of Dagster.
    __pydantic_config__: ClassVar = {"arbitrary_types_allowed": True}

    description: str | None = None
    key_prefix: str | Sequence[str] = ()
    group_name: str | None = "consumers"
    owners: Sequence[str] = ()
    code_version: str | None = None
    metadata: Mapping[str, Any] | None = None
    automation_condition: Annotated[
        dg.AutomationCondition[Any] | None, dg.Resolver.default(model_field_type=str | None)
    ] = None
    freshness: Annotated[
        dg.FreshnessPolicy | timedelta | None, dg.Resolver(_freshness, model_field_type=float | str | None)
    ] = None
    columns: Annotated[Columns | None, dg.Resolver.default(model_field_type=Mapping[str, str] | None)] = None
    translator: Annotated[EventSQLTranslator | None, dg.Resolver.default(model_field_type=str | None)] = None
    deps: Annotated[Dependencies, dg.Resolver(_keys, model_field_type=Sequence[str])] = ()
    kinds: Annotated[Collection[str] | None, dg.Resolver.default(model_field_type=Sequence[str] | None)] = None
    tags: Mapping[str, str] | None = None
    pool: str | None = None
    retry_policy: Annotated[
        dg.RetryPolicy | None, dg.Resolver(_retry_policy, model_field_type=RetryModel.model() | None)
    ] = None

    def __post_init__(self) -> None:
        check_several("deps", self.deps)
        check_several("kinds", self.kinds or ())

    @property
    def version(self) -> str | None:
        """The code version. If a template in defs.yaml resolves to digits, Dagster makes it a number."""
        return None if self.code_version is None else str(self.code_version)

    def check_retries(self, lease: float) -> None:
        """Raise `ValidationError` if the retry policy lets a run wait for as long as its lease, or longer."""
        policy = self.retry_policy or dg.RetryPolicy()
        # A larger number of attempts could overflow.
        longest = policy._replace(jitter=None).calculate_delay(min(policy.max_retries, 60))
        if policy.jitter is dg.Jitter.PLUS_MINUS:
            longest += policy.delay or 0.0
        if longest >= lease:
            raise ValidationError(
                f"the retry policy waits up to {longest:g} s, and a run that waits counts as dead after the lease of "
                f"{lease:g} s: give the policy shorter delays, or the limits a longer lease"
            )

    def spec(
        self, name: str, docstring: str | None, *, deps: Iterable[dg.AssetKey], metadata: Mapping[str, Any]
    ) -> dg.AssetSpec:
        """The asset `name`, whose function has this docstring and reads `deps`."""
        prefix = [self.key_prefix] if isinstance(self.key_prefix, str) else self.key_prefix
        return dg.AssetSpec(
            key=dg.AssetKey([*prefix, name]),
            # A shared run, or a worker's run, that finds nothing to do materializes nothing.
            skippable=True,
            deps=[*deps, *self.deps],
            description=self.description or docstring,
            group_name=self.group_name,
            owners=self.owners,
            code_version=self.version,
            kinds={*KINDS, *(self.kinds or ())},
            automation_condition=self.automation_condition,
            freshness_policy=freshness_policy(self.freshness),
            metadata={**metadata, **declared_columns(self.columns), **(self.metadata or {})},
        )

    def published(self, topic: Topic | str, name: str, key: dg.AssetKey) -> dg.AssetSpec:
        """The asset of a topic to which the asset `name` publishes. A topic that is given by its name has to exist."""
        topic_name = topic.name if isinstance(topic, Topic) else topic
        spec = dg.AssetSpec(
            key=topic_key(topic_name),
            deps=[key],
            description=f"Events that {name} publishes.",
            group_name=TOPIC_GROUP,
            owners=self.owners,
            code_version=self.version,
            kinds=set(TOPIC_KINDS),
            metadata=described_topic(topic) if isinstance(topic, Topic) else {"topic": topic},
        )
        return translated(self.translator, topic_name, None, spec).replace_attributes(skippable=True)


@dataclass(frozen=True, kw_only=True)
class LagLimits(dg.Resolvable):
    """The allowed lag of a consumer: it may exceed `max_events` or `max_seconds` for at most `grace` seconds.

    One of the two may be None. Raises `ValidationError`.
    """

    max_events: int | None = None
    max_seconds: float | None = 300.0
    grace: float = 60.0

    def __post_init__(self) -> None:
        if self.max_events is None and self.max_seconds is None:
            raise ValidationError("a limit is needed: max_events, max_seconds, or both")
        check_not_negative(self, optional=("max_events", "max_seconds"))


DEFAULT_LAG: Final = LagLimits()


@dataclass(frozen=True, kw_only=True)
class TickOptions:
    """The timeouts and limits of the ticks of a consumer's sensors. Times are seconds. Raises `ValidationError`.

    - `statement_timeout`: maximum time of a tick's statement. Dagster gives up a tick after 60 s, but the tick keeps
      running.
    - `budget`: time after which a tick over many partitions begins with no further partition. The last statement and
      Dagster's own storage take time too, so the budget is well below 60 s.
    - `max_requests`: maximum number of runs that a tick requests. Dagster creates them one after the other, some 4 to
      10 a second, and begins no further tick of this sensor meanwhile.
    - `start_timeout`: time within which a created or starting run has to start. Otherwise it loses its claim. Dagster's
      own monitoring, if it is on, gives the run up after 180 s. A queued run may wait in its queue for any time.
    - `adopt_timeout`: time within which a started run has to adopt its claim, counted from its place in a pool if its
      step waits for one. Otherwise it loses the claim. Adoption is the first thing that a run does, so the process of a
      late run has probably died; Dagster's default launcher does not notice. The time doubles with each run from the
      same offset that came too late, up to `max_doublings` times (16 minutes). Otherwise a run with resources that take
      long to set up would always be too late.
    - `first_backoff`, `max_backoff`: the first and the longest pause between runs that fail at the same offset for
      reasons outside of events. Without pauses, a run would fail every 5 s.
    - `lead`: time before the end of a run's `drain_seconds` at which a tick requests a successor. Dagster looks at the
      sensor within 5 s and at its queue within 1 s, and a run takes some 2 s to start.
    - `slack`: time after the end of its `drain_seconds` in which a run may still handle its last range, or be about to
      end.
    - `linger`: time for which a tick that finds no events waits for events, counted from its beginning. Dagster begins
      the next tick 5 s after the beginning of this tick if this tick is stored by then, and 10 s after it otherwise.
    - `poll`: time after which a lingering tick looks again even without a notification. The end of a lease sends no
      notification, and a pooler lets none through.
    - `pause`: time for which a lingering tick ignores notifications after a notification of events for another
      partition.
    """

    statement_timeout: float = 10.0
    budget: float = 20.0
    max_requests: int = 25
    start_timeout: float = 300.0
    adopt_timeout: float = 60.0
    max_doublings: int = 4
    first_backoff: float = 10.0
    max_backoff: float = 600.0
    lead: float = 9.0
    slack: float = 5.0
    linger: float = 4.0
    poll: float = 1.0
    pause: float = 0.25

    def __post_init__(self) -> None:
        check_not_negative(self)
        check_seconds("statement_timeout", self.statement_timeout, zero=False)


DEFAULT_TICKS: Final = TickOptions()
