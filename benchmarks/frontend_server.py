"""The HTTP server with an engine that costs nothing, for bench_frontend.py.

    python benchmarks/frontend_server.py --streams 256 --interval 0.0064 PORT

The engine begins when `--streams` requests run. Then it makes one token per request every
`--interval` seconds, also while the outputs are not taken, as a GPU would.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from random_tokenizer import RandomTokenizer

from lmdeploy._turbomind import EngineStats, MemoryPlan, Request, RequestOutput
from lmdeploy.chat.formats.base import ModelInfo
from lmdeploy.chat.formats.registry import choose_format
from lmdeploy.chat.templates.jinja_template import ChatTemplate, start_renderer
from lmdeploy.chat.templates.prompt_template import PromptTemplate
from lmdeploy.chat.tokenizer import Tokenizer
from lmdeploy.config.kv_format_options import FormatPair
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.engine.core import RunningCore, StartedCore
from lmdeploy.engine.kv_quality import KvOptions
from lmdeploy.engine.load import TextModel
from lmdeploy.kv_store.traffic import NoPrefixCache
from lmdeploy.serve.app import make_app
from lmdeploy.serve.server import GracefulServer, bind, listen, make_settings
from lmdeploy.serve.state import ServerOptions

MODEL_NAME = "measured"
VOCAB_SIZE = 32_000
SESSION_LEN = 65_536
FIRST_WORD_ID = 2_000  # in the random tokenizer: " w" and a number
NUM_WORDS = 16


class FreeCore(NoPrefixCache):
    """Makes one token per request and step, from outputs that were built before.

    streams: the first step waits for this number of requests.
    interval: seconds per step.
    fresh: build each output anew, so that outputs that wait take the memory that they would take.
    """

    healthy = True
    failure = ""

    def __init__(self, *, streams: int, interval: float, fresh: bool) -> None:
        self._streams, self._interval, self._fresh = streams, interval, fresh
        self._changed = threading.Condition()
        self._running: dict[int, _Running] = {}
        self._ready: list[RequestOutput] = []
        self._begun: float | None = None
        self._num_steps = 0

    def submit(self, request: Request) -> None:
        with self._changed:
            self._running[request.id] = _Running(request)
            if self._begun is None and len(self._running) >= self._streams:
                self._begun, self._num_steps = time.monotonic(), 0
            self._changed.notify()

    def cancel(self, request_id: int) -> None:
        with self._changed:
            if self._running.pop(request_id, None) is not None:
                self._ready.append(_output(request_id, [], finish_reason="cancelled"))
            self._changed.notify()

    def wait_outputs(self, timeout_ms: int) -> list[RequestOutput]:
        with self._changed:
            if not self._running:
                self._begun = None
            if self._begun is None and not self._ready:
                self._changed.wait(timeout_ms / 1000)
            outputs, self._ready = self._ready, []
            if self._begun is None:
                return outputs
        due = self._begun + (self._num_steps + 1) * self._interval
        delay = due - time.monotonic()
        if delay > 0:
            time.sleep(delay)
        with self._changed:
            late = time.monotonic() - self._begun
            wanted = max(int(late / self._interval), self._num_steps + 1)
            for _ in range(wanted - self._num_steps):
                outputs += self._step()
            self._num_steps = wanted
        return outputs

    def _step(self) -> list[RequestOutput]:
        outputs = [running.next(self._fresh) for running in self._running.values()]
        for request_id in [i for i, running in self._running.items() if running.left == 0]:
            del self._running[request_id]
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats.from_dict({"num_running": len(self._running), "blocks_total": 1})

    def memory_plan(self) -> MemoryPlan:
        sizes = {"max_tokens": SESSION_LEN, "max_sequence_tokens": SESSION_LEN, "num_blocks": 1}
        return MemoryPlan.from_dict(sizes)

    def close(self) -> None:
        pass


class _Running:
    """The outputs of one request."""

    def __init__(self, request: Request) -> None:
        self.left = request.max_new_tokens
        self._id = request.id
        self._built = [_output(self._id, [FIRST_WORD_ID + i]) for i in range(NUM_WORDS)]
        last = [FIRST_WORD_ID + (self.left - 1) % NUM_WORDS]
        self._last = _output(self._id, last, finish_reason="length")
        self._count = 0

    def next(self, fresh: bool) -> RequestOutput:
        self.left -= 1
        if self.left == 0:
            return self._last
        index = self._count % NUM_WORDS
        self._count += 1
        return _output(self._id, [FIRST_WORD_ID + index]) if fresh else self._built[index]


def _output(request_id: int, tokens: list[int], *, finish_reason: str = "none") -> RequestOutput:
    output = RequestOutput()
    output.request_id, output.tokens, output.finish_reason = request_id, tokens, finish_reason
    return output


def make_engine(core: Any) -> AsyncEngine:
    """Return an engine with the texts of a model and a core."""
    words = RandomTokenizer.of("", VOCAB_SIZE)
    tokenizer = Tokenizer(words.backend(), eos_ids=words.config_ids()["eos_token_id"])
    template = ChatTemplate(
        words.family["template"],
        origin="random",
        bos_token="",
        eos_token="",
        renderer=start_renderer(),
    )
    text = TextModel(
        tokenizer=tokenizer,
        chat_template=PromptTemplate(template),
        chat_format=choose_format(ModelInfo("", tokenizer)),
        vocab_size=VOCAB_SIZE,
        hidden_size=1,
        session_len=SESSION_LEN,
        eos_ids=tokenizer.eos_ids,
    )
    kv = KvOptions(
        layers=(FormatPair("none", "none"),),
        quality="balanced",
        rotation=False,
        scale_search=False,
        sink_tokens=0,
        recent_tokens=0,
    )
    return AsyncEngine(
        text,
        RunningCore(
            core,
            on_close=lambda: None,
            restart=lambda: StartedCore(core),
            kv=kv,
            block_tokens=64,
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal arrives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--streams", type=int, required=True)
    add("--interval", type=float, required=True)
    add("--fresh", action="store_true")
    add("port", type=int)
    args = parser.parse_args(arguments)
    core = FreeCore(streams=args.streams, interval=args.interval, fresh=args.fresh)
    engine = make_engine(core)
    options = ServerOptions(model_name=MODEL_NAME)
    app = make_app(engine, options)
    sock = bind("127.0.0.1", args.port)
    listen(sock, "127.0.0.1")
    GracefulServer(make_settings(app, options, tls=None), engine, grace=0).run(sockets=[sock])
    return 0


if __name__ == "__main__":
    sys.exit(main())
