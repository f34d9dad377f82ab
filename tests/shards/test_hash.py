"""Which shard a key belongs to: stable, spread evenly, independent of partitions, and moved by additions alone."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventsql_orchestration.errors import ShardPendingError, WrongShardError
from eventsql_orchestration.sharding import ShardSet
from eventsql_orchestration.topics.partitioner import partition_of_key
from tests.shard_keys import shard_of_key

KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=40)
NAMES = st.sets(st.text("abcdefghijklmnop-0123456789", min_size=1, max_size=12), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("key", "shard"), [("", "shard-1"), ("42", "shard-2"), ("43", "shard-3"), ("ключ", "shard-3"), ("🚕", "shard-1")]
)
def test_keys_stay_where_they_were_in_every_version(key: str, shard: str) -> None:
    assert shard_of_key(key, ["shard-1", "shard-2", "shard-3"]) == shard


@given(key=KEYS, names=NAMES)
def test_the_heaviest_name_takes_the_key(key: str, names: set[str]) -> None:
    weights = {hashlib.sha256(f"{name}\x00{key}".encode()).digest(): name for name in names}
    assert shard_of_key(key, sorted(names)) == weights[max(weights)]
    assert shard_of_key(key, sorted(names, reverse=True)) == weights[max(weights)], "their order does not matter"


@given(key=KEYS, names=NAMES, added=st.text("qrstuvwxyz", min_size=1, max_size=12))
def test_a_key_stays_or_moves_to_the_shard_that_is_added(key: str, names: set[str], added: str) -> None:
    before, after = shard_of_key(key, sorted(names)), shard_of_key(key, sorted({*names, added}))
    assert after in {before, added}


@settings(max_examples=10)
@given(number=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_an_addition_moves_as_many_keys_as_the_new_shard_is_to_have(number: int, seed: int) -> None:
    keys = [f"{seed}-{each}" for each in range(4_000)]
    names = [f"shard-{each}" for each in range(number)]
    moved = sum(shard_of_key(key, names) != shard_of_key(key, [*names, "new"]) for key in keys)
    assert moved / len(keys) == pytest.approx(1 / (number + 1), abs=0.04)
    spread = Counter(shard_of_key(key, names) for key in keys)
    assert all(count / len(keys) == pytest.approx(1 / number, abs=0.04) for count in spread.values())


def test_the_shard_says_nothing_about_the_partition() -> None:
    keys = [f"key {each}" for each in range(12_000)]
    pairs = Counter((shard_of_key(key, ["a", "b", "c"]), partition_of_key(key, 4)) for key in keys)
    assert len(pairs) == 12
    assert all(count == pytest.approx(1_000, abs=150) for count in pairs.values())


def test_a_shard_refuses_the_keys_of_others_and_everything_until_it_is_active() -> None:
    names = ("shard-1", "shard-2", "shard-3")
    mine = ShardSet("set", "shard-2", 1, names, active=True)
    mine.check("42")
    mine.check(None)
    with pytest.raises(WrongShardError, match="belongs to shard 'shard-3', not to 'shard-2'") as refused:
        mine.check("43")
    assert refused.value.shard == "shard-3"
    with pytest.raises(ShardPendingError, match="eventsql shard add"):
        ShardSet("set", "shard-2", 1, names, active=False).check("42")
