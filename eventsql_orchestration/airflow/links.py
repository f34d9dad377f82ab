"""The link of a task to the page that shows where the events of its run come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

PREFIX: Final = "/eventsql"
"""The path of this package's pages in Airflow's API server."""


class TraceLink(BaseOperatorLink):
    """The output of `eventsql trace` for a run, as a page of Airflow.

    The page is about the last event that the task published, or about the ranges that its run has read if the task
    published nothing.
    """

    name = "EventSQL trace"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        conn_id = getattr(operator, "eventsql_conn_id", "")
        published = getattr(operator, "published", None)  # what `publish_output` returned
        query: dict[str, Any] = {"run_id": ti_key.run_id, "conn_id": conn_id}
        if published and published.get("ranges"):
            last = published["ranges"][-1]
            query |= {"topic": published["topic"], "offset": last["last"]}
            query |= {"shard": last["shard"]} if "shard" in last else {}
        base = conf.get("api", "base_url", fallback="/").rstrip("/")
        return f"{base}{PREFIX}/trace/{quote(ti_key.dag_id, safe='')}?{urlencode(query)}"
