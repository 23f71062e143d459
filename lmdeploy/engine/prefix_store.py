"""④ Connect an engine with a store of KV blocks."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.option import options_of
from lmdeploy.config.weight_format_options import parse_weight_format

if TYPE_CHECKING:
    from lmdeploy._turbomind import ModelConfig, Request, RequestOutput
    from lmdeploy.engine.kv_quality import KvOptions
    from lmdeploy.engine.model_files import ModelFiles
    from lmdeploy.kv_store.events import KvEventPublisher
    from lmdeploy.kv_store.traffic import PrefixCache, PrefixTraffic

# The version of the bytes of a block (src/turbomind/kv/layout.h, codec.h). Raise it with them.
_LAYOUT_VERSION = 1
_MAX_VALUE_BYTES = 4  # of one value of K or V in any format, with its part of the scales


def identity_of_cache(
    model_path: str, config: TurbomindEngineConfig, *, files: ModelFiles, kv: KvOptions
) -> Callable[[], dict[str, Any]]:
    """Return a function that returns what determines the bytes of a KV block, as JSON values.

    The function reads a part of every tensor at its first call. It keeps no file open.
    """
    model = files.info.config
    # These choose the frequencies of all sequences by the session's length. Without a bias of K,
    # longrope chooses for each sequence, which has a salt for it.
    depends_on_length = any(
        rope.kind == "dynamic" or (rope.kind == "longrope" and model.k_bias) for rope in model.ropes
    )
    known: dict[str, Any] = {
        "layout": _LAYOUT_VERSION,
        "dtype": model.dtype,
        "block_tokens": config.cache_block_seq_len,
        "layers": [[pair.k, pair.v] for pair in kv.layers],
        "windows": list(model.windows),
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rotation": kv.rotation,
        "scale_search": kv.scale_search,
        "sink_tokens": kv.sink_tokens,
        "recent_tokens": kv.recent_tokens,
        "scales": None if kv.scales is None else [kv.scales.k, kv.scales.v],
        "weights": parse_weight_format(config.weight_format),
        "exact": config.exact,
        "overrides": json.dumps(config.hf_overrides, sort_keys=True, default=str),
        "rope_factor": float(config.rope_scaling_factor),
        "session_len": config.session_len if depends_on_length else None,
    }
    # The options above become something else for a model. Of the others, only those are stored that
    # are not the default, so that a new option does not change the identity of all stores.
    for option in options_of(TurbomindEngineConfig).values():
        value = getattr(config, option.name)
        if option.more.affects_kv == "value" and value != option.default:
            known[option.name] = value
    if model.latent.rope_dim:
        known["rotary_dim"] = model.latent.rope_dim
    sizes = model.layer_sizes
    if sizes.head_dims or sizes.kv_heads or sizes.kv_sources:
        known["heads"] = [list(sizes.head_dims), list(sizes.kv_heads), list(sizes.kv_sources)]
    if kv.k_offset:
        known["k_offset"] = "bias and mean" if model.k_bias else "mean"
    if model.k_bias and kv.k_offset:
        known["k_bias"] = "without fast pairs, 1"  # grows when the engine chooses other pairs
    if kv.window != "16bit":
        known["window"] = kv.window
    calibration = kv.calibration

    @functools.cache
    def identity() -> dict[str, Any]:
        from lmdeploy.checkpoint.fingerprint import hash_model

        constants = None
        if calibration is not None:
            constants = hashlib.sha256(calibration.read_bytes()).hexdigest()
        return {**known, "model": hash_model(model_path), "calibration": constants}

    return identity


def open_publisher(config: TurbomindEngineConfig) -> KvEventPublisher | None:
    """Open the sockets of KV events. Return None if the options ask for none."""
    if config.kv_events is None:
        return None
    from lmdeploy.kv_store.events import KvEventPublisher

    return KvEventPublisher(config.kv_events, block_tokens=config.cache_block_seq_len)


def open_traffic(
    config: TurbomindEngineConfig,
    identity: Callable[[], dict[str, Any]],
    *,
    kv: KvOptions,
    model: ModelConfig,
) -> PrefixTraffic | None:
    """Open the store of the options. Return None if there is none.

    Raise ValueError for a wrong address or key.
    """
    if config.kv_store is None:
        return None
    from lmdeploy.kv_store.address import open_store
    from lmdeploy.kv_store.keys import BlockKeys, read_secret
    from lmdeploy.kv_store.traffic import PrefixTraffic

    store = open_store(config.kv_store)
    secret = read_secret(config.kv_store_key, beside=store.folder)
    block_tokens = config.cache_block_seq_len
    # K and V of a layer and, while the block is recent, their copies in the window. A checkpoint of
    # recurrent layers may come on top.
    values_per_token = 4 * sum(model.kv_size(layer) for layer in range(model.num_layers))
    kv_bytes = block_tokens * values_per_token * _MAX_VALUE_BYTES
    return PrefixTraffic(
        store,
        BlockKeys(secret, identity(), block_tokens=block_tokens),
        block_tokens=block_tokens,
        max_block_bytes=kv_bytes + model.state_bytes(),
        late_blocks=max(kv.recent_tokens, 0) // block_tokens + 2,
    )


@dataclass
class _Prefix:
    """The tokens of one request, the generated ones included."""

    tokens: list[int]
    salt: bytes
    since: float = field(default_factory=time.monotonic)
    has_begun: bool = False


class PrefixRecorder:
    """Follows requests, and offers their prefixes to the store when they end.

    `begin` is called before a request is submitted, and `output` by the thread that takes outputs.
    """

    def __init__(self, traffic: PrefixTraffic) -> None:
        self.traffic = traffic
        self._prefixes: dict[int, _Prefix] = {}

    def begin(self, request: Request, cache: PrefixCache) -> None:
        """Copy blocks of the prompt from the store to the cache. This may wait for the store."""
        prompt = list(request.prompt)
        if request.num_prompt_logprobs < 0 and request.pooling != "mean":
            self.traffic.fetch(cache, prompt, salt=request.cache_salt)
        self._prefixes[request.id] = _Prefix(prompt, request.cache_salt)

    def output(self, output: RequestOutput, cache: PrefixCache) -> None:
        """Take one output of the core."""
        prefix = self._prefixes.get(output.request_id)
        if prefix is None:
            return
        if not prefix.has_begun and output.tokens:
            prefix.has_begun = True
            computed = len(prefix.tokens) - output.cached_tokens
            self.traffic.note_prompt(computed, time.monotonic() - prefix.since)
        prefix.tokens += output.tokens
        if output.finish_reason != "none":
            del self._prefixes[output.request_id]
            self.traffic.offer(cache, prefix.tokens, salt=prefix.salt)

    def drop(self, request_id: int) -> None:
        """Forget a request that was not submitted."""
        self._prefixes.pop(request_id, None)
