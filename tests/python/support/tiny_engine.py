"""A C++ engine with a tiny random model."""

from __future__ import annotations

from typing import Any

import numpy as np

from lmdeploy import _turbomind as tm

VOCAB = 64


def model_config() -> Any:
    config = tm.ModelConfig()
    config.num_layers = 2
    config.hidden_size = 64
    config.intermediate_size = 96
    config.num_heads = 2
    config.num_kv_heads = 1
    config.head_dim = 64
    config.vocab_size = VOCAB
    config.max_position = 1024
    config.windows = [0, 24]
    config.dtype = "bfloat16"
    rope = tm.RopeConfig()
    rope.kind = "default"
    rope.dim = 64
    config.ropes = [rope]
    return config


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embedding": (VOCAB, 64), "final_norm": (64,)}
    for i in range(2):
        layer = {
            "attention_norm": (64,),
            "ffn_norm": (64,),
            "q": (128, 64),
            "k": (64, 64),
            "v": (64, 64),
            "o": (64, 128),
            "gate": (96, 64),
            "up": (96, 64),
            "down": (64, 96),
        }
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return found


def build_weights(device: Any, leave_out: str = "") -> Any:
    rng = np.random.default_rng(3)
    builder = tm.WeightsBuilder(model_config(), device, True)
    for name, shape in shapes().items():
        values = (0.3 * rng.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)
        if name == leave_out:
            continue
        if len(shape) == 1:
            builder.add_vector(name, values)
        else:
            builder.add_matrix(name, "f32", values, *shape)
    return builder.build()


def make_engine(mode: str = "nvfp4", *, num_draft_tokens: int = 0) -> Any:
    config = tm.EngineConfig()
    config.num_draft_tokens = num_draft_tokens
    config.kv_format = mode
    config.max_batch_size = 4
    config.session_len = 256
    config.max_prefill_token_num = 64
    config.cache_block_seq_len = 16
    config.check_integrity = True
    device = tm.make_cpu_device(1)
    return tm.Engine(model_config(), config, build_weights(device), device, 64 << 20)


def make_request(request_id: int, prompt: list[int], max_new_tokens: int = 8) -> Any:
    request = tm.Request()
    request.id = request_id
    request.prompt = prompt
    request.max_new_tokens = max_new_tokens
    return request


def collect(engine: Any) -> list[Any]:
    """Return all outputs of one request."""
    outputs: list[Any] = []
    while not outputs or outputs[-1].finish_reason == "none":
        pieces = engine.wait_outputs(10_000)
        assert pieces, "no output within 10 s"
        outputs += pieces
    return outputs
