"""Tests of the choice of replicas by the beginnings of prompts."""

from __future__ import annotations

import random

from lmdeploy.replicas.prefix_table import PrefixTable, prefix_keys


def prompt(seed: int, tokens: int = 256) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(tokens)]


def idle(*replicas: str) -> dict[str, int]:
    return dict.fromkeys(replicas, 0)


def test_prefix_keys_share_the_common_beginning() -> None:
    first = prefix_keys(prompt(0))
    other = prefix_keys([*prompt(0)[:150], *prompt(1)])
    assert len(first) == 4
    assert first[:2] == other[:2]
    assert not set(first[2:]) & set(other[2:])


def test_prefix_keys_count_whole_blocks_only() -> None:
    assert prefix_keys(prompt(0, 63)) == []
    assert len(prefix_keys(prompt(0, 127))) == 1


def test_prefix_keys_of_different_salts_have_nothing_in_common() -> None:
    assert not set(prefix_keys(prompt(0), b"a")) & set(prefix_keys(prompt(0), b"b"))


def test_prefix_table_chooses_the_longest_prefix() -> None:
    table: PrefixTable[str] = PrefixTable()
    table.record(prefix_keys(prompt(0)[:128]), "a")
    table.record(prefix_keys(prompt(0)), "b")
    assert table.choose(prefix_keys(prompt(0)), idle("a", "b", "c")) == "b"


def test_prefix_table_gap_in_a_prefix_ends_it() -> None:
    table: PrefixTable[str] = PrefixTable()
    keys = prefix_keys(prompt(0))
    table.record(keys[1:], "a")
    table.record(keys[:1], "b")
    assert table.choose(keys, idle("a", "b")) == "b"


def test_prefix_table_gives_new_prefixes_to_the_replica_with_the_fewest_requests() -> None:
    table: PrefixTable[str] = PrefixTable()
    assert table.choose(prefix_keys(prompt(0)), {"a": 2, "b": 1, "c": 3}) == "b"


def test_prefix_table_spreads_new_prefixes_over_idle_replicas() -> None:
    table: PrefixTable[str] = PrefixTable()
    for i in range(64):
        keys = prefix_keys(prompt(i))
        table.record(keys, table.choose(keys, idle("a", "b", "c", "d")))
    counts = [table.choose(prefix_keys(prompt(i)), idle("a", "b", "c", "d")) for i in range(64)]
    assert [counts.count(replica) for replica in "abcd"] == [16] * 4


def test_prefix_table_hot_prefix_spreads_when_its_replica_is_loaded() -> None:
    table: PrefixTable[str] = PrefixTable()
    keys = prefix_keys(prompt(0))
    loads = idle("a", "b", "c", "d")
    for _ in range(40):
        replica = table.choose(keys, loads)
        table.record(keys, replica)
        loads[replica] += 1
    assert max(loads.values()) <= 1.5 * min(loads.values()) + 5
    assert min(loads.values()) >= 5


def test_prefix_table_is_bounded_and_forgets_the_oldest() -> None:
    table: PrefixTable[str] = PrefixTable(max_blocks=100)
    table.record(prefix_keys(prompt(0)), "a")
    for i in range(1, 5000):
        table.record(prefix_keys(prompt(i)), "b")
        if i % 10 == 0:  # in use, so it stays
            table.record(prefix_keys(prompt(0)), "a")
        assert len(table) <= 100
    loads = {"a": 4, "b": 0}
    assert table.choose(prefix_keys(prompt(0)), loads) == "a"
    assert table.choose(prefix_keys(prompt(1)), loads) == "b"


def test_prefix_table_forgets_the_end_of_a_prefix_before_its_beginning() -> None:
    table: PrefixTable[str] = PrefixTable(max_blocks=4)
    table.record(prefix_keys(prompt(0)), "a")
    table.record(prefix_keys(prompt(1, 64)), "b")
    assert table.choose(prefix_keys(prompt(0)), {"a": 3, "b": 0}) == "a"


def test_prefix_table_forgets_replicas_that_are_gone() -> None:
    table: PrefixTable[str] = PrefixTable()
    keys = prefix_keys(prompt(0))
    table.record(keys, "a")
    table.record(keys[:2], "b")
    table.forget({"a"})
    assert len(table) == 2
    assert table.choose(keys, {"b": 3, "c": 0}) == "b"
