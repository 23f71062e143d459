"""Tests of writes and gathers of libkvx against the NumPy model, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from reference import kvx as model
from reference.floats import to_bits

from lmdeploy.kvx import abi, adapters, library

NUM_CASES = 10_000
CASES_PER_TEST = 1_000
GUARD = 32  # elements around every buffer
LAYOUTS = {
    "NHD": abi.Layout.BLOCK_NHD,
    "HND": abi.Layout.BLOCK_HND,
    "HND_PACKED": abi.Layout.BLOCK_HND_PACKED,
    "CUSTOM": abi.Layout.BLOCK_CUSTOM,
}
DTYPES = {
    "F16": abi.Dtype.F16,
    "BF16": abi.Dtype.BF16,
    "F32": abi.Dtype.F32,
    "E4M3": abi.Dtype.F8_E4M3,
    "E5M2": abi.Dtype.F8_E5M2,
}


class Buffer:
    """An array with guards, and its copy before a call."""

    def __init__(self, size: int, dtype: Any, rng: np.random.Generator) -> None:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        self.all = rng.integers(low, high, size + 2 * GUARD, dtype=dtype, endpoint=True)
        if dtype != np.uint8:  # without NaN, whose bits a conversion may change
            self.all &= np.array(~(1 << (8 * self.all.itemsize - 2)) & high, dtype)
        self.array = self.all[GUARD : GUARD + size]

    def copy(self) -> np.ndarray:
        return self.all.copy()


class Case:
    """Random sizes, layouts, strides, dtypes and rows."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.blocks = self.draw(1, 6)
        self.block_size = self.pick(1, 2, 3, 4, 8, 16)
        self.heads = self.draw(1, 3)
        self.dim = self.pick(1, 2, 4, 8, 16, 24, 40)
        self.buffers: list[Buffer] = []
        self.k, self.v = self.side(), self.side()

    def draw(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def pick(self, *choices: Any) -> Any:
        return choices[self.draw(0, len(choices) - 1)]

    def side(self) -> model.Side:
        layout, dtype = self.pick(*LAYOUTS), self.pick(*DTYPES)
        pack = self.pick(*(p for p in (1, 2, 4, 8, self.dim) if self.dim % p == 0))
        shape = {
            "HND": (self.blocks, self.heads, self.block_size, self.dim),
            "HND_PACKED": (self.blocks, self.heads, self.dim // pack, self.block_size, pack),
        }.get(layout, (self.blocks, self.block_size, self.heads, self.dim))
        order = list(range(len(shape)))
        if layout == "CUSTOM":
            self.rng.shuffle(order)
        unit = 1 if layout == "CUSTOM" else 16 // np.dtype(model.UINTS[dtype]).itemsize
        is_padded = self.pick(True, False)
        stride, step = [0] * len(shape), 1
        for i, axis in enumerate(reversed(order)):
            if is_padded and i > 0:
                step = -(-step // unit) * unit + unit * self.draw(0, 2)
            stride[axis] = step
            step *= shape[axis]
        buffer = Buffer(step, model.UINTS[dtype], self.rng)
        self.buffers.append(buffer)
        return model.Side(layout, dtype, shape, tuple(stride), buffer.array)

    def cache(self) -> abi.CacheDesc:
        cache = abi.CacheDesc(self.blocks, self.block_size, self.heads, self.dim)
        cache.k, cache.v = (describe(side) for side in (self.k, self.v))
        cache.pool.size = 0
        return cache

    def rows(self, tokens: int, dtype: str) -> np.ndarray:
        values = self.rng.standard_normal((tokens * self.heads, self.dim)).astype(np.float32)
        buffer = Buffer(values.size, model.UINTS[dtype], self.rng)
        if values.size and dtype in model.FLOATS:
            bits = np.ascontiguousarray(to_bits(values * 3, model.FLOATS[dtype]))
            buffer.array[:] = bits.view(model.UINTS[dtype]).ravel()
        self.buffers.append(buffer)
        return buffer.array.reshape(tokens, self.heads, self.dim)

    def integers(self, values: Any) -> tuple[np.ndarray, abi.Dtype]:
        wide = self.pick(True, False)
        dtype = abi.Dtype.S64 if wide else abi.Dtype.S32
        return np.array(values, np.int64 if wide else np.int32), dtype

    def io(self, tokens: int, dtypes: tuple[str, str]) -> tuple[abi.KvIoDesc, list[np.ndarray]]:
        arrays = [self.rows(tokens, dtype) for dtype in dtypes]
        k, v = (adapters.tensor(x, dtype=DTYPES[d]) for x, d in zip(arrays, dtypes, strict=True))
        return abi.KvIoDesc(k, v, tokens, self.heads, self.dim), arrays

    def io_dtype(self, side: model.Side, *, gathers: bool) -> str:
        if side.dtype in model.FLOATS:
            return str(self.pick(*model.FLOATS))
        return side.dtype if gathers or self.pick(True, False) else str(self.pick(*model.FLOATS))


def describe(side: model.Side) -> abi.TensorDesc:
    desc = abi.TensorDesc(DTYPES[side.dtype], LAYOUTS[side.layout], abi.Memory.HOST)
    desc.ndim, desc.data = len(side.shape), side.memory.ctypes.data
    desc.shape[: len(side.shape)] = side.shape
    desc.stride[: len(side.stride)] = side.stride
    return desc


def scale_desc(case: Case) -> tuple[abi.ScaleDesc, np.ndarray, np.ndarray]:
    """Return scales as a descriptor, its memory, and by block and head.

    If the descriptor has no scales, the memory has one for the tensor.
    """
    kind = case.pick(*abi.Scale)
    shape = ((), (1,), (case.blocks,), (case.heads,), (case.blocks, case.heads))[kind]
    scales = case.rng.uniform(0.5, 2, shape).astype(np.float32)
    desc = abi.ScaleDesc(abi.Dtype.F32, kind, len(shape))
    desc.shape[: len(shape)] = shape
    desc.stride[: len(shape)] = [stride // 4 for stride in scales.strides]
    desc.data = scales.ctypes.data
    if kind == abi.Scale.NONE:
        desc.size = case.pick(0, desc.size)
    by_head = scales if kind != abi.Scale.PER_BLOCK else scales[:, None]
    return desc, scales, np.broadcast_to(by_head, (case.blocks, case.heads))


def run_write(case: Case, lib: Any) -> None:
    tokens = case.draw(0, 9)
    last = case.blocks * case.block_size - 1
    invalid = case.pick(-1, 0, last, 10**6)
    used = [case.draw(0, last) for _ in range(5)]
    slots = [case.pick(-1, -7, invalid, *used) for _ in range(tokens)]
    indices, index_dtype = case.integers(slots)
    dtypes = tuple(case.io_dtype(side, gathers=False) for side in (case.k, case.v))
    io, arrays = case.io(tokens, dtypes)
    write = abi.WriteDesc(io, abi.SlotMapping(index_dtype, tokens, invalid, indices.ctypes.data))
    write.k_scale_desc, k_memory, k_scales = scale_desc(case)
    write.v_scale_desc, v_memory, v_scales = scale_desc(case)
    write.k_scale = k_memory.ctypes.data
    if case.pick(True, False):
        write.v_scale = v_memory.ctypes.data
    elif write.v_scale_desc.granularity == abi.Scale.NONE:
        v_scales = np.ones_like(v_scales)
    before = [buffer.copy() for buffer in case.buffers]
    assert lib.kvx_write_kv(case.cache(), write, None) == abi.Status.OK
    got = [buffer.copy() for buffer in case.buffers]
    for buffer, old in zip(case.buffers, before, strict=True):
        buffer.all[:] = old
    for side, rows, dtype, scales in zip(
        (case.k, case.v), arrays, dtypes, (k_scales, v_scales), strict=True
    ):
        model.write(side, rows, dtype, slots=indices, invalid=invalid, scales=scales)
    for buffer, new in zip(case.buffers, got, strict=True):
        np.testing.assert_array_equal(new, buffer.all)
    assert k_memory is not v_memory


def make_table(case: Case, lengths: np.ndarray) -> tuple[abi.BlockTable, list[Any], list[Any]]:
    """Return a table, the block of each token by sequence, and what must stay alive."""
    seqs = len(lengths)
    most = max(-(-int(lengths.max()) // case.block_size), 1) + case.draw(0, 1)
    if case.pick(True, False):
        ids = case.rng.integers(0, case.blocks, (seqs, most))
        used = [ids[s][np.arange(n) // case.block_size] for s, n in enumerate(lengths)]
        for s, n in enumerate(lengths):  # entries behind a length are not read
            ids[s, -(-int(n) // case.block_size) :] = case.pick(-1, 10**6)
        array, dtype = case.integers(ids)
        table = abi.BlockTable(abi.BlockTableFormat.PACKED, dtype, 0, seqs, 1, most)
        table.indices, table.indices_count = array.ctypes.data, array.size
        return table, used, [array]
    gaps = lengths + case.rng.integers(0, 2, seqs)
    starts = np.concatenate([[0], np.cumsum(gaps)])
    array, dtype = case.integers(case.rng.integers(0, case.blocks, starts[-1]))
    indptr, indptr_dtype = case.integers(starts)
    table = abi.BlockTable(abi.BlockTableFormat.RAGGED, dtype, indptr_dtype, seqs, 1, most)
    table.indices, table.indices_count = array.ctypes.data, array.size
    table.indptr, table.indptr_count = indptr.ctypes.data, len(indptr)
    used = [array[starts[s] : starts[s] + n].astype(np.int64) for s, n in enumerate(lengths)]
    return table, used, [array, indptr]


def run_gather(case: Case, lib: Any) -> None:
    seqs, most = case.draw(1, 3), case.draw(1, 3 * case.block_size)
    lengths = case.rng.integers(0, most + 3, seqs)
    table, used, alive = make_table(case, lengths)
    dtypes = tuple(case.io_dtype(side, gathers=True) for side in (case.k, case.v))
    io, arrays = case.io(seqs * most, dtypes)
    if case.pick(True, False):
        shape = (seqs, most, case.heads, case.dim)
        io.key, io.value = (
            adapters.tensor(x.reshape(shape), dtype=DTYPES[d])
            for x, d in zip(arrays, dtypes, strict=True)
        )
    lens, len_dtype = case.integers(lengths)
    gather = abi.GatherDesc(io, table, abi.SeqLens(len_dtype, seqs, lens.ctypes.data), most)
    before = [buffer.copy() for buffer in case.buffers]
    assert lib.kvx_gather_kv(case.cache(), gather, None) == abi.Status.OK
    got = [buffer.copy() for buffer in case.buffers]
    for buffer, old in zip(case.buffers, before, strict=True):
        buffer.all[:] = old
    for side, rows, dtype in zip((case.k, case.v), arrays, dtypes, strict=True):
        view = rows.reshape(seqs, most, case.heads, case.dim)
        blocks = [of_seq[:most] for of_seq in used]
        model.gather(side, view, dtype, blocks=blocks, block_size=case.block_size)
    for buffer, new in zip(case.buffers, got, strict=True):
        np.testing.assert_array_equal(new, buffer.all)
    assert alive


@pytest.mark.parametrize("first", range(0, NUM_CASES, CASES_PER_TEST))
def test_random_cases_equal_the_model(first: int) -> None:
    lib = library()
    with np.errstate(all="ignore"):
        for seed in range(first, first + CASES_PER_TEST):
            case = Case(seed)
            (run_write if seed % 2 else run_gather)(case, lib)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_lie_where_torch_finds_them(layout: str) -> None:
    axes = (0, 1, 2, 3) if layout == "NHD" else (0, 2, 1, 3)
    k = torch.zeros([(4, 8, 2, 16)[axis] for axis in axes], dtype=torch.bfloat16).permute(*axes)
    v = torch.zeros_like(k)
    key, value = torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    slots = torch.tensor([3, 31, -1, 8, 0])
    write = adapters.write(adapters.rows(key, value), adapters.vllm_slots(slots))
    assert library().kvx_write_kv(adapters.vllm_cache(k, v), write, None) == abi.Status.OK
    kept = slots >= 0
    wanted = torch.zeros_like(k)
    wanted[slots[kept] // 8, slots[kept] % 8] = key[kept].bfloat16()
    assert torch.equal(k, wanted)
    assert torch.equal(v[slots[kept] // 8, slots[kept] % 8], value[kept].bfloat16())
