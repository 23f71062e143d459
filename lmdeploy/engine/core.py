"""④ The core, which turns token ids into token ids, and what belongs to a running one.

The C++ engine is one. Replicas of it and the fake of the tests stand in its place. All of them take
and return the messages of `_turbomind`, whose fields the bindings define.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lmdeploy.kv_store.traffic import PrefixCache

if TYPE_CHECKING:
    from lmdeploy._turbomind import EngineStats, MemoryPlan, Request, RequestOutput
    from lmdeploy.engine.kv_quality import KvOptions
    from lmdeploy.kv_store.events import KvEventPublisher
    from lmdeploy.kv_store.traffic import PrefixTraffic


class EngineCore(PrefixCache, Protocol):
    """Computes requests. Any thread may call it, but one thread takes the outputs.

    Invariants:
        1. The outputs of a request arrive in order. Exactly the last one has a finish reason.
        2. Every request that `submit` takes gets its last output, unless the core fails or closes.
    """

    @property
    def healthy(self) -> bool:
        """Return whether the core has not failed."""

    @property
    def failure(self) -> str:
        """Return why the core has failed, or ""."""

    def submit(self, request: Request) -> None:
        """Start a request. Raise ValueError if it is wrong or its id is in use."""

    def cancel(self, request_id: int) -> None:
        """Cancel a request, which still gets a last output. An unknown id has no effect."""

    def wait_outputs(self, timeout_ms: int) -> list[RequestOutput]:
        """Return the outputs that have arrived. Wait up to `timeout_ms` if there are none."""

    def stats(self) -> EngineStats:
        """Return the counters."""

    def memory_plan(self) -> MemoryPlan:
        """Return what memory the core has reserved and uses."""

    def close(self) -> None:
        """Stop. Other calls then return, and requests that still run get no last output."""


# A step on a GPU takes at most seconds. One that takes this long never ends.
GPU_STEP_LIMIT_S = 120.0


class StartedCore(NamedTuple):
    """A core that has just been started. Call `on_close` before closing it."""

    core: EngineCore
    on_close: Callable[[], None] = lambda: None
    tuner_line: str = ""


@dataclass
class RunningCore:
    """A core, its KV cache, and what moves and reports the blocks of the cache.

    `restart` loads the weights again and starts another core after this one was closed.
    `cache_identity` returns what determines the bytes of a KV block. A step that lasts
    `step_limit_s` counts as a failure.
    """

    core: EngineCore
    on_close: Callable[[], None]
    restart: Callable[[], StartedCore]
    kv: KvOptions
    block_tokens: int
    device_line: str = ""
    tuner_line: str = ""  # empty if the device has no choices between kernels
    gemm_input_dtype: str = "int16"
    step_limit_s: float = math.inf
    cache_identity: Callable[[], dict[str, Any]] = dict
    traffic: PrefixTraffic | None = None  # None without a store
    events: KvEventPublisher | None = None  # None if events are not published
