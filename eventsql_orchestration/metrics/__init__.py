"""Figures of the platform for Prometheus and `eventsql top`, and latencies of a process that publishes or consumes."""

from typing import TYPE_CHECKING

from eventsql_orchestration.first_use import on_first_use

if TYPE_CHECKING:
    from eventsql_orchestration.metrics.collector import PlatformCollector
    from eventsql_orchestration.metrics.latencies import Latencies, MeasuredPublisher

__all__ = ["Latencies", "MeasuredPublisher", "PlatformCollector"]

# They need an extra. The figures themselves do not.
__getattr__ = on_first_use(
    __name__, {".collector": ("PlatformCollector",), ".latencies": ("Latencies", "MeasuredPublisher")}
)
