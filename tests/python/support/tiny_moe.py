"""Create tiny random models with experts: folders of transformers, MXFP4 folders, GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tiny_gguf import finish_gguf, gguf_name, interleave, start_gguf
from tiny_models import TinyModel, save_model

BLOCK = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

_GPT_OSS = {
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 1024,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
GPT_OSS = TinyModel(
    "gpt-oss-window-24",
    "GptOss",
    {**_GPT_OSS, "num_hidden_layers": 4, "sliding_window": 24},
    rope=_YARN,
)
MIXTRAL = TinyModel(
    "mixtral", "Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32}
)
QWEN2_MOE = TinyModel("qwen2-moe", "Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 80})
QWEN3_MOE = TinyModel(
    "qwen3-moe", "Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True, "moe_intermediate_size": 64}
)
# Every family, with windows, dense layers, and a router that is not normalized.
TINY_MOE_MODELS = (
    GPT_OSS,
    TinyModel(
        "gpt-oss-window-128",
        "GptOss",
        {
            **_GPT_OSS,
            "sliding_window": 128,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        rope=_YARN,
    ),
    MIXTRAL,
    TinyModel(
        "mixtral-window-top1",
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 30},
    ),
    QWEN2_MOE,
    TinyModel(
        "qwen2-moe-dense-layers",
        "Qwen2Moe",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": True,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    QWEN3_MOE,
    TinyModel(
        "qwen3-moe-dense-layer",
        "Qwen3Moe",
        {**_EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 128},
    ),
)


def quantize_mxfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize [.., n] to the nearest E2M1 codes [.., n] with E8M0 exponents [.., n / 32]."""
    blocks = np.ascontiguousarray(values, np.float32).reshape(*values.shape[:-1], -1, BLOCK)
    top = np.abs(blocks).max(axis=-1)
    exponents = np.where(top > 0, np.floor(np.log2(np.maximum(top, 1e-30))) - 2, 0) + 127
    scales = np.exp2(exponents - 127)[..., None]
    codes = np.abs(blocks[..., None] / scales[..., None] - E2M1).argmin(axis=-1)
    return codes.astype(np.uint8).reshape(values.shape), exponents.astype(np.uint8)


def dequantize_mxfp4(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return E2M1(code) * 2^(exponent - 127), the inverse of quantize_mxfp4."""
    scales = np.exp2(exponents.astype(np.float32) - 127)
    return np.asarray(E2M1[codes] * np.repeat(scales, BLOCK, axis=-1))


def split_blocks(codes: np.ndarray) -> np.ndarray:
    """Pack codes [.., n] into [.., n / 32, 16] as Hugging Face does: neighbors share a byte."""
    pairs = codes.reshape(*codes.shape[:-1], -1, BLOCK // 2, 2)
    return np.asarray(pairs[..., 0] | pairs[..., 1] << 4)


def gguf_blocks(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Pack [.., n] into [.., n / 32 * 17]: an exponent, then 16 bytes of values j and 16 + j."""
    halves = codes.reshape(*codes.shape[:-1], -1, 2, BLOCK // 2)
    packed = halves[..., 0, :] | halves[..., 1, :] << 4
    blocks = np.concatenate([exponents[..., None], packed], axis=-1)
    return blocks.reshape(*codes.shape[:-1], -1)


def round_experts(model: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Round GPT-OSS's experts to MXFP4 in place; return (codes, exponents) as [.., out, in]."""
    import torch

    quantized = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            rows = parameter.detach().numpy().swapaxes(1, 2)
            quantized[name] = quantize_mxfp4(rows)
            values = dequantize_mxfp4(*quantized[name]).swapaxes(1, 2)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(values.copy()))
    return quantized


def save_mxfp4(model: Any, folder: Path) -> Path:
    """Write a GPT-OSS model in its published layout; round its experts in place to MXFP4."""
    quantized = round_experts(model)
    save_model(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, (codes, exponents) in quantized.items():
        del tensors[name]
        tensors[f"{name}_blocks"] = split_blocks(codes)
        tensors[f"{name}_scales"] = exponents
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(
        folder,
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        },
    )
    return folder


def change_config(folder: Path, **values: Any) -> None:
    """Set keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_moe_gguf(
    model: Any,
    path: Path,
    *,
    expert_format: str = "F32",
    extra: dict[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Write the model as llama.cpp's converter does.

    Return the stored values of the experts by parameter name. `expert_format` is the format of the
    experts; all other tensors are F32.
    """
    config = model.config
    writer, arch = start_gguf(model, path, extra={**_metadata(config), **(extra or {})})
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    stored = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if ".experts." in name:
            turned = arch == "gpt-oss" and values.ndim == 3
            rows = values.swapaxes(1, 2) if turned else values
            got = _write_experts(writer, name, rows, expert_format, interleaved=arch == "gpt-oss")
            stored[name] = got.swapaxes(1, 2) if turned else got
            continue
        num_heads = heads.get(name.split(".")[-2], 0) if arch == "llama" else 0
        ordered = interleave(values, num_heads) if num_heads else values
        writer.add_tensor(_moe_name(name, arch), np.ascontiguousarray(ordered.squeeze()))
    finish_gguf(writer)
    return stored


def _metadata(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "expert_count": config.num_local_experts
        if hasattr(config, "num_local_experts")
        else config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
    }
    if config.model_type == "gpt_oss":
        rope = config.rope_parameters
        values |= {
            "expert_feed_forward_length": config.intermediate_size,
            "attention.sliding_window": config.sliding_window,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    elif config.model_type.startswith("qwen"):
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    if config.model_type == "qwen2_moe":
        values["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return values


def _moe_name(name: str, arch: str) -> str:
    for ours, theirs in {
        "self_attn.sinks": "attn_sinks.weight",
        "mlp.router.": "ffn_gate_inp.",
        "mlp.gate.": "ffn_gate_inp.",
        "mlp.shared_expert_gate.": "ffn_gate_inp_shexp.",
        "mlp.shared_expert.gate_proj.": "ffn_gate_shexp.",
        "mlp.shared_expert.up_proj.": "ffn_up_shexp.",
        "mlp.shared_expert.down_proj.": "ffn_down_shexp.",
    }.items():
        if ours in name:
            return name.replace("model.layers", "blk").replace(ours, theirs)
    if arch == "gpt-oss" and "post_attention_layernorm" in name:
        return gguf_name(name).replace("ffn_norm", "post_attention_norm")
    return gguf_name(name)


def _write_experts(
    writer: Any, name: str, values: np.ndarray, expert_format: str, *, interleaved: bool
) -> np.ndarray:
    """Write one parameter of all experts, [experts, out, in], or a bias [experts, out]."""
    base, kind = name.replace("model.layers", "blk").split(".mlp.experts.")
    suffix = "bias" if kind.endswith("_bias") else "weight"
    out = np.empty_like(values)
    if "down" in kind:
        parts = {"down": slice(None)}
    elif interleaved:
        parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    else:
        width = values.shape[1] // 2
        parts = {"gate": slice(0, width), "up": slice(width, None)}
    for part, rows in parts.items():
        tensor = f"{base}.ffn_{part}_exps.{suffix}"
        chosen = np.ascontiguousarray(values[:, rows])
        used = "F32" if suffix == "bias" else expert_format
        out[:, rows] = _write_format(writer, tensor, chosen, used)
    return out


def _write_format(writer: Any, tensor: str, values: np.ndarray, expert_format: str) -> np.ndarray:
    import gguf

    if expert_format == "F32":
        writer.add_tensor(tensor, values)
        return values
    kind = gguf.GGMLQuantizationType[expert_format]
    if expert_format == "MXFP4":
        codes, exponents = quantize_mxfp4(values)
        writer.add_tensor(tensor, gguf_blocks(codes, exponents), raw_dtype=kind)
        return dequantize_mxfp4(codes, exponents)
    raw = gguf.quants.quantize(values, kind)
    writer.add_tensor(tensor, raw, raw_dtype=kind)
    result: np.ndarray = gguf.quants.dequantize(raw, kind)
    return result.reshape(values.shape)
