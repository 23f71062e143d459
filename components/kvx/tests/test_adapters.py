"""Tests of the adapters against tensors as vLLM, TGI and TensorRT-LLM lay them out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmdeploy.kvx import abi, adapters, check, library

BLOCKS, BLOCK, HEADS, DIM = 6, 4, 2, 16
LENGTHS = (0, 1, 8, 11)  # no token, one, whole blocks, a part of a block
TABLE = [[-1, -1, -1], [5, -1, -1], [2, 4, -1], [1, 3, 0]]  # -1 behind the length


def read(cache: abi.CacheDesc, tables: adapters.Tables, *, most: int) -> tuple[Any, Any]:
    """Return what a gather reads, [seqs, tokens, heads, head_dim]; -1 where there is no token."""
    shape = (tables.lengths.seq_count, most, HEADS, DIM)
    key, value = torch.full(shape, -1.0), torch.full(shape, -1.0)
    gather = adapters.gather(adapters.rows(key, value), tables)
    check(library().kvx_gather_kv(cache, gather, None))
    return key, value


def expected(rows: torch.Tensor, *, block_size: int = BLOCK, table: Any = TABLE) -> torch.Tensor:
    """Return the same for a cache [blocks, block_size, heads, head_dim]."""
    out = torch.full((len(LENGTHS), max(LENGTHS), HEADS, DIM), -1.0)
    for seq, length in enumerate(LENGTHS):
        for token in range(length):
            block = table[seq][token // block_size]
            out[seq, token] = rows[block, token % block_size].float()
    return out


def packed_tables(dtype: torch.dtype = torch.int32) -> adapters.Tables:
    return adapters.tgi_tables(torch.tensor(TABLE, dtype=dtype), torch.tensor(LENGTHS))


def caches() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (key, value) with the same rows, in each form."""
    shape = (2, BLOCKS, BLOCK, HEADS, DIM)
    nhd = torch.arange(2 * BLOCKS * BLOCK * HEADS * DIM).reshape(shape).to(torch.bfloat16)
    hnd = nhd.permute(0, 1, 3, 2, 4).contiguous().permute(0, 1, 3, 2, 4)
    joined = nhd.transpose(0, 1).contiguous().transpose(0, 1)  # FlashInfer: [blocks, 2, …]
    key = nhd[0].permute(0, 2, 3, 1).reshape(BLOCKS, HEADS, DIM // 8, 8, BLOCK)
    split = key.transpose(3, 4).contiguous(), nhd[1].permute(0, 2, 3, 1).contiguous()
    return {
        "NHD": (nhd[0], nhd[1]),
        "HND": (hnd[0], hnd[1]),
        "joined": (joined[0], joined[1]),
        "split": split,
    }


@pytest.mark.parametrize("form", ["NHD", "HND", "joined", "split"])
def test_gather_from_every_form_of_vllm_and_tgi(form: str) -> None:
    key, value = caches()[form]
    got = read(adapters.vllm_cache(key, value), packed_tables(), most=max(LENGTHS))
    for rows, found in zip(caches()["NHD"], got, strict=True):
        assert torch.equal(found, expected(rows))


@pytest.mark.parametrize("form", ["NHD", "HND", "joined", "split"])
def test_slots_with_padding_write_like_vllm(form: str) -> None:
    key, value = caches()[form]
    k, v = torch.randn(3, HEADS, DIM).bfloat16(), torch.randn(3, HEADS, DIM).bfloat16()
    slots = torch.tensor([9, -1, 3])
    write = adapters.write(adapters.rows(k, v), adapters.vllm_slots(slots))
    check(library().kvx_write_kv(adapters.vllm_cache(key, value), write, None))
    got = read(adapters.vllm_cache(key, value), packed_tables(torch.int64), most=max(LENGTHS))
    for old, new, found in zip(caches()["NHD"], (k, v), got, strict=True):
        changed = old.clone()
        changed[2, 1], changed[0, 3] = new[0], new[2]
        assert torch.equal(found, expected(changed))


def test_view_with_another_block_size() -> None:
    key, value = (x.reshape(BLOCKS * 2, BLOCK // 2, HEADS, DIM) for x in caches()["NHD"])
    halves = [[max(b, 0) * 2 + i for b in row for i in (0, 1)] for row in TABLE]
    tables = adapters.tgi_tables(np.array(halves, np.int32), np.array(LENGTHS, np.int32))
    got = read(adapters.vllm_cache(key, value), tables, most=max(LENGTHS))
    for rows, found in zip((key, value), got, strict=True):
        assert torch.equal(found, expected(rows, block_size=BLOCK // 2, table=halves))


def test_flat_tables_of_blocks_with_one_token() -> None:
    key, value = (x.reshape(BLOCKS * BLOCK, 1, HEADS, DIM) for x in caches()["NHD"])
    flat = [
        TABLE[s][t // BLOCK] * BLOCK + t % BLOCK for s, n in enumerate(LENGTHS) for t in range(n)
    ]
    tables = adapters.tgi_tables(
        torch.tensor(flat, dtype=torch.int32), torch.tensor(LENGTHS, dtype=torch.int32)
    )
    got = read(adapters.vllm_cache(key, value), tables, most=max(LENGTHS))
    for rows, found in zip(caches()["NHD"], got, strict=True):
        assert torch.equal(found, expected(rows))


@pytest.mark.parametrize("with_secondary", [True, False])
def test_offsets_of_tensorrt_llm(with_secondary: bool) -> None:
    # A pool of two layers: [blocks, layers, K and V, heads, tokens, head_dim]. This is layer 1.
    shape = (BLOCKS, 2, 2, HEADS, BLOCK, DIM)
    pools = [torch.randn(shape).half() for _ in range(2)]
    block, layer = HEADS * BLOCK * DIM, 1
    primary, secondary = (pool.flatten()[2 * layer * block :] for pool in pools)
    offsets = np.zeros((len(LENGTHS), 1, 2, 3), np.int32)
    chosen = np.zeros((len(LENGTHS), 3), int)
    for seq, row in enumerate(TABLE):
        for i, b in enumerate(row):
            chosen[seq, i] = with_secondary and (seq + i) % 2
            for side in (0, 1):
                index = max(b, 0) * 4 + side
                offsets[seq, 0, side, i] = index - (2**31 if chosen[seq, i] else 0)
    sizes = adapters.TrtllmSizes(BLOCK, HEADS, DIM)
    cache = adapters.trtllm_cache(primary, secondary if with_secondary else None, sizes=sizes)
    tables = adapters.trtllm_tables(offsets, np.array(LENGTHS, np.int32))
    got = read(cache, tables, most=max(LENGTHS))
    for side, found in enumerate(got):
        for seq, length in enumerate(LENGTHS):
            assert (found[seq, length:] == -1).all()
            for token in range(length):
                i = token // BLOCK
                stored = pools[chosen[seq, i]][TABLE[seq][i], layer, side, :, token % BLOCK]
                assert torch.equal(found[seq, token], stored.float())


def test_codes_of_fp8_are_copied() -> None:
    key = torch.randn(BLOCKS, BLOCK, HEADS, DIM).to(torch.float8_e4m3fn)
    bits = key.view(torch.uint8)
    cache = adapters.vllm_cache(bits, bits, dtype=abi.Dtype.F8_E4M3)
    out = torch.zeros(len(LENGTHS), max(LENGTHS), HEADS, DIM, dtype=torch.float8_e4m3fn)
    tables = packed_tables()
    check(library().kvx_gather_kv(cache, adapters.gather(adapters.rows(out, out), tables), None))
    assert torch.equal(out[1, 0].view(torch.uint8), bits[5, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adapters.tensor([1.0]), "tensor is of type list"),
        (lambda: adapters.tensor(np.zeros(3)), "has dtype float64"),
        (lambda: adapters.vllm_cache(np.zeros((2, 2), np.float32), None), "key has shape"),
        (lambda: adapters.vllm_slots(np.zeros(3, np.float32)), "mapping must be an array"),
        (lambda: adapters.vllm_slots(np.zeros(6, np.int32)[::2]), "must be contiguous"),
        (
            lambda: adapters.trtllm_cache(
                np.zeros(64, np.float16), sizes=adapters.TrtllmSizes(3, 1, 16)
            ),
            "tokens_per_block is 3",
        ),
    ],
)
def test_adapters_reject(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
