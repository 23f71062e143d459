"""The table of unsupported features of LMDeploy 0.18 and OpenAI's API.

Each name is accepted with the values that mean "not used" and rejected with every other value. If
the name is a field of an options class, the first value is its default.
"""

from __future__ import annotations

from enum import Flag, auto
from typing import Any


class Where(Flag):
    """The places where users can give a value."""

    ENGINE = auto()  # a field of TurbomindEngineConfig
    GENERATION = auto()  # a field of GenerationConfig
    FLAG = auto()  # a command-line flag with one value
    SWITCH = auto()  # a command-line flag without a value
    LIST = auto()  # a command-line flag with several values
    BODY = auto()  # a field in the body of every endpoint that generates
    CHAT = auto()  # a field in the body of /v1/chat/completions
    GENERATE = auto()  # a field in the body of /generate
    ABORT = auto()  # a field in the body of /abort_request


ENGINE, GENERATION = Where.ENGINE, Where.GENERATION
FLAG, SWITCH, LIST = Where.FLAG, Where.SWITCH, Where.LIST
BODY, CHAT, GENERATE, ABORT = Where.BODY, Where.CHAT, Where.GENERATE, Where.ABORT

UNSUPPORTED: dict[str, tuple[Where, tuple[Any, ...]]] = {
    "adapter_name": (BODY, ()),
    "adapters": (LIST, ()),
    "allow_terminate_by_client": (SWITCH, ()),
    "allowed_media_domains": (LIST, ()),
    "async_": (ENGINE | FLAG, (1,)),
    "attn_cp_size": (ENGINE, (None,)),
    "attn_dp_size": (ENGINE, (None,)),
    "attn_tp_size": (ENGINE, (None,)),
    "audio": (CHAT, ()),
    "backend": (FLAG, ("turbomind",)),
    "best_of": (BODY, (1,)),
    "block_size": (FLAG, (64,)),
    "cache_checkpoint_interval": (ENGINE, (4096,)),
    "cache_chunk_size": (ENGINE, (-1,)),
    "cache_generation": (ENGINE, ("auto",)),
    "cache_prompt": (ENGINE, ("auto",)),
    "cache_prompt_boundary_skip": (ENGINE, (1,)),
    "communicator": (ENGINE | FLAG, ("nccl",)),
    "cp": (ENGINE | FLAG, (1,)),
    "cudagraph_capture_batch_sizes": (LIST, ()),
    "device_num": (ENGINE, (None,)),
    "disable_vision_encoder": (SWITCH, ()),
    "dist_init_addr": (ENGINE | FLAG, (None,)),
    "distributed_executor_backend": (FLAG, ()),
    "dllm_block_length": (FLAG, ()),
    "dllm_confidence_threshold": (FLAG, (0.85,)),
    "dllm_denoising_steps": (FLAG, ()),
    "dllm_unmasking_strategy": (FLAG, ("low_confidence_dynamic",)),
    "do_preprocess": (CHAT, (True,)),
    "download_dir": (ENGINE | FLAG, (None,)),
    "dp": (ENGINE | FLAG, (1,)),
    "dp_rank": (FLAG, (0,)),
    "eager_mode": (SWITCH, ()),
    "empty_init": (ENGINE | SWITCH, (False,)),
    "enable_eplb": (SWITCH, ()),
    "enable_microbatch": (SWITCH, ()),
    "enable_return_routed_experts": (SWITCH, ()),
    "ep": (ENGINE | FLAG, (1,)),
    "function_call": (CHAT, ("none", "auto")),
    "functions": (CHAT, ([],)),
    "gemm_input_dtype": (ENGINE, (None,)),
    "generation_config": (FLAG, ("auto",)),
    "hf_overrides": (ENGINE | FLAG, (None,)),
    "image_data": (BODY, ()),
    "kernel_block_size": (FLAG, (-1,)),
    "kv_transfer_config": (FLAG, ()),
    "kwargs": (BODY, ({},)),
    "language_model_only": (ENGINE | SWITCH, (False,)),
    "logits_processors": (GENERATION, (None,)),
    "logprob_start_len": (GENERATION | GENERATE, (-1,)),
    "logprobs_mode": (FLAG, ()),
    "max_log_len": (FLAG, ()),
    "max_prefill_iters": (ENGINE | FLAG, (1,)),
    "media_io_kwargs": (BODY, ()),
    "metadata": (CHAT, ({},)),
    "migration_backend": (FLAG, ("DLSlime",)),
    "migration_request": (GENERATION, (None,)),
    "mlp_dp_size": (ENGINE, (None,)),
    "mlp_tp_size": (ENGINE, (None,)),
    "mm_processor_kwargs": (BODY, ()),
    "modalities": (CHAT, (["text"],)),
    "moe_a2a_backend": (ENGINE | FLAG, ("auto",)),
    "nnodes": (ENGINE | FLAG, (1,)),
    "node_rank": (ENGINE | FLAG, (0,)),
    "num_gpu_blocks": (FLAG, (0,)),
    "num_tokens_per_iter": (ENGINE | FLAG, (0,)),
    "outer_dp_size": (ENGINE, (None,)),
    "output_last_hidden_state": (GENERATION, (None,)),
    "piecewise_cudagraph_max_tokens": (FLAG, ()),
    "prediction": (CHAT, ()),
    "prefix_cache_decode_state_interval": (FLAG, (0,)),
    "prefix_cache_state_budget": (FLAG, (0,)),
    "preserve_cache": (GENERATION, (False,)),
    "proxy_url": (FLAG, ()),
    "repetition_ngram_size": (GENERATION | BODY, (0,)),
    "repetition_ngram_threshold": (GENERATION | BODY, (0,)),
    "return_logprob": (CHAT, (False,)),
    "return_ppl": (GENERATION, (False,)),
    "return_routed_experts": (GENERATION | BODY, (False,)),
    "revision": (ENGINE | FLAG, (None,)),
    "role": (FLAG, ("Hybrid",)),
    "rope_scaling_factor": (ENGINE | FLAG, (0.0,)),
    "service_tier": (CHAT, ("auto", "default")),
    "session_id": (BODY | ABORT, (-1,)),
    "speculative_algorithm": (FLAG, ()),
    "speculative_dflash_block_size": (FLAG, ()),
    "speculative_draft_model": (FLAG, ()),
    "speculative_num_draft_tokens": (FLAG, (1,)),
    "ssl": (SWITCH, ()),
    "store": (CHAT, (False,)),
    "suffix": (BODY, ("",)),
    "tp": (ENGINE | FLAG, (1,)),
    "trust_remote_code": (SWITCH, ()),
    "use_logn_attn": (ENGINE | SWITCH, (False,)),
    "verbosity": (CHAT, ("medium",)),
    "vision_max_batch_size": (FLAG, (1,)),
    "web_search_options": (CHAT, ()),
    "with_cache": (GENERATION, (False,)),
}
_NUM_VALUES: dict[Where, str | int] = {FLAG: 1, SWITCH: 0, LIST: "*"}


def unsupported_fields(place: Where) -> dict[str, Any]:
    """Return the fields of an options class and their defaults."""
    return {name: values[0] for name, (places, values) in UNSUPPORTED.items() if place in places}


def unsupported_body_fields(place: Where) -> dict[str, tuple[Any, ...]]:
    """Return the fields of a request body and their accepted values."""
    return {
        name: (None, *values) for name, (places, values) in UNSUPPORTED.items() if places & place
    }


def unsupported_flags() -> dict[str, tuple[str | int, tuple[str, ...]]]:
    """Return the command-line flags, as argparse's `nargs` and accepted values."""
    found = {}
    for name, (places, values) in UNSUPPORTED.items():
        for kind, count in _NUM_VALUES.items():
            if kind in places:
                texts = () if kind is SWITCH else _texts(values)
                found["--" + name.rstrip("_").replace("_", "-")] = (count, texts)
    return found


def _texts(values: tuple[Any, ...]) -> tuple[str, ...]:
    texts = [str(value) for value in values if value is not None]
    texts += [f"{value:g}" for value in values if isinstance(value, float)]
    return tuple(dict.fromkeys(texts))
