"""Measure what FP8 weights and activations cost, by an emulation of the kernels.

    python scripts/eval_fp8.py smollm2 TEXT --tokens 1024

transformers computes the model in FP32. The matrices of its layers are rounded to E4M3 with a scale
for the matrix, for each output, or for each block of 128 x 128. Their inputs are rounded as the
kernels do:

    w8      not at all
    q8_0    not at all, but weights are rounded to Q8_0, as on a CPU
    w8a16   to BF16
    w8a8    to E4M3 with a scale for each token, or for each 128 inputs of a token (blocks)

The table has the KL divergence and the top-1 agreement with the model before its rounding. Sums are
FP32, so the order of a GPU's sums is not emulated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from eval_ppl import positive

from lmdeploy.checkpoint.convert import matrix_for_engine, vector_for_engine
from lmdeploy.checkpoint.files.values import values_of_rows
from lmdeploy.checkpoint.gguf_blocks import values_to_q8_0
from lmdeploy.checkpoint.hub import resolve_model
from lmdeploy.checkpoint.open import open_checkpoint
from lmdeploy.checkpoint.tensor_plan import PlannedTensor
from lmdeploy.engine.model_files import open_files
from lmdeploy.lite.divergence import read_text

Tensor: TypeAlias = Any  # torch has no types here
BLOCK = 128
LARGEST = 448.0  # of E4M3
FORMS = ("tensor", "channel", "block")
MODES = ("w8", "q8_0", "w8a16", "w8a8")


def to_e4m3(values: Tensor, scales: Tensor) -> Tensor:
    """Return values rounded to E4M3 codes times scales, which must broadcast to them."""
    codes = (values / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.float() * scales


def largest(values: Tensor, *, rows: int, cols: int) -> Tensor:
    """Return the largest magnitude of each block of rows x cols, repeated over its values."""
    height, width = values.shape
    padded = torch.nn.functional.pad(values.abs(), (0, -width % cols, 0, -height % rows))
    blocks = padded.reshape(padded.shape[0] // rows, rows, -1, cols).amax((1, 3))
    whole = blocks.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    return whole[:height, :width].clamp_min(1e-30)


def quantize_weight(weight: Tensor, form: str) -> Tensor:
    """Return an FP8 matrix [outputs, inputs] with scales of a form in FORMS."""
    outputs, inputs = weight.shape
    shapes = {"tensor": (outputs, inputs), "channel": (1, inputs), "block": (BLOCK, BLOCK)}
    rows, cols = shapes[form]
    return to_e4m3(weight, largest(weight, rows=rows, cols=cols) / LARGEST)


def quantize_rows(x: Tensor, form: str) -> Tensor:
    """Return activations [..., inputs] with a scale for each token, or each 128 of its inputs."""
    rows = x.reshape(-1, x.shape[-1])
    cols = BLOCK if form == "block" else rows.shape[1]
    return to_e4m3(rows, largest(rows, rows=1, cols=cols) / LARGEST).reshape(x.shape)


def to_q8_0(weight: Tensor) -> Tensor:
    """Return a matrix rounded to Q8_0."""
    blocks = values_to_q8_0(weight.numpy())
    return torch.from_numpy(values_of_rows("Q8_0", blocks.view(np.uint8)).copy())


def rounding_of(mode: str, form: str) -> Callable[[Tensor], Tensor] | None:
    """Return the function that rounds activations, or None."""
    if mode == "w8a16":
        return lambda x: x.bfloat16().float()
    return (lambda x: quantize_rows(x, form)) if mode == "w8a8" else None


@contextmanager
def rounded(layers: Sequence[Any], weights: Sequence[Tensor], *, rounding: Any) -> Iterator[None]:
    """Give linear layers other weights and rounded inputs, until the end."""
    kept = [layer.weight.data for layer in layers]
    hooks = []
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data = weight
        if rounding is not None:
            hook = layer.register_forward_pre_hook(lambda _, args: (rounding(args[0]), *args[1:]))
            hooks.append(hook)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, weight in zip(layers, kept, strict=True):
            layer.weight.data = weight


def compare(model: Any, ids: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the KL divergence and the top-1 agreement by form and mode."""
    layers = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    tokens = torch.tensor([list(ids)])
    figures = {}
    with torch.no_grad():
        reference = torch.log_softmax(model(tokens).logits[0].double(), -1)
        for form in FORMS:
            weights = [quantize_weight(layer.weight.data, form) for layer in layers]
            for mode in MODES:
                ours = [to_q8_0(weight) for weight in weights] if mode == "q8_0" else weights
                with rounded(layers, ours, rounding=rounding_of(mode, form)):
                    found = torch.log_softmax(model(tokens).logits[0].double(), -1)
                divergence = (reference.exp() * (reference - found)).sum(-1).mean()
                agreement = (reference.argmax(-1) == found.argmax(-1)).double().mean()
                figures[f"{form}/{mode}"] = {"kl": float(divergence), "top_1": float(agreement)}
    return figures


# The names of a layer's tensors in transformers.
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
NAMES = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


def values_of(planned: PlannedTensor) -> Tensor:
    """Return the FP32 values of a tensor of the engine."""
    if planned.is_vector:
        return torch.from_numpy(vector_for_engine(planned.tensor).copy())
    heads = planned.interleaved_heads
    kind, values = matrix_for_engine(planned.tensor, exact=True, interleaved_heads=heads)
    shape = (planned.rows, planned.cols)
    floats = values_of_rows(kind.upper(), values.view(np.uint8)).reshape(shape)
    return torch.from_numpy(floats.copy())


def load(path: str) -> Any:
    """Return a Llama of transformers in FP32 with the weights that the engine reads.

    transformers itself reads GGUF files only with another package.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(resolve_model(path))
    config = checkpoint.config
    if checkpoint.family.name != "llama" or config.rope.kind != "default":
        raise ValueError(f"{path} is no Llama with plain RoPE. The emulation has only these.")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope.theta,
            tie_word_embeddings=config.tied_head,
        )
    )
    state = {}
    for planned in checkpoint.tensors:
        base, _, name = planned.name.rpartition(".")
        found = f"model.{base}.{LAYER_NAMES[name]}" if base else NAMES[planned.name]
        state[found + ".weight"] = values_of(planned)
    if config.tied_head:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.float().eval()


def read_ids(model: str, text: Path, *, tokens: int) -> list[int]:
    """Return the first tokens of the text, by the engine's tokenizer of the model."""
    tokenizer = open_files(model).read_texts().tokenizer
    return list(tokenizer.encode(read_text(text, flag="TEXT"), add_special=False)[:tokens])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="smollm2, or the folder or GGUF file of a Llama")
    parser.add_argument("text", type=Path, help="UTF-8 text file")
    parser.add_argument("--tokens", type=positive, default=512, help="of the text (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    try:
        ids = read_ids(options.model, options.text, tokens=options.tokens)
        figures = compare(load(options.model), ids)
    except (ValueError, OSError) as error:
        print(f"eval_fp8.py: {error}", file=sys.stderr)
        return 2
    print(f"{'scales/mode':<16} {'KL':>9} {'top 1':>8}")
    for label, row in figures.items():
        print(f"{label:<16} {row['kl']:>9.2e} {row['top_1']:>8.4f}")
    if options.json:
        facts = {"model": Path(options.model).name, "text": options.text.name, "tokens": len(ids)}
        document = json.dumps({**facts, "figures": figures}, indent=1)
        options.json.write_text(document + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
