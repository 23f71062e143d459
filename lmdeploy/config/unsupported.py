"""The flags and request fields of features that are not built, of LMDeploy 0.18 and other servers.

Each name is accepted with the values that mean "not used" and rejected with every other value. A
field that cannot change the answer has ANY: every value is accepted and ignored. Fields of the
options classes that are not built are declared there (`Option.unsupported`), with their flags.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Flag, auto
from typing import Any


class Where(Flag):
    """The places where users can give a value."""

    FLAG = auto()  # a command-line flag with one value
    SWITCH = auto()  # a command-line flag without a value
    LIST = auto()  # a command-line flag with several values
    BODY = auto()  # a field in the body of every endpoint that generates
    CHAT = auto()  # a field in the body of /v1/chat/completions
    GENERATE = auto()  # a field in the body of /generate
    EMBEDDING = auto()  # a field in the body of /v1/embeddings and /pooling
    RESPONSES = auto()  # a field in the bodies of /v1/responses and /v1/responses/input_tokens
    MESSAGES = auto()  # a field in the body of /v1/messages


FLAG, SWITCH, LIST = Where.FLAG, Where.SWITCH, Where.LIST
BODY, CHAT, GENERATE = Where.BODY, Where.CHAT, Where.GENERATE
EMBEDDING, RESPONSES, MESSAGES = Where.EMBEDDING, Where.RESPONSES, Where.MESSAGES
ANY: tuple[Any, ...] = ("any value",)

UNSUPPORTED: dict[str, tuple[Where, tuple[Any, ...]]] = {
    "adapter_name": (BODY, ()),
    "adapters": (LIST, ()),
    "add_special_tokens": (CHAT, (False,)),
    "allowed_media_domains": (LIST, ()),
    "allowed_token_ids": (BODY, ([],)),
    "audio": (CHAT, ()),
    "audio_data": (BODY, ()),
    "backend": (FLAG, ("turbomind",)),
    "best_of": (BODY, (1,)),
    "block_size": (FLAG, (64,)),
    "bootstrap_host": (BODY, ()),
    "bootstrap_port": (BODY, ()),
    "bootstrap_room": (BODY, ()),
    "chat_template": (BODY, ()),
    "compaction": (MESSAGES, ()),
    "conversation": (RESPONSES, ()),
    "cudagraph_capture_batch_sizes": (LIST, ()),
    "custom_labels": (BODY, ANY),
    "custom_logit_processor": (BODY, ()),
    "custom_params": (BODY, ({},)),
    "data_parallel_rank": (BODY, ANY),
    "distributed_executor_backend": (FLAG, ()),
    "dllm_block_length": (FLAG, ()),
    "dllm_confidence_threshold": (FLAG, (0.85,)),
    "dllm_denoising_steps": (FLAG, ()),
    "dllm_unmasking_strategy": (FLAG, ("low_confidence_dynamic",)),
    "do_preprocess": (CHAT, (True,)),
    "documents": (BODY, ([],)),
    "dp_rank": (FLAG, (0,)),
    "ebnf": (BODY, ()),
    "ec_transfer_params": (BODY, ()),
    "echo": (CHAT | GENERATE, (False,)),
    "enable_eplb": (SWITCH, ()),
    "enable_microbatch": (SWITCH, ()),
    "enable_return_routed_experts": (SWITCH, ()),
    "extra_key": (BODY, ()),
    "function_call": (CHAT, ("none", "auto")),
    "functions": (CHAT, ([],)),
    "guided_choice": (BODY, ()),
    "guided_decoding_backend": (BODY, ()),
    "guided_grammar": (BODY, ()),
    "guided_json": (BODY, ()),
    "guided_regex": (BODY, ()),
    "guided_whitespace_pattern": (BODY, ()),
    "image_data": (BODY, ()),
    "include_reasoning": (BODY, (True,)),
    "input_embeds": (BODY, ()),
    "json_schema": (BODY, ()),
    "kernel_block_size": (FLAG, (-1,)),
    "kv_transfer_config": (FLAG, ()),
    "kv_transfer_params": (BODY, ()),
    "kwargs": (BODY, ANY),
    "length_penalty": (BODY, (1.0, 1)),
    "logits_processors": (BODY, ([],)),
    "logprobs_mode": (FLAG, ()),
    "lora_id": (BODY, ()),
    "lora_path": (BODY, ()),
    "media_io_kwargs": (BODY, ()),
    "metadata": (BODY, ANY),
    "mcp_servers": (MESSAGES, ([],)),
    "migration_backend": (FLAG, ("DLSlime",)),
    "mm_processor_kwargs": (BODY, ()),
    "model": (GENERATE, ANY),
    "modalities": (CHAT, (["text"],)),
    "no_stop_trim": (BODY, (False,)),
    "num_gpu_blocks": (FLAG, (0,)),
    "piecewise_cudagraph_max_tokens": (FLAG, ()),
    "prediction": (BODY, ANY),
    "prefix_cache_decode_state_interval": (FLAG, (0,)),
    "prefix_cache_state_budget": (FLAG, (0,)),
    "prompt": (RESPONSES, ()),
    "prompt_cache_key": (BODY, ANY),
    "prompt_cache_retention": (BODY, ANY),
    "prompt_embeds": (BODY, ()),
    "prompt_logprobs": (BODY, ()),
    "regex": (BODY, ()),
    "request_id": (BODY, ANY),
    "return_hidden_states": (BODY, (False,)),
    "return_prompt_text": (BODY, (False,)),
    "return_routed_experts": (BODY, (False,)),
    "return_tokens_as_token_ids": (BODY, (False,)),
    "rid": (BODY, ANY),
    "role": (FLAG, ("Hybrid",)),
    "safety_identifier": (BODY, ANY),
    "sampling_params": (BODY, ({},)),
    "sampling_seed": (BODY, ()),
    "separate_reasoning": (BODY, (True,)),
    "service_tier": (BODY, ANY),
    "session_params": (BODY, ({},)),
    "speculative_dflash_block_size": (FLAG, ()),
    "stop_regex": (BODY, ([],)),
    "store": (BODY, ANY),
    "stream_reasoning": (BODY, ANY),
    "structural_tag": (BODY, ()),
    "structured_outputs": (BODY, ()),
    "suffix": (BODY, ("",)),
    "thinking_token_budget": (BODY, ()),
    "thread": (MESSAGES, ()),
    "token_ids_logprob": (BODY, ()),
    "truncate_prompt_tokens": (BODY | EMBEDDING, ()),
    "truncation_side": (BODY, ()),
    "use_beam_search": (BODY, (False,)),
    "user": (BODY | EMBEDDING, ANY),
    "verbosity": (BODY, ANY),
    "video_data": (BODY, ()),
    "vision_max_batch_size": (FLAG, (1,)),
    "vllm_xargs": (BODY, ({},)),
    "web_search_options": (CHAT, ()),
}
_NUM_VALUES: dict[Where, str | int] = {FLAG: 1, SWITCH: 0, LIST: "*"}


def unsupported_body_fields(
    place: Where, *, built: Collection[str] = ()
) -> dict[str, tuple[Any, ...]]:
    """Return the fields of a request body, without `built`, and their accepted values, or ANY."""
    return {
        name: values if values is ANY else (None, *values)
        for name, (places, values) in UNSUPPORTED.items()
        if places & place and name not in built
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
