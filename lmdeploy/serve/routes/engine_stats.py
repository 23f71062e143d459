"""GET /v1/engine/stats: the KV cache, the prefix cache and the requests of the engine, as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lmdeploy.serve.errors import ApiError
from lmdeploy.serve.routes.base import ApiRouter, state_of
from lmdeploy.serve.routes.documentation import About
from lmdeploy.serve.state import ServerState

if TYPE_CHECKING:
    from lmdeploy import _turbomind

router = ApiRouter()


@router.on("/v1/engine/stats", "GET", about=About((404,)))
async def engine_stats(request: Request) -> Response:
    """Return the state of the KV cache and the engine's counters since its start."""
    state = state_of(request)
    if not state.enable_metrics:
        raise ApiError(404, "/v1/engine/stats is disabled by --disable-metrics.")
    stats = state.engine.stats()
    return JSONResponse(
        {
            "model": state.model_name,
            "healthy": state.engine.healthy,
            "requests": {
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "preemptions": stats.num_preemptions,
            },
            "tokens": {"prompt": stats.prompt_tokens, "generated": stats.generated_tokens},
            "prefix_cache": {
                "queried_tokens": stats.prefix_queried_tokens,
                "hit_tokens": stats.prefix_hit_tokens,
                "cut_tokens": stats.prefix_cut_tokens,
            },
            "kv_cache": _kv_cache(state, stats),
        }
    )


def _kv_cache(state: ServerState, stats: _turbomind.EngineStats) -> dict[str, Any]:
    """Return the format, the sizes and the blocks. `window16` is None without a window.

    `states` is None without recurrent layers.
    """
    engine = state.engine
    kv, plan = engine.running.kv, engine.memory_plan()
    window16 = None
    if kv.recent_tokens >= 0:
        window16 = {
            "format": kv.window,
            "sink_tokens": kv.sink_tokens,
            "recent_tokens": kv.recent_tokens,
            "blocks": _blocks(stats, "window16_blocks"),
        }
    states = None
    if plan.state_bytes_per_sequence:
        states = {
            "bytes_per_sequence": plan.state_bytes_per_sequence,
            "checkpoints_total": stats.checkpoints_total,
            "checkpoints_kept": stats.checkpoints_kept,
            "checkpoint_interval": plan.checkpoint_interval,
        }
    return {
        "format": kv.format,
        "quality": kv.quality_text,
        "block_tokens": engine.running.block_tokens,
        "blocks": _blocks(stats, "blocks"),
        "window16": window16,
        "states": states,
        "bytes_per_token": plan.bytes_per_token,
        "bytes_per_token_none": plan.bytes_per_token_none,
        "session_len": engine.text.session_len,
        "session_bytes": plan.session_bytes,
        "session_bytes_none": plan.session_bytes_none,
        "reserved_bytes": plan.reserved_bytes,
        "touched_bytes": plan.touched_bytes,
        "max_tokens": plan.max_tokens,
        "max_sequence_tokens": plan.max_sequence_tokens,
    }


def _blocks(stats: _turbomind.EngineStats, pool: str) -> dict[str, int]:
    parts = ("total", "active", "cached", "free")
    return {part: getattr(stats, f"{pool}_{part}") for part in parts}
