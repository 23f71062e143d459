"""Decode attention of FlashInfer: its fa2 kernel, and XQA, which is its fast one from SM 90 on.

`pip install flashinfer-python==0.7.4`. Both read pages of 64 tokens, in BF16, fp8 (E4M3) or, with
fa2, NVFP4. XQA takes sinks and windows.
"""

from __future__ import annotations

from typing import Any

from baselines import gpu
from baselines.gpu import Cell, Launch, Peer

PAGE_TOKENS = 64
WORKSPACE_BYTES = 256 << 20
VALUE_BYTES = {"none": 2.0, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16}


def kv_bytes(cell: Cell) -> int:
    """Return the bytes of K and V that a launch reads."""
    visible = min(cell["context"], cell["window"] or cell["context"])
    values = cell["batch"] * visible * 2 * cell["kv_heads"] * cell["head_dim"]
    return int(values * VALUE_BYTES[cell.format])


def make_cache(cell: Cell, layers: int) -> Any:
    """Return random pages [layers, pages, 2, heads, tokens, dim] in BF16, or in E4M3 for fp8."""
    import torch

    pages = cell["batch"] * pages_of(cell)
    size = (layers, pages, 2, cell["kv_heads"], PAGE_TOKENS, cell["head_dim"])
    cache = torch.empty(size, dtype=torch.bfloat16, device=gpu.DEVICE).normal_()
    return cache.to(torch.float8_e4m3fn) if cell.format == "fp8" else cache


def pages_of(cell: Cell) -> int:
    """Return the pages of a sequence."""
    return -(-cell["context"] // PAGE_TOKENS)


def make_query(cell: Cell) -> Any:
    """Return random queries [sequences, heads, dim]."""
    import torch

    size = (cell["batch"], cell["kv_heads"] * cell["group"], cell["head_dim"])
    return torch.randn(size, device=gpu.DEVICE, dtype=torch.bfloat16)


def make_fa2(cell: Cell, layers: int) -> Launch:
    """Return a launch of batch decode over pages, on tensor cores."""
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    heads, dim, batch, pages = cell["kv_heads"], cell["head_dim"], cell["batch"], pages_of(cell)
    scales: Any = None
    if cell.format == "nvfp4":
        size = (layers, batch * pages, 2, heads, PAGE_TOKENS)
        cache = torch.randint(0, 256, (*size, dim // 2), dtype=torch.uint8, device=gpu.DEVICE)
        scales = torch.ones((*size, dim // 16), device=gpu.DEVICE).to(torch.float8_e4m3fn)
    else:
        cache = make_cache(cell, layers)
    q = make_query(cell)
    out = torch.empty_like(q)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=gpu.DEVICE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=True, backend="fa2"
    )
    last_tokens = (cell["context"] - 1) % PAGE_TOKENS + 1
    wrapper.plan(
        torch.arange(0, batch + 1, dtype=torch.int32, device=gpu.DEVICE) * pages,
        torch.randperm(batch * pages, device=gpu.DEVICE).to(torch.int32),
        torch.full((batch,), last_tokens, dtype=torch.int32, device=gpu.DEVICE),
        heads * cell["group"],
        heads,
        dim,
        PAGE_TOKENS,
        window_left=cell["window"] - 1,
        q_data_type=torch.bfloat16,
        kv_data_type=cache.dtype,
    )

    def launch(layer: int) -> None:
        more = {} if scales is None else {"kv_cache_sf": scales[layer]}
        wrapper.run(q, cache[layer], out=out, **more)

    return launch


def make_xqa(cell: Cell, layers: int) -> Launch:
    """Return a launch of XQA over pages, with a window and sinks if the cell has them."""
    import torch
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    batch, pages = cell["batch"], pages_of(cell)
    cache, q = make_cache(cell, layers), make_query(cell)
    out = torch.empty_like(q)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=gpu.DEVICE)
    order = torch.randperm(batch * pages, device=gpu.DEVICE)
    tables = order.to(torch.int32).reshape(batch, pages)
    lengths = torch.full((batch,), cell["context"], device=gpu.DEVICE).to(torch.uint32)
    # XQA reads one value for each query head.
    sinks = torch.zeros(q.shape[1], device=gpu.DEVICE) if cell["sinks"] else None

    def launch(layer: int) -> None:
        xqa_batch_decode_with_kv_cache(
            q,
            cache[layer],
            workspace,
            tables,
            lengths,
            cell["context"],
            bmm1_scale=cell["head_dim"] ** -0.5,
            window_left=cell["window"] - 1,
            out=out,
            sinks=sinks,
            kv_layout="HND",
        )

    return launch


def _fa2_refusal(cell: Cell) -> str:
    if cell.format not in VALUE_BYTES or cell["k_offset"]:
        return "it has no such cache"
    return "its kernel takes no sinks" if cell["sinks"] else ""


def _xqa_refusal(cell: Cell) -> str:
    has_cache = cell.format in ("none", "fp8") and not cell["k_offset"]
    return "" if has_cache else "it has no such cache"


DISTRIBUTION = "flashinfer-python"
PEERS = (
    Peer("XQA", DISTRIBUTION, ("decode",), _xqa_refusal, kv_bytes, make_xqa),
    Peer("FlashInfer fa2", DISTRIBUTION, ("decode",), _fa2_refusal, kv_bytes, make_fa2),
)
