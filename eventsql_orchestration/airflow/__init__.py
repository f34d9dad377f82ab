"""Airflow over topics: a connection, operators, a sensor, and the trigger that schedules DAGs by claims.

The floor `orchestration/` does the work, as for Dagster. docs/airflow.md shows how the parts fit together.
"""

from typing import TYPE_CHECKING

from eventsql_orchestration.first_use import on_first_use

if TYPE_CHECKING:
    from eventsql_orchestration.airflow.assets import topic_asset
    from eventsql_orchestration.airflow.consume import EventSQLConsumeOperator, eventsql_consume
    from eventsql_orchestration.airflow.hook import EventSQLHook
    from eventsql_orchestration.airflow.lag import EventSQLLagOperator
    from eventsql_orchestration.airflow.publish import EventSQLPublishOperator, publish_output
    from eventsql_orchestration.airflow.sensor import EventSQLSensor
    from eventsql_orchestration.airflow.triggers import EventSQLTrigger, claims_asset
    from eventsql_orchestration.orchestration.limits import RunLimits

__all__ = [
    "EventSQLConsumeOperator", "EventSQLHook", "EventSQLLagOperator", "EventSQLPublishOperator", "EventSQLSensor",
    "EventSQLTrigger", "RunLimits", "claims_asset", "eventsql_consume", "publish_output", "topic_asset",
]  # fmt: skip

__getattr__ = on_first_use(
    __name__,
    {
        ".assets": ("topic_asset",),
        ".consume": ("EventSQLConsumeOperator", "eventsql_consume"),
        ".hook": ("EventSQLHook",),
        ".lag": ("EventSQLLagOperator",),
        ".publish": ("EventSQLPublishOperator", "publish_output"),
        ".sensor": ("EventSQLSensor",),
        ".triggers": ("EventSQLTrigger", "claims_asset"),
        "..orchestration.limits": ("RunLimits",),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
