"""Fakes of the C++ engine and the tokenizer: tokens are bytes, and answers are scripted."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rendering import chat_template

from lmdeploy._turbomind import EngineStats, MemoryPlan, Request, RequestOutput
from lmdeploy.chat.formats.base import ModelInfo
from lmdeploy.chat.formats.harmony.tokens import HarmonyTokens
from lmdeploy.chat.formats.registry import choose_format
from lmdeploy.chat.templates.prompt_template import PromptTemplate
from lmdeploy.config.kv_format_options import FormatPair
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.engine.core import EngineCore, RunningCore, StartedCore
from lmdeploy.engine.kv_quality import KvOptions
from lmdeploy.engine.load import TextModel
from lmdeploy.kv_store.traffic import NoPrefixCache

if TYPE_CHECKING:
    from lmdeploy._turbomind import TokenLogprobs

EOS = 256
VOCAB_SIZE = 258
HIDDEN_SIZE = 4
BALANCED = KvOptions(
    layers=(FormatPair("nvfp4", "nvfp4"),),
    quality="balanced",
    rotation=True,
    scale_search=True,
    sink_tokens=64,
    recent_tokens=64,
)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


class FakeTextStream:
    def __init__(self, skip_special: bool, tokenizer: FakeTokenizer | None = None) -> None:
        import codecs

        self.num_open = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._skip_special = skip_special
        self._tokenizer = tokenizer or FakeTokenizer()

    @property
    def pending(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def push(self, token: int) -> str:
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def push_all(self, tokens: Sequence[int]) -> str:
        text = ""
        for token in tokens:
            text += self.push(token) if token < self._tokenizer.vocab_size else ""
            self.num_open = self.num_open + 1 if self.pending else 0
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class FakeTokenizer:
    vocab_size = 257
    max_token_bytes = 5
    stop_ids = (EOS,)
    bos_token = eos_token = ""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        first, *others = (list(part.encode("utf-8", "replace")) for part in text.split("<eos>"))
        return first + [i for part in others for i in (EOS, *part)]

    def close(self) -> None:
        pass

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        stream = self.stream(skip_special)
        return "".join(stream.push(i) for i in ids) + stream.finish()

    def stream(
        self,
        skip_special: bool = True,
        *,
        begins_text: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> FakeTextStream:
        return FakeTextStream(skip_special, self)

    def split_added(self, text: str) -> list[int | str]:
        return [text]

    def token_bytes(self, token: int) -> bytes:
        if token >= self.vocab_size:  # as in the real tokenizer
            raise ValueError(f"The token id is {token}. It must be 0 to {self.vocab_size - 1}.")
        return bytes([token]) if token < 256 else b"<eos>"

    def grammar_tokenizer(self, vocab_size: int) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer("byte", n_vocab=vocab_size)

    def is_special(self, token: int) -> bool:
        return token >= 256


HARMONY = ("return", "constrain", "channel", "start", "end", "message", "call")


class HarmonyTokenizer(FakeTokenizer):
    """A tokenizer with bytes, EOS and the special tokens of GPT-OSS's chat format as tokens."""

    names = tuple(f"<|{name}|>" for name in HARMONY)
    vocab_size = 257 + len(HARMONY)
    max_token_bytes = 13

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        pieces = re.split("(" + "|".join(map(re.escape, self.names)) + ")", text)
        return [
            i
            for piece in pieces
            for i in (
                [257 + self.names.index(piece)]
                if piece in self.names
                else piece.encode("utf-8", "replace")
            )
        ]

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        kept = [i for i in ids if i < 256 or not skip_special]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def split_added(self, text: str) -> list[int | str]:
        parts = re.split(r"(<\|(?:" + "|".join(HARMONY) + r")\|>)", text)
        ids = [self.token_id(part) for part in parts]
        pairs = zip(parts, ids, strict=True)
        return [part if token is None else token for part, token in pairs if part]

    def token_id(self, token: str) -> int | None:
        return 257 + self.names.index(token) if token in self.names else None

    def token_bytes(self, token: int) -> bytes:
        return self.names[token - 257].encode() if token > 256 else super().token_bytes(token)


@dataclass
class Running:
    """A request, the answer that its script gives, and the part of it that was returned."""

    request: Request
    script: list[int]
    tokens: list[int] = field(default_factory=list)


class FakeCore(NoPrefixCache):
    """Generates the tokens of `script(prompt text)`, one per step, then EOS."""

    clipped: tuple[tuple[int, int], ...] = ((0, 0), (128, 0))

    def __init__(
        self,
        script: Callable[[str], str],
        *,
        step_seconds: float,
        session_len: int,
        tokenizer: FakeTokenizer,
    ) -> None:
        self.script = script
        self.tokenizer = tokenizer
        self.tokens_per_step = 1
        self.cache_tokens = 640
        self.step_seconds = step_seconds
        self.permits: threading.Semaphore | None = None  # each step with outputs needs one
        self.session_len = session_len
        self.failure = ""
        self.closed = False
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self._running: dict[int, Running] = {}
        self._ready: list[RequestOutput] = []
        self._changed = threading.Condition()

    @property
    def healthy(self) -> bool:
        return not self.failure

    def submit(self, request: Request) -> None:
        with self._changed:
            known = [i for i in request.prompt if i < self.tokenizer.vocab_size]
            prompt = self.tokenizer.decode(known, skip_special=False)
            answer = [*self.tokenizer.encode(self.script(prompt)), EOS]
            self.requests.append(request)
            self._running[request.id] = Running(request, answer)
            self._changed.notify()

    def cancel(self, request_id: int) -> None:
        with self._changed:
            self.cancelled.append(request_id)
            if self._running.pop(request_id, None) is not None:
                self._ready.append(self._output(request_id, "cancelled"))
            self._changed.notify()

    def fail(self, reason: str) -> None:
        with self._changed:
            self.failure = reason
            self._running.clear()
            self._changed.notify()

    def wait_outputs(self, timeout_ms: int) -> list[RequestOutput]:
        with self._changed:
            if not self._running and not self._ready and self.healthy:
                self._changed.wait(timeout_ms / 1000)
            outputs, self._ready = self._ready, []
            outputs += [self._steps(running) for running in list(self._running.values())]
        if self.permits is not None and outputs:
            self.permits.acquire(timeout=5)
        elif self.step_seconds:
            time.sleep(self.step_seconds)
        return outputs

    def _steps(self, running: Running) -> RequestOutput:
        outputs = [self._step(running)]
        while len(outputs) < self.tokens_per_step and outputs[-1].finish_reason == "none":
            outputs.append(self._step(running))
        last = outputs[-1]
        last.tokens = [token for output in outputs for token in output.tokens]
        last.logprobs = [item for output in outputs for item in output.logprobs]
        last.prompt_logprobs = outputs[0].prompt_logprobs
        return last

    def _step(self, running: Running) -> RequestOutput:
        request, tokens = running.request, running.tokens
        prompt_logprobs = []
        if not tokens and request.num_prompt_logprobs >= 0:
            prompt_logprobs = [self._logprobs(t) for t in request.prompt[1:]]
        if request.max_new_tokens == 0:
            del self._running[request.id]
            pooled = None if request.pooling == "none" else self._pool(request)
            return self._output(
                request.id, "length", prompt_logprobs=prompt_logprobs, pooled=pooled
            )
        token = running.script[len(tokens) % len(running.script)]
        tokens.append(token)
        ends = [[i] for i in request.eos_ids] + request.stop_sequences
        stop = max((len(end) for end in ends if tokens[-len(end) :] == end), default=0)
        reason = "stop" if stop else "none"
        if not stop and len(tokens) >= request.max_new_tokens:
            reason = "length"
        if reason != "none":
            del self._running[request.id]
        return self._output(
            request.id,
            reason,
            tokens=[token],
            stop_tokens=stop,
            logprobs=[self._logprobs(token)] if request.num_logprobs >= 0 else [],
            prompt_logprobs=prompt_logprobs,
        )

    @staticmethod
    def _logprobs(token: int) -> TokenLogprobs:
        return -0.5, [(token, -0.5), ((token + 1) % 256, -1.5)]

    @staticmethod
    def _pool(request: Request) -> npt.NDArray[np.float32]:
        """Return HIDDEN_SIZE values that depend on the pooled tokens."""
        tokens = request.prompt[-1:] if request.pooling == "last" else request.prompt
        mean = sum(tokens) / len(tokens)
        return np.array([mean, 0.0, np.nan, 2 * mean], np.float32)

    @staticmethod
    def _output(request_id: int, reason: str, **more: Any) -> RequestOutput:
        values = {"request_id": request_id, "finish_reason": reason, "cached_tokens": 3}
        return RequestOutput.from_dict(values | more)

    def stats(self) -> EngineStats:
        return EngineStats.from_dict(
            {
                "num_running": len(self._running),
                "blocks_total": 10,
                "blocks_free": 10,
                "window16_blocks_total": 6,
                "window16_blocks_free": 3,
                "window16_blocks_cached": 1,
                "window16_blocks_active": 2,
                "checkpoints_total": 12,
                "checkpoints_kept": 5,
                "prefix_queried_tokens": 8,
                "prefix_hit_tokens": 4,
                "prefix_cut_tokens": 7,
                "num_nonfinite": 9,
                "clipped": self.clipped,
            }
        )

    def memory_plan(self) -> MemoryPlan:
        return MemoryPlan.from_dict(
            {
                "num_blocks": 10,
                "reserved_bytes": 1 << 20,
                "bytes_per_token": 100.0,
                "window16_bytes_per_sequence": 5000,
                "bytes_per_token_none": 300.0,
                "max_tokens": 640,
                "max_sequence_tokens": min(self.session_len, self.cache_tokens),
                "session_bytes": 60_000,
                "session_bytes_none": 150_000,
                "state_bytes_per_sequence": 4096,
                "num_checkpoints": 12,
                "checkpoint_bytes": 12 * 4096,
                "checkpoint_interval": 8,
            }
        )

    def close(self) -> None:
        self.closed = True


def echo(prompt: str) -> str:
    """Return the last line of the prompt in capitals; the default script."""
    return "You said: " + prompt.split("<user>")[-1].split("\n")[0].upper()


def make_engine(script: Callable[[str], str] = echo, **options: Any) -> AsyncEngine:
    """Return an engine whose answer to a prompt is `script(prompt)`, of `make_parts`."""
    return AsyncEngine(*make_parts(script, **options))


def make_parts(
    script: Callable[[str], str] = echo,
    *,
    step_seconds: float = 0.0,
    session_len: int = 512,
    harmony_template: str | None = None,
    tokenizer: FakeTokenizer | None = None,
) -> tuple[TextModel, RunningCore]:
    """Return the parts of an engine.

    harmony_template: the chat template of a model like GPT-OSS; "" means no template. None gives a
    plain model.
    """
    source = TEMPLATE if harmony_template is None else harmony_template
    tokenizer = tokenizer or (FakeTokenizer() if harmony_template is None else HarmonyTokenizer())
    chat_format = choose_format(
        ModelInfo("" if harmony_template is None else "gpt_oss", tokenizer)  # type: ignore[arg-type]
    )
    ends: list[int] = []
    if harmony_template is not None:
        tokens = HarmonyTokens.of(tokenizer)  # type: ignore[arg-type]
        ends = [tokens.return_, tokens.call]

    def new_core() -> EngineCore:
        return FakeCore(
            script,
            step_seconds=step_seconds,
            session_len=session_len,
            tokenizer=type(tokenizer)(),
        )

    text = TextModel(
        tokenizer=tokenizer,  # type: ignore[arg-type]
        chat_template=PromptTemplate(chat_template(source)) if source else None,
        chat_format=chat_format,
        vocab_size=max(VOCAB_SIZE, tokenizer.vocab_size),
        hidden_size=HIDDEN_SIZE,
        session_len=session_len,
        eos_ids=[EOS, *ends],
        model_path="fake",
    )
    return text, RunningCore(
        new_core(),
        on_close=lambda: None,
        restart=lambda: StartedCore(new_core()),
        kv=BALANCED,
        block_tokens=64,
    )
