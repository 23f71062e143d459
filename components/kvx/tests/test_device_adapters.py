"""Tests of the adapters on arrays in the memory of a GPU, with the stand-in for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from build_folder import built
from device_arrays import DL_CUDA_MANAGED, CudaInterfaceArray, DlpackArray, Gpu, GpuArray
from test_adapters import BLOCKS, DIM, HEADS, LENGTHS, TABLE, caches, expected

from lmdeploy.kvx import KvxError, abi, adapters, arrays, check, library

PROTOCOLS = (CudaInterfaceArray, DlpackArray)
MOST = max(LENGTHS)
DLPACK_ROCM = 10


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    path = built("libturbomind_cuda_shim.so")
    monkeypatch.setenv("LMDEPLOY_CUDA_LIBRARY", str(path))
    yield Gpu(str(path))


def read(
    gpu: Gpu, protocol: type[GpuArray], *, cache: abi.CacheDesc, tables: adapters.Tables
) -> list[torch.Tensor]:
    """Return what a gather reads, [seqs, tokens, heads, head_dim]; -1 where there is no token."""
    shape = (tables.lengths.seq_count, MOST, HEADS, DIM)
    out = [protocol(gpu, torch.full(shape, -1.0)) for _ in range(2)]
    gather = adapters.gather(adapters.rows(*out), tables)
    check(library().kvx_gather_kv(cache, gather, None))
    return [array.cpu() for array in out]


def packed(gpu: Gpu, protocol: type[GpuArray]) -> adapters.Tables:
    tables = protocol(gpu, torch.tensor(TABLE, dtype=torch.int32))
    return adapters.tgi_tables(tables, protocol(gpu, torch.tensor(LENGTHS)))


def on_gpu(gpu: Gpu, protocol: type[GpuArray], *, form: str) -> tuple[Any, Any, abi.CacheDesc]:
    """Return K and V of a cache on the GPU, and their description."""
    key, value = (protocol(gpu, tensor) for tensor in caches()[form])
    return key, value, adapters.vllm_cache(key, value, dtype=abi.Dtype.BF16)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("form", ["NHD", "HND", "joined", "split"])
def test_gather_from_every_form_of_vllm_and_tgi(
    gpu: Gpu, protocol: type[GpuArray], form: str
) -> None:
    *alive, cache = on_gpu(gpu, protocol, form=form)
    assert cache.k.memory == cache.v.memory == abi.Memory.DEVICE
    got = read(gpu, protocol, cache=cache, tables=packed(gpu, protocol))
    for rows, found in zip(caches()["NHD"], got, strict=True):
        assert torch.equal(found, expected(rows))
    assert alive


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("form", ["NHD", "HND", "joined", "split"])
def test_slots_with_padding_write_like_vllm(gpu: Gpu, protocol: type[GpuArray], form: str) -> None:
    *alive, cache = on_gpu(gpu, protocol, form=form)
    k, v = torch.randn(4, HEADS, DIM), torch.randn(4, HEADS, DIM)
    rows = protocol(gpu, k), protocol(gpu, v)
    slots = protocol(gpu, torch.tensor([9, -1, 3, BLOCKS * 4]))  # the last one is outside
    write = adapters.write(adapters.rows(*rows), adapters.vllm_slots(slots))
    check(library().kvx_write_kv(cache, write, None))
    got = read(gpu, protocol, cache=cache, tables=packed(gpu, protocol))
    for old, new, found in zip(caches()["NHD"], (k, v), got, strict=True):
        changed = old.clone()
        changed[2, 1], changed[0, 3] = new[0].bfloat16(), new[2].bfloat16()
        assert torch.equal(found, expected(changed))
    assert alive


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_flat_tables_come_with_prefix_sums(gpu: Gpu, protocol: type[GpuArray]) -> None:
    key, value = (protocol(gpu, x.reshape(BLOCKS * 4, 1, HEADS, DIM)) for x in caches()["NHD"])
    cache = adapters.vllm_cache(key, value, dtype=abi.Dtype.BF16)
    flat = torch.tensor(
        [TABLE[s][t // 4] * 4 + t % 4 for s, n in enumerate(LENGTHS) for t in range(n)]
    )
    tables, lengths = protocol(gpu, flat), protocol(gpu, torch.tensor(LENGTHS))
    with pytest.raises(ValueError, match="indptr is None"):
        adapters.tgi_tables(tables, lengths)
    sums = torch.cumsum(torch.tensor((0, *LENGTHS)), 0)
    described = adapters.tgi_tables(tables, lengths, indptr=protocol(gpu, sums))
    got = read(gpu, protocol, cache=cache, tables=described)
    for rows, found in zip(caches()["NHD"], got, strict=True):
        assert torch.equal(found, expected(rows))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_offsets_of_tensorrt_llm(gpu: Gpu, protocol: type[GpuArray]) -> None:
    pools = [torch.randn(BLOCKS, 2, HEADS, 4, DIM).half() for _ in range(2)]
    offsets = torch.zeros(len(LENGTHS), 1, 2, 3, dtype=torch.int32)
    for seq, row in enumerate(TABLE):
        for i, block in enumerate(row):
            for side in (0, 1):
                index = 2 * max(block, 0) + side
                offsets[seq, 0, side, i] = index - (2**31 if seq % 2 else 0)
    memory = [protocol(gpu, pool) for pool in pools]
    cache = adapters.trtllm_cache(*memory, sizes=adapters.TrtllmSizes(4, HEADS, DIM))
    tables = adapters.trtllm_tables(
        protocol(gpu, offsets), protocol(gpu, torch.tensor(LENGTHS, dtype=torch.int32))
    )
    got = read(gpu, protocol, cache=cache, tables=tables)
    for side, found in enumerate(got):
        for seq, length in enumerate(LENGTHS):
            assert (found[seq, length:] == -1).all()
            for token in range(length):
                stored = pools[seq % 2][TABLE[seq][token // 4], side, :, token % 4]
                assert torch.equal(found[seq, token], stored.float())
    with pytest.raises(ValueError, match="secondary is HOST memory"):
        adapters.trtllm_cache(memory[0], pools[1], sizes=adapters.TrtllmSizes(4, HEADS, DIM))


def test_library_of_dlpack_gets_the_stream(gpu: Gpu) -> None:
    array = DlpackArray(gpu, torch.zeros(3))
    for stream in (None, 1, 77):
        arrays.read_array("x", array, stream=stream)
    assert array.streams == [1, 1, 77]


def test_managed_memory_is_unified(gpu: Gpu) -> None:
    array = DlpackArray(gpu, torch.zeros(3))
    array.device_type = DL_CUDA_MANAGED
    assert arrays.read_array("x", array).memory == abi.Memory.UNIFIED
    assert array.streams == [1]
    assert arrays.read_array("x", torch.zeros(3)).memory == abi.Memory.HOST


def test_stream_waits_for_that_of_the_cuda_array_interface(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[tuple[Any, Any]] = []

    def wait(stream: Any, other: Any) -> int:
        waits.append((stream, other))
        return int(library().kvx_tm_wait_stream(stream, other))

    class Library:
        kvx_tm_wait_stream = staticmethod(wait)

    monkeypatch.setattr(arrays, "library", Library)
    array = CudaInterfaceArray(gpu, torch.zeros(3))
    for theirs, ours in ((None, 5), (1, None), (1, 1), (5, 5), (1, 5), (2, None), (9, 5)):
        array.stream = theirs
        arrays.read_array("x", array, stream=ours)
    assert waits == [(5, 1), (None, 2), (5, 9)]


def test_protocol_of_dlpack_comes_first(gpu: Gpu) -> None:
    class Both(DlpackArray, CudaInterfaceArray):
        stream = 0  # refused

    array = Both(gpu, torch.zeros(3))
    assert arrays.read_array("x", array).dtype == abi.Dtype.F32
    assert array.streams == [1]


def test_tables_in_host_memory_are_refused(gpu: Gpu) -> None:
    *alive, cache = on_gpu(gpu, DlpackArray, form="NHD")
    tables = adapters.tgi_tables(torch.tensor(TABLE), torch.tensor(LENGTHS))
    with pytest.raises(KvxError, match="INVALID_ARGUMENT"):
        read(gpu, DlpackArray, cache=cache, tables=tables)
    shape = (len(LENGTHS), MOST, HEADS, DIM)
    gather = adapters.gather(
        adapters.rows(torch.zeros(shape), torch.zeros(shape)), packed(gpu, DlpackArray)
    )
    assert library().kvx_gather_kv(cache, gather, None) == abi.Status.UNSUPPORTED
    assert alive


BAD = [
    (CudaInterfaceArray, {"mask": 1}, {}, "has a mask"),
    (CudaInterfaceArray, {"typestr": ">f4"}, {}, "in the order of another machine"),
    (CudaInterfaceArray, {"typestr": "x9"}, {}, "has the unknown type 'x9'"),
    (CudaInterfaceArray, {"typestr": "<f8"}, {}, "has dtype float64. It must be one of"),
    (CudaInterfaceArray, {"stream": 0}, {}, "names the stream 0"),
    (CudaInterfaceArray, {"stream": "1"}, {}, "names the stream '1'"),
    (DlpackArray, {"device_type": DLPACK_ROCM}, {}, "in memory of the DLPack type 10"),
    (DlpackArray, {"lanes": 4}, {}, "DLPack tensor of vectors"),
    (DlpackArray, {"capsule_name": b"used_dltensor"}, {}, "no capsule named dltensor"),
    (DlpackArray, {}, {"dtype": abi.Dtype.F16}, "has elements of 4 bytes, but F16 has 2"),
]


@pytest.mark.parametrize(("protocol", "changes", "options", "message"), BAD)
def test_arrays_are_rejected(
    gpu: Gpu, protocol: Any, *, changes: Any, options: Any, message: str
) -> None:
    array = protocol(gpu, torch.zeros(3))
    for name, value in changes.items():
        setattr(array, name, value)
    with pytest.raises(ValueError, match=message):
        arrays.read_array("x", array, **options)


def test_strides_that_split_elements_are_rejected(gpu: Gpu) -> None:
    array = CudaInterfaceArray(gpu, torch.zeros(4, 4).t())
    array.item = 3
    with pytest.raises(ValueError, match="must be whole elements"):
        arrays.read_array("x", array)
