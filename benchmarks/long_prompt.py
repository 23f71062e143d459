"""Times short requests and running answers while one long prompt is read (bench_engine.py)."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import numpy as np
from our_engine import OurEngine

SHORT_TOKENS = 64
ANSWERS = 16
ANSWER_TOKENS = 1024
STEPS_ALONE = 400  # before the first answer ends
SHORTS_ALONE = 9
STEPS_BETWEEN_SHORTS = 60


@dataclass
class Load:
    """ANSWERS running answers, each replaced when it ends, and at times a short request."""

    engine: OurEngine
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    last: dict[int, float] = field(default_factory=dict)  # answer → time of its last token
    gaps: list[float] = field(default_factory=list)
    short: tuple[int, float] | None = None
    first_tokens: list[float] = field(default_factory=list)  # of short requests

    def submit(self, num_tokens: int, num_new: int) -> int:
        """Submit a random prompt."""
        prompt = self.rng.integers(100, self.engine.vocab_size - 100, num_tokens).tolist()
        return self.engine.submit(prompt, num_new)

    def start_answers(self) -> None:
        """Start the answers, which end one after the other."""
        for i in range(ANSWERS):
            length = ANSWER_TOKENS * (ANSWERS + i) // (2 * ANSWERS)
            self.last[self.submit(SHORT_TOKENS, length)] = 0.0

    def send_short(self) -> None:
        """Send a short request unless one is waiting."""
        if self.short is None:
            self.short = (self.submit(SHORT_TOKENS, 1), time.perf_counter())

    def take_outputs(self) -> set[int]:
        """Wait for outputs, record their times and return the ids of ended requests."""
        outputs = self.engine.outputs()
        now = time.perf_counter()
        ended = {output.request_id for output in outputs if output.finish_reason != "none"}
        for output in outputs:
            if output.request_id in self.last:
                if before := self.last[output.request_id]:
                    self.gaps.append(now - before)
                self.last[output.request_id] = now
        for request_id in ended & self.last.keys():
            del self.last[request_id]
            self.last[self.submit(SHORT_TOKENS, ANSWER_TOKENS)] = 0.0
        if self.short and self.short[0] in ended:
            self.first_tokens.append(now - self.short[1])
            self.short = None
        return ended

    def drain_short(self) -> None:
        """Wait for the short request."""
        while self.short is not None:
            self.take_outputs()

    def p99(self, steps: int) -> float:
        """Return the p99 of the time between tokens in so many steps without other requests."""
        self.gaps = []
        for _ in range(steps):
            self.take_outputs()
        return float(np.quantile(self.gaps, 0.99))

    def p99_until(self, request_id: int) -> float:
        """Return the p99 until a request ends, and record the times of short requests."""
        self.gaps, self.first_tokens = [], []
        count = 0
        while request_id not in self.take_outputs():
            count += 1
            if count % STEPS_BETWEEN_SHORTS == STEPS_BETWEEN_SHORTS // 4:
                self.send_short()
        p99 = float(np.quantile(self.gaps, 0.99))
        self.drain_short()
        return p99


def measure_long_prompt(engine: OurEngine, length: int) -> list[str]:
    """Return the lines of the report. The engine must hold the prompt and the answers."""
    load = Load(engine)
    for _ in range(SHORTS_ALONE + 2):
        load.send_short()
        load.drain_short()
    alone = statistics.median(load.first_tokens[2:])
    begun = time.perf_counter()
    engine.drain({load.submit(length, 1)})
    seconds_alone = time.perf_counter() - begun
    load.start_answers()
    load.p99(3 * ANSWERS)  # until all prompts are read
    gap_alone = load.p99(STEPS_ALONE)
    begun = time.perf_counter()
    gap = load.p99_until(load.submit(length, 1))
    seconds = time.perf_counter() - begun
    shorts = load.first_tokens
    engine.cancel(set(load.last))
    quiet_id = load.submit(length // 4, 1)
    load.last, load.first_tokens = {}, []
    load.send_short()
    while quiet_id not in load.take_outputs():
        load.send_short()
    load.drain_short()
    limit = 3 * alone + gap
    return [
        f"first token of {SHORT_TOKENS} tokens: alone {alone * 1e3:.1f} ms",
        f"  with a prompt of {length // 4}: {describe(load.first_tokens)}",
        f"  with {ANSWERS} answers and a prompt of {length}: {describe(shorts)}; "
        f"3 x alone plus a step: {limit * 1e3:.1f} ms",
        f"time between tokens of {ANSWERS} answers, p99: {gap_alone * 1e3:.1f} ms, with the prompt "
        f"{gap * 1e3:.1f} ms, ratio {gap / gap_alone:.2f}",
        f"prompt of {length}: {length / seconds_alone:.1f} tokens/s alone, {length / seconds:.1f} "
        f"with {ANSWERS} answers, ratio {seconds_alone / seconds:.2f}",
    ]


def describe(times: list[float]) -> str:
    """Return median and maximum in milliseconds."""
    return (
        f"median {statistics.median(times) * 1e3:.1f} ms, maximum {max(times) * 1e3:.1f} ms "
        f"({len(times)} requests)"
    )
