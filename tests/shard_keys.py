"""The shard of a key, as every publisher has to choose it."""

from __future__ import annotations

from collections.abc import Iterable

from eventsql_orchestration.sharding import owner_among


def shard_of_key(key: str, names: Iterable[str]) -> str:
    """The shard of a key, among shards with these names."""
    return owner_among(tuple(names))(key)
