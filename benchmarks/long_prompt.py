"""Times short requests and running answers while one long prompt is read (bench_engine.py)."""

from __future__ import annotations

import statistics
import time

import numpy as np
from our_engine import OurEngine

ANSWERS, ANSWER_TOKENS = 16, 1024
SHORT_TOKENS, SHORTS_ALONE, STEPS_BETWEEN_SHORTS = 64, 9, 60
STEPS_ALONE = 400  # before the first answer ends


class Load:
    """ANSWERS running answers, each replaced when it ends, and at times a short request."""

    def __init__(self, engine: OurEngine) -> None:
        self.engine = engine
        self.gaps: list[float] = []  # seconds between the tokens of an answer
        self.first_tokens: list[float] = []  # seconds to the first token of each short request
        self._rng = np.random.default_rng(1)
        self._last: dict[int, float] = {}  # answer → time of its last token
        self._short: tuple[int, float] | None = None

    def submit(self, num_tokens: int, num_new: int) -> int:
        """Submit a random prompt."""
        ids = self._rng.integers(100, self.engine.vocab_size - 100, num_tokens)
        return self.engine.submit(ids.tolist(), num_new)

    def start_answers(self) -> None:
        """Start the answers, which end one after the other."""
        for i in range(ANSWERS):
            length = ANSWER_TOKENS * (ANSWERS + i) // (2 * ANSWERS)
            self._last[self.submit(SHORT_TOKENS, length)] = 0.0

    def send_short(self) -> None:
        """Send a short request unless one is waiting."""
        if self._short is None:
            self._short = (self.submit(SHORT_TOKENS, 1), time.perf_counter())

    def drain_short(self) -> None:
        """Wait for the short request."""
        while self._short is not None:
            self.take_outputs()

    def take_outputs(self) -> set[int]:
        """Wait for outputs, record their times and return the ids of ended requests."""
        outputs = self.engine.outputs()
        now = time.perf_counter()
        ended = {output.request_id for output in outputs if output.finish_reason != "none"}
        for request_id in {output.request_id for output in outputs} & self._last.keys():
            if before := self._last[request_id]:
                self.gaps.append(now - before)
            self._last[request_id] = now
        for request_id in ended & self._last.keys():
            del self._last[request_id]
            self._last[self.submit(SHORT_TOKENS, ANSWER_TOKENS)] = 0.0
        if self._short and self._short[0] in ended:
            self.first_tokens.append(now - self._short[1])
            self._short = None
        return ended

    def run(self, steps: int) -> float:
        """Take the outputs of some steps and return the p99 of the time between tokens."""
        self.gaps = []
        for _ in range(steps):
            self.take_outputs()
        return float(np.quantile(self.gaps, 0.99))


def measure_long_prompt(engine: OurEngine, length: int) -> list[str]:
    """Return the lines of the report. The engine must hold the prompt and the answers."""
    load = Load(engine)
    for _ in range(SHORTS_ALONE + 2):
        load.send_short()
        load.drain_short()
    short_alone = statistics.median(load.first_tokens[2:])
    begun = time.perf_counter()
    engine.drain({load.submit(length, 1)})
    seconds_alone = time.perf_counter() - begun
    load.start_answers()
    load.run(3 * ANSWERS)  # until all prompts are read
    gap_alone = load.run(STEPS_ALONE)

    load.gaps, load.first_tokens, count = [], [], 0
    begun, prompt = time.perf_counter(), load.submit(length, 1)
    while prompt not in load.take_outputs():
        count += 1
        if count % STEPS_BETWEEN_SHORTS == STEPS_BETWEEN_SHORTS // 4:
            load.send_short()
    seconds, gap = time.perf_counter() - begun, float(np.quantile(load.gaps, 0.99))
    load.drain_short()
    shorts = [second * 1e3 for second in load.first_tokens]
    return [
        f"time between tokens of {ANSWERS} answers, p99: {gap_alone * 1e3:.1f} ms, with the prompt "
        f"{gap * 1e3:.1f} ms, ratio {gap / gap_alone:.2f}",
        f"prompt of {length}: {length / seconds_alone:.1f} tokens/s alone, {length / seconds:.1f} "
        f"with {ANSWERS} answers, ratio {seconds_alone / seconds:.2f}",
        f"first token of {SHORT_TOKENS} tokens: alone {short_alone * 1e3:.1f} ms; with the answers "
        f"and the prompt: median {statistics.median(shorts):.1f} ms, maximum {max(shorts):.1f} ms "
        f"({len(shorts)} requests); 3 x alone plus a step: {(3 * short_alone + gap) * 1e3:.1f} ms",
    ]
