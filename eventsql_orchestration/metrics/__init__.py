"""Metrics for Prometheus: of the database, which one process reads, and of the process that publishes or consumes."""

from eventsql_orchestration.metrics.collector import PlatformCollector
from eventsql_orchestration.metrics.latencies import Latencies, MeasuredPublisher

__all__ = ["Latencies", "MeasuredPublisher", "PlatformCollector"]
