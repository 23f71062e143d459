"""Speed with and without n-gram drafts on four workloads, and the cost of verifying drafts.

    python benchmarks/bench_drafts.py
    python benchmarks/bench_drafts.py --model llama-3.2-1b-q4_0.gguf --replay-only
    python benchmarks/bench_drafts.py --model llama-3.2-1b-q4_0.gguf --costs 1,2,4,8,16
    python benchmarks/bench_drafts.py --losses

The workloads are the editing of code, the extraction of JSON, a summary with quotes, and free
prose (draft_workloads.py). A row "own" is the model's own greedy answer, up to its end or 256
tokens. A row "replayed" forces the first 256 tokens of a reference answer by a token mask, so that
a small or random model writes what a good one would. Texts are tokenized by SmolLM2 for every
model.
--losses measures work on which drafts cannot pay: random tokens, sampling, and 16 answers at once.
--costs replays a text that repeats itself, so that every draft has full length and is right.

Engines with and without drafts run alternately. A ratio is the median of those of the pairs, from
the first token of the last sequence on. "cpu" is the ratio of CPU time, which other processes on
the machine change less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from draft_workloads import topics, workloads
from our_engine import Cell, OurEngine

if TYPE_CHECKING:
    from lmdeploy import _turbomind

NEW_TOKENS = 256
CYCLE = 23  # distinct tokens of the text of --costs


@dataclass(frozen=True)
class Answer:
    """A prompt as token ids. `forced` are the tokens of the answer; None lets the model choose."""

    prompt: list[int]
    forced: list[int] | None = None
    temperature: float = 0.0


@dataclass(frozen=True)
class Work:
    """Answers that are computed at once, and the least ratio of speeds that they should have."""

    name: str
    answers: list[Answer]
    target: float | None = None


@dataclass(frozen=True)
class Run:
    """The counts from the first token of the last sequence on."""

    seconds: float
    cpu_seconds: float
    tokens: int
    steps: int
    drafted: int
    accepted: int


class ForcedText:
    """A token mask that allows one token at every position (Request.token_mask)."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._position = 0

    def __call__(self, new_tokens: Sequence[int], mask: npt.NDArray[np.int32]) -> bool:
        """Write the mask of the token after `new_tokens`."""
        self._position += len(new_tokens)
        token = self._tokens[self._position]
        mask[:] = 0
        mask.view(np.uint32)[token // 32] = 1 << (token % 32)
        return True


class Texts:
    """Turns workloads into token ids with SmolLM2's tokenizer and chat template."""

    def __init__(self) -> None:
        from lmdeploy.engine.model_files import open_files

        texts = open_files("smollm2").read_texts()
        assert texts.chat_template, "SmolLM2 has a chat template"
        self._tokenizer, self._template = texts.tokenizer, texts.chat_template
        self.eos_ids = texts.tokenizer.stop_ids

    def prompt(self, question: str) -> list[int]:
        """Return the prompt of a question."""
        rendered = self._template.render([{"role": "user", "content": question}])
        return self._tokenizer.encode(rendered, add_special=False)

    def works(self, *, replay_only: bool) -> list[Work]:
        """Return the four workloads, with the model's own answers and with replayed ones."""
        found = []
        for workload in workloads():
            prompt = self.prompt(workload.question)
            if not replay_only:
                found.append(Work(f"{workload.name}, own", [Answer(prompt)]))
            forced = self._tokenizer.encode(workload.reference, add_special=False)[:NEW_TOKENS]
            found.append(
                Work(f"{workload.name}, replayed", [Answer(prompt, forced)], workload.target)
            )
        return found

    def losses(self, *, replay_only: bool) -> list[Work]:
        """Return work on which drafts cannot pay."""
        rng = np.random.default_rng(5)
        found = []
        for kinds in (8, 64, 32768):
            ids: list[int] = rng.integers(100, 100 + kinds, 2 * NEW_TOKENS).tolist()
            answer = Answer(ids[:NEW_TOKENS], ids[NEW_TOKENS:])
            found.append(Work(f"random, of {kinds} tokens", [answer], 0.98))
        if not replay_only:
            prompts = [self.prompt(topic) for topic in topics()]
            sampled = [Answer(prompts[0], temperature=1.0)]
            found.append(Work("prose, temperature 1", sampled, 0.98))
            found.append(Work("16 x prose", [Answer(prompt) for prompt in prompts], 0.98))
            sampled = [Answer(prompt, temperature=1.0) for prompt in prompts]
            found.append(Work("16 x prose, temp. 1", sampled, 0.98))
        return found


def request_of(answer: Answer, eos_ids: list[int]) -> _turbomind.Request:
    """Return the request of an answer."""
    from lmdeploy import _turbomind

    request = _turbomind.Request()
    request.prompt, request.max_new_tokens = answer.prompt, NEW_TOKENS
    request.eos_ids = eos_ids
    request.do_sample, request.temperature = answer.temperature > 0, answer.temperature or 1.0
    request.seed = 11
    if answer.forced is not None:
        request.max_new_tokens, request.ignore_eos = len(answer.forced), True
        request.token_mask = ForcedText(answer.forced)
    return request


def measure(engine: OurEngine, work: Work, *, eos_ids: list[int]) -> Run:
    """Compute the answers of a work once."""
    waiting = {engine.send(request_of(answer, eos_ids)) for answer in work.answers}
    running = set(waiting)
    while waiting:
        for output in engine.outputs():
            waiting.discard(output.request_id)
            if output.finish_reason != "none":
                running.discard(output.request_id)
    before, started, cpu = engine.stats(), time.perf_counter(), time.process_time()
    engine.drain(running)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    after = engine.stats()
    return Run(
        seconds=seconds,
        cpu_seconds=cpu,
        tokens=after.generated_tokens - before.generated_tokens,
        steps=after.num_steps - before.num_steps,
        drafted=after.draft_tokens - before.draft_tokens,
        accepted=after.accepted_tokens - before.accepted_tokens,
    )


def compare(pair: tuple[OurEngine, OurEngine], work: Work, *, texts: Texts, repeats: int) -> str:
    """Return the line of a work: what was accepted, and the ratios of speeds."""
    measure(pair[0], work, eos_ids=texts.eos_ids)  # the prompts enter the prefix cache
    measure(pair[1], work, eos_ids=texts.eos_ids)
    runs: tuple[list[Run], list[Run]] = ([], [])
    for i in range(repeats):
        for k in (0, 1) if i % 2 == 0 else (1, 0):
            runs[k].append(measure(pair[k], work, eos_ids=texts.eos_ids))
    without, drafts = runs
    ratios = [a.seconds / b.seconds for a, b in zip(without, drafts, strict=True)]
    cpu_ratios = [a.cpu_seconds / b.cpu_seconds for a, b in zip(without, drafts, strict=True)]
    one = drafts[0]
    speeds = [statistics.median(run.tokens / run.seconds for run in side) for side in runs]
    goal = "" if work.target is None else f"{work.target:.2f}"
    return (
        f"{work.name:<26} {one.tokens:>5} {one.drafted:>6} "
        f"{one.accepted / max(one.drafted, 1):>8.2f} {without[0].steps / one.steps:>7.2f} "
        f"{speeds[0]:>7.1f} {speeds[1]:>7.1f} {statistics.median(ratios):>6.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}) {statistics.median(cpu_ratios):>6.2f} {goal:>6}"
    )


HEADER = (
    f"{'work':<26} {'new':>5} {'drafts':>6} {'accepted':>8} {'fewer':>7} {'without':>7} "
    f"{'with':>7} {'ratio':>6} {'(range)':<11} {'cpu':>6} {'target':>6}"
)


def run_works(options: argparse.Namespace) -> None:
    """Print a line for every work: "fewer" is the factor by which drafts reduce the steps."""
    texts = Texts()
    make = texts.losses if options.losses else texts.works
    works = make(replay_only=options.replay_only)
    works = [work for work in works if options.only in work.name]
    with ExitStack() as stack:
        pair = open_pair(stack, options, num_draft_tokens=options.num_draft_tokens)
        print(HEADER)
        for work in works:
            print(compare(pair, work, texts=texts, repeats=options.repeats), flush=True)


def run_costs(options: argparse.Namespace) -> None:
    """Print the time of a step that verifies drafts, by their length.

    "cost" is its ratio to the time of a step without drafts, and "cpu" that of CPU times.
    """
    texts = Texts()
    cycle = list(range(1000, 1000 + CYCLE))
    answer = Answer(cycle * 4, (cycle * (NEW_TOKENS // CYCLE + 1))[:NEW_TOKENS])
    work = Work("cycle", [answer])
    print(f"{'draft':>5} {'tokens/step':>11} {'ms/step':>8} {'without':>8} {'cost':>5} {'cpu':>5}")
    for length in options.costs:
        with ExitStack() as stack:
            pair = open_pair(stack, options, num_draft_tokens=length)
            for engine in pair:
                measure(engine, work, eos_ids=texts.eos_ids)
            runs = [
                [measure(engine, work, eos_ids=texts.eos_ids) for engine in pair]
                for _ in range(options.repeats)
            ]
        times = [[run.seconds / run.steps for run in row] for row in runs]
        cpu_times = [[run.cpu_seconds / run.steps for run in row] for row in runs]
        without, drafts = (statistics.median(side) * 1e3 for side in zip(*times, strict=True))
        tokens = runs[0][1].tokens / runs[0][1].steps
        print(
            f"{length:>5} {tokens:>11.2f} {drafts:>8.2f} {without:>8.2f} "
            f"{statistics.median(b / a for a, b in times):>5.2f} "
            f"{statistics.median(b / a for a, b in cpu_times):>5.2f}",
            flush=True,
        )


def open_pair(
    stack: ExitStack, options: argparse.Namespace, *, num_draft_tokens: int
) -> tuple[OurEngine, OurEngine]:
    """Return engines without and with drafts, which share the weights."""
    from lmdeploy import TurbomindEngineConfig
    from lmdeploy.engine.devices import open_device
    from lmdeploy.engine.model_files import load_model

    config = TurbomindEngineConfig(device_type="cpu", num_threads=options.num_threads)
    loaded: Any = load_model(options.model, device=open_device(config), progress=False)

    def engine(length: int) -> OurEngine:
        cell = Cell(1024, 16, NEW_TOKENS, length)
        return stack.enter_context(
            OurEngine(loaded, open_device(config), cell=cell, mode=options.mode)
        )

    return engine(0), engine(num_draft_tokens)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2", help="GGUF file or smollm2")
    add("--mode", default="nvfp4", help="KV format (default: %(default)s)")
    add("--num-draft-tokens", type=int, default=8, help="default: %(default)s")
    add("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--repeats", type=int, default=5, help="pairs of runs (default: %(default)s)")
    add("--replay-only", action="store_true", help="no answers of the model's own")
    add("--only", default="", help="only work whose name contains this text")
    add("--losses", action="store_true", help="work on which drafts cannot pay")
    add(
        "--costs",
        type=lambda text: [int(part) for part in text.split(",")],
        help="measure the cost of drafts of these lengths",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse_arguments(arguments)
    if options.costs:
        run_costs(options)
    else:
        run_works(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
