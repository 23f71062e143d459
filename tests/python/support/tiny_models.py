"""Create tiny random checkpoints of every model family with transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB_SIZE = 304


@dataclass(frozen=True)
class TinyModel:
    """One checkpoint: an architecture and its differences from the common tiny config."""

    name: str
    architecture: str  # Llama, Mistral, Qwen2, Qwen3
    settings: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)
    config: str = ""  # prefix of the config's class; empty if it is the architecture

    def config_values(self) -> dict[str, Any]:
        """Return the keyword arguments of the transformers config."""
        return {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **self.rope},
            **self.settings,
        }


def make_model(tiny: TinyModel, seed: int = 0) -> Any:
    """Return the transformers model in FP32, with weights large enough that attention matters."""
    import torch
    import transformers

    config_class = getattr(transformers, f"{tiny.config or tiny.architecture}Config")
    model_class = getattr(transformers, f"{tiny.architecture}ForCausalLM")
    torch.manual_seed(seed)
    config = config_class(**tiny.config_values())
    config._attn_implementation = "eager"
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [
            (name, buffer)
            for name, buffer in model.named_buffers()
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar"))
        ]
        for name, tensor in [*model.named_parameters(), *biases]:
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name or name.endswith(("layer_scalar", "router.scale", "expert_scale")):
                tensor.copy_(1.0 + 0.2 * noise)
                if tiny.architecture == "Gemma4" and "q_norm" in name:
                    tensor *= tensor.numel() ** -0.5  # its softmax has no scale of its own
            elif name.endswith("bias"):
                tensor.copy_(0.5 * noise)
            elif name.endswith("sinks"):
                tensor.copy_(2.0 * noise)
            else:
                # These experts have the shape [experts, inputs, outputs].
                turned = tiny.architecture in ("GptOss", "Llama4") and tensor.ndim == 3
                inputs = tensor.shape[-2 if turned else -1]
                tensor.copy_(noise * (1.5 / inputs**0.5))
    return model


def save_model(model: Any, folder: Path, **options: Any) -> Path:
    """Write config, safetensors and a tokenizer; return the folder."""
    model.save_pretrained(folder, safe_serialization=True, **options)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<s>",
                "eos_token": "</s>",
                "chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
            }
        ),
        encoding="utf-8",
    )
    return folder


def byte_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer of VOCAB_SIZE ids: 3 special, 256 bytes, letter pairs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from lmdeploy.chat.tokenizer import byte_alphabet

    alphabet = sorted(byte_alphabet())
    tokens = ["<unk>", "<s>", "</s>", *alphabet]
    pairs = [(a, b) for a in "etaoinsr" for b in "thenrsio"][: VOCAB_SIZE - len(tokens)]
    tokens += [a + b for a, b in pairs]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    return backend


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# Every family, RoPE kind, window rule, head size and group size appears at least once.
TINY_MODELS = (
    TinyModel("llama", "Llama"),
    TinyModel(
        "llama-tied-mha-dim80",
        "Llama",
        {
            "tie_word_embeddings": True,
            "hidden_size": 80,
            "num_key_value_heads": 4,
            "head_dim": 80,
        },
    ),
    TinyModel("llama-bias", "Llama", {"attention_bias": True, "mlp_bias": True}),
    TinyModel("llama-linear", "Llama", rope={"rope_type": "linear", "factor": 3.0}),
    TinyModel(
        "llama-dynamic",
        "Llama",
        {"max_position_embeddings": 64},
        rope={"rope_type": "dynamic", "factor": 2.0},
    ),
    TinyModel("llama-llama3-dim128", "Llama", {"head_dim": 128}, rope=_LLAMA3),
    TinyModel("llama-yarn", "Llama", rope=_YARN),
    TinyModel(
        "llama-yarn-mscale-untruncated",
        "Llama",
        rope={**_YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False, "beta_fast": 16.0},
    ),
    TinyModel("mistral-window-mqa", "Mistral", {"sliding_window": 24, "num_key_value_heads": 1}),
    TinyModel("mistral-dim96", "Mistral", {"sliding_window": None, "head_dim": 96}),
    TinyModel("qwen2-tied", "Qwen2", {"tie_word_embeddings": True}),
    TinyModel(
        "qwen2-window-group3",
        "Qwen2",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "hidden_size": 96,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    TinyModel("qwen3-dim128", "Qwen3", {"head_dim": 128}),
    TinyModel(
        "qwen3-window-dim256-yarn",
        "Qwen3",
        {
            "head_dim": 256,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
        },
        rope={**_YARN, "attention_factor": 1.3},
    ),
)
