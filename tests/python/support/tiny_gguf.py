"""Write GGUF files of tiny models in the layout of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_tensors import SUPER_BLOCK_BYTES, RandomTensor
from tiny_models import byte_tokenizer

NVFP4_FACTOR = np.float32(0.7)

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gpt_oss": "gpt-oss",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face parameter."""
    if name in _NAMES:
        return _NAMES[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    inner, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[inner]}.{suffix}"


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from halves (i, i + d/2) to pairs.

    llama.cpp's converter stores q and k of Llama in this order.
    """
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def write_gguf(
    model: Any,
    path: Path,
    *,
    weight_format: str = "F32",
    extra: dict[str, Any] | None = None,
    freq_factors: np.ndarray | None = None,
    tensors_per_part: int = 0,
) -> dict[str, np.ndarray]:
    """Write the model and return the values that a reader must get, by Hugging Face name.

    Matrices in K-quants and NVFP4 are random and have the standard deviation of the model's. NVFP4
    has factors of its own.
    `tensors_per_part` above 0 writes several parts.
    """
    config = model.config
    writer, arch = start_gguf(model, path, extra=extra, tensors_per_part=tensors_per_part)
    if freq_factors is not None:
        writer.add_tensor("rope_freqs.weight", freq_factors.astype(np.float32))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    stored = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        num_heads = heads.get(name.split(".")[-2], 0) if arch == "llama" else 0
        stored[name] = _write(writer, name, values, weight_format, num_heads)
    finish_gguf(writer)
    return stored


def start_gguf(
    model: Any, path: Path, *, extra: dict[str, Any] | None = None, tensors_per_part: int = 0
) -> tuple[Any, str]:
    """Return a writer with the metadata of model and tokenizer, and the architecture's name."""
    import gguf

    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_part)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (extra or {}).items():
        writer.kv_data[0].pop(f"{arch}.{key}", None)
        add: dict[type, Any] = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        add[type(value)](f"{arch}.{key}", value)
    write_tokenizer(writer)
    return writer, arch


def finish_gguf(writer: Any) -> None:
    """Write everything that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write(
    writer: Any, name: str, values: np.ndarray, weight_format: str, num_heads: int
) -> np.ndarray:
    import gguf

    ordered = interleave(values, num_heads) if num_heads else values
    if values.ndim == 1 or weight_format == "F32":
        writer.add_tensor(gguf_name(name), ordered)
        return values
    kind = gguf.GGMLQuantizationType[weight_format]
    if weight_format in (*SUPER_BLOCK_BYTES, "NVFP4"):  # the package cannot quantize to them
        plain = random_rows(name, values, weight_format)
        raw = interleave(plain, num_heads) if num_heads else plain
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
        dequantized = gguf.quants.dequantize(plain, kind).reshape(values.shape)
        if weight_format != "NVFP4":
            return dequantized
        base = gguf_name(name).removesuffix("weight")
        writer.add_tensor(base + "scale", np.array([NVFP4_FACTOR]))
        writer.add_tensor(base + "input_scale", np.ones(1, np.float32))
        return dequantized * NVFP4_FACTOR
    raw = gguf.quants.quantize(np.ascontiguousarray(ordered), kind)
    writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
    # Quantization works on each row alone, so it does not depend on the row order.
    plain = gguf.quants.quantize(np.ascontiguousarray(values), kind)
    return gguf.quants.dequantize(plain, kind).reshape(values.shape)


def random_rows(name: str, values: np.ndarray, weight_format: str) -> np.ndarray:
    """Return random blocks [rows, bytes] with the shape and standard deviation of the values."""
    tensor = RandomTensor(name, values.shape, weight_format, float(values.std()))
    return np.concatenate(list(tensor.pieces(0))).reshape(len(values), -1)


def write_tokenizer(writer: Any) -> None:
    backend = byte_tokenizer()
    vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges([f"{token[0]} {token[1]}" for token in tokens[259:]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
