"""Linear layers by cuBLAS, and attention of prompts by cuDNN and FlashAttention 2, all of torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from baselines import gpu
from baselines.gpu import Cell, Launch, Peer

BF16_BYTES = 2


def weight_bytes(cell: Cell) -> int:
    """Return the bytes of a BF16 matrix."""
    return cell["rows"] * cell["cols"] * BF16_BYTES


def make_linear(cell: Cell, layers: int) -> Launch:
    """Return a launch of x · weightsᵀ."""
    import torch

    shape = (layers, cell["rows"], cell["cols"])
    weights = torch.empty(shape, dtype=torch.bfloat16, device=gpu.DEVICE).normal_()
    x = torch.randn((cell["batch"], cell["cols"]), device=gpu.DEVICE).to(torch.bfloat16)
    out = x.new_empty((cell["batch"], cell["rows"]))
    return lambda layer: torch.mm(x, weights[layer].t(), out=out)


def prompt_bytes(cell: Cell) -> int:
    """Return the bytes of K and V of a prompt."""
    values = cell["batch"] * cell["context"] * 2 * cell["kv_heads"] * cell["head_dim"]
    return values * BF16_BYTES


def make_attention(cell: Cell, layers: int, *, backend: str) -> Launch:
    """Return a launch of causal attention, whose last query sees all keys."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    new, context, dim = cell["new_tokens"], cell["context"], cell["head_dim"]
    heads, batch = cell["kv_heads"], cell["batch"]
    size = (layers, 2, batch, heads, context, dim)
    kv = torch.empty(size, dtype=torch.bfloat16, device=gpu.DEVICE).normal_()
    q = torch.randn((batch, heads * cell["group"], new, dim), device=gpu.DEVICE).to(torch.bfloat16)
    mask: Any = None
    if new != context and backend == "FLASH_ATTENTION":
        mask = causal_lower_right(new, context)
    elif new != context:  # cuDNN of torch has no mask aligned to the last key
        hidden = torch.ones((new, context), device=gpu.DEVICE).tril(context - new) == 0
        mask = q.new_zeros((new, context)).masked_fill(hidden, float("-inf"))

    def launch(layer: int) -> Any:
        with sdpa_kernel([SDPBackend.__members__[backend]]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, *kv[layer], attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )

    return launch


def _linear_refusal(cell: Cell) -> str:
    return "" if cell.format == "bf16" else "it has no such weights"


def _attention_refusal(cell: Cell) -> str:
    return "" if cell.format == "none" else "it has no quantized cache"


PEERS = (
    Peer("cuBLAS", "torch", ("linear",), _linear_refusal, weight_bytes, make_linear),
    *(
        Peer(
            name,
            "torch",
            ("prefill",),
            _attention_refusal,
            prompt_bytes,
            partial(make_attention, backend=backend),
        )
        for name, backend in (("cuDNN", "CUDNN_ATTENTION"), ("FlashAttention 2", "FLASH_ATTENTION"))
    ),
)
