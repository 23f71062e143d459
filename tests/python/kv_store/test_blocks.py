"""Tests of KvBlocks as bytes, and of the values in a store."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdeploy.kv_store.blocks import KvBlocks, pack_copies, unpack_copies

BLOCKS = KvBlocks({"model": "m"}, [1, 2, 3, 4], 2, [[b"ab", b""], [b"", b"c" * 9]])


def test_blocks_survive_the_way_through_bytes() -> None:
    assert KvBlocks.from_bytes(BLOCKS.to_bytes()) == BLOCKS
    empty = KvBlocks({}, [], 64, [])
    assert KvBlocks.from_bytes(empty.to_bytes()) == empty
    assert BLOCKS.num_bytes == 11


def with_description(**changes: object) -> bytes:
    data = BLOCKS.to_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    about = json.loads(header["__metadata__"]["lmdeploy_kv_blocks"])
    header["__metadata__"]["lmdeploy_kv_blocks"] = json.dumps({**about, **changes})
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"identity": []},
        {"tokens": [1, 2, 3]},
        {"tokens": [1, 2, 3, -4]},
        {"tokens": [1, 2, 3, 2**31]},
        {"tokens": [True, 2, 3, 4]},
        {"tokens": []},
        {"block_tokens": 0},
        {"block_tokens": "2"},
        {"num_pools": 1},
        {"num_pools": 10**9},
    ],
)
def test_a_wrong_description_is_refused(changes: dict[str, object]) -> None:
    assert KvBlocks.from_bytes(with_description()) == BLOCKS
    with pytest.raises(ValueError, match="not KV blocks"):
        KvBlocks.from_bytes(with_description(**changes))


@given(st.binary(max_size=40), st.integers(0, 400), st.integers(0, 255))
def test_damaged_blocks_are_refused_or_read(other: bytes, place: int, value: int) -> None:
    data = bytearray(BLOCKS.to_bytes())
    data[place % len(data)] = value
    for wrong in (other, bytes(data), bytes(data[: place % len(data)])):
        try:
            KvBlocks.from_bytes(wrong)
        except ValueError as error:
            assert "not KV blocks" in str(error)


@given(st.lists(st.binary(max_size=9), max_size=5), st.binary(max_size=60))
def test_copies_of_a_block_survive_and_other_bytes_do_not(
    copies: list[bytes], other: bytes
) -> None:
    packed = pack_copies(copies)
    assert unpack_copies(packed) == copies
    assert unpack_copies(packed + b"x") is None
    assert unpack_copies(packed[:-1]) is None
    unpacked = unpack_copies(other)
    assert unpacked is None or pack_copies(unpacked) == other
