"""Concurrent streaming clients against our server and llama.cpp's server, in turns.

    python benchmarks/bench_server.py --model smollm2 --llama-server BUILD/bin/llama-server
    python benchmarks/bench_server.py --model FOLDER --device cuda --clients 64

16 clients, 512 tokens in, 128 out: requests per second, time to the first token, time per token.
llama-server has one slot per client, continuous batching and the fastest of three KV settings;
docs/performance.md, "Measure it yourself", says how to build it. Both servers stay up during the
run, and the idle one sleeps. All prompts differ and are given as token ids. Answers run to their
limit. Without --llama-server, our server is measured alone, on the CPU or a GPU, and a row has the
medians of the runs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from baselines.settings import BY_NAME as SETTING_BY_NAME
from baselines.settings import SETTINGS, Setting
from our_engine import quality_of
from results import ResultsFile, Row, describe_machine
from server_process import serving
from suite import BY_NAME, ROW_KEY, Runs, alternate, format_row, row_of

Figures = dict[str, float]

MODEL_NAME = "measured"
FIRST_WORD_ID, LAST_WORD_ID = 300, 40_000  # above special tokens and single bytes
MAX_EVENT_BYTES = 1 << 20
REQUEST_TIMEOUT_S = 1800.0
SLOT_MARGIN = 64
SERVER_KEY = ("model", "work", "mode", "quality", "clients", "context", "answer")


@dataclass(frozen=True)
class ServerBench:
    """The load of one measurement: `clients` clients send one request each."""

    model: str
    vocab_size: int
    llama_server: Path | None
    threads: int
    device: str = "cpu"
    clients: int = 16
    prompt_tokens: int = 512
    answer_tokens: int = 128
    mode: str = "nvfp4"

    @property
    def load_text(self) -> str:
        """Describe the load in words, for results."""
        sizes = f"{self.prompt_tokens} in, {self.answer_tokens} out"
        return f"{self.clients} clients with 1 requests each, {sizes}"

    @property
    def session_len(self) -> int:
        """Return the slots of one request, rounded up to 256."""
        return -(-(self.prompt_tokens + self.answer_tokens + SLOT_MARGIN) // 256) * 256

    def our_command(self) -> list[str]:
        """Return the command of our server; the port comes last."""
        return [
            *(sys.executable, "-m", "lmdeploy", "serve", "api_server", self.model),
            *("--server-name", "127.0.0.1", "--model-name", MODEL_NAME, "--log-level", "ERROR"),
            *("--quant-policy", self.mode, "--max-batch-size", str(self.clients)),
            *("--session-len", str(self.session_len), "--num-threads", str(self.threads)),
            *("--device", self.device, "--server-port"),
        ]

    def llama_command(self, setting: Setting) -> list[str]:
        """Return the command of llama-server; the port comes last."""
        return [
            *(str(self.llama_server), "--model", self.model, "--host", "127.0.0.1"),
            *("--alias", MODEL_NAME, "--parallel", str(self.clients)),
            *("--ctx-size", str(self.clients * self.session_len)),
            *("--threads", str(self.threads), "--threads-batch", str(self.threads)),
            *("--cache-type-k", setting.k, "--cache-type-v", setting.v),
            *("--flash-attn", "on" if setting.flash_attention else "off", "--cont-batching"),
            *("--no-kv-unified", "--cache-ram", "0", "--no-webui", "--log-disable", "--port"),
        ]

    def bodies(self, seed: int) -> list[bytes]:
        """Return greedy streaming requests. No two prompts of any seed begin alike."""
        rng = np.random.default_rng(seed)
        shape = (self.clients, self.prompt_tokens)
        ids = rng.integers(FIRST_WORD_ID, min(self.vocab_size, LAST_WORD_ID), shape).tolist()
        fields = {
            "model": MODEL_NAME,
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return [json.dumps({**fields, "prompt": prompt}).encode() for prompt in ids]

    def run(self, port: int, seed: int) -> Figures:
        """Send all requests. The clock runs from the first request to the last answer."""
        bodies = self.bodies(seed)
        begun = time.perf_counter()
        answers = asyncio.run(self._clients(port, bodies))
        return summarize(answers, time.perf_counter() - begun)

    async def _clients(self, port: int, bodies: Sequence[bytes]) -> list[Answer]:
        lengths = (self.prompt_tokens, self.answer_tokens)
        requests = [send(port, body, lengths=lengths) for body in bodies]
        return await asyncio.wait_for(asyncio.gather(*requests), REQUEST_TIMEOUT_S)

    def speeds_of_settings(self) -> dict[str, float]:
        """Return requests per second of every setting of llama-server, after a small warm-up."""
        warm = replace(self, prompt_tokens=8, answer_tokens=8)
        speeds: dict[str, float] = {}
        for setting in SETTINGS["server"]:
            try:
                with running(self.llama_command(setting)) as port:
                    warm.run(port, 2)
                    speeds[setting.name] = self.run(port, 1)["requests_per_s"]
            except RuntimeError as error:
                print(f"llama-server, {setting.name}: skipped: {error}", file=sys.stderr)
        return speeds


@dataclass(frozen=True)
class Answer:
    """The time at which a request was sent and at which each piece of its text arrived."""

    sent: float
    pieces: list[float]


def summarize(answers: Sequence[Answer], seconds: float) -> Figures:
    """Return the figures of a run, times in seconds. Raise ValueError without two pieces to time.

    A piece is the text of one event: a token, or several tokens that form a character together.
    """
    gaps = [b - a for x in answers for a, b in zip(x.pieces, x.pieces[1:], strict=False)]
    if not gaps:
        raise ValueError(f"none of {len(answers)} answers has two pieces to time")
    firsts = [answer.pieces[0] - answer.sent for answer in answers]
    return {
        "requests_per_s": len(answers) / seconds,
        "p50_token": statistics.median(gaps),
        "p99_token": float(np.percentile(gaps, 99)),
        "p50_first": statistics.median(firsts),
        "p99_first": float(np.percentile(firsts, 99)),
    }


async def send(port: int, body: bytes, *, lengths: tuple[int, int]) -> Answer:
    """Send one request and read its answer.

    Parsing waits until the answer is complete, because client and server share the cores.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MAX_EVENT_BYTES)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    sent = time.perf_counter()
    writer.write(head.encode() + body)
    lines: list[tuple[float, bytes]] = []
    try:
        while line := await reader.readline():
            lines.append((time.perf_counter(), line))
    finally:
        writer.close()
    if not lines or not lines[0][1].startswith(b"HTTP/1.1 200"):
        text = b"".join(line for _, line in lines)[:1000].decode(errors="replace")
        raise RuntimeError(f"the server answered {text!r}")
    events = [(at, line) for at, line in lines if line.startswith(b"data:")]
    return read_answer(sent, events, lengths=lengths)


def read_answer(
    sent: float, lines: Sequence[tuple[float, bytes]], *, lengths: tuple[int, int]
) -> Answer:
    """Parse the events of a stream. Raise RuntimeError for errors and for wrong lengths."""
    pieces: list[float] = []
    usage: dict[str, Any] = {}
    if not lines or lines[-1][1].split() != [b"data:", b"[DONE]"]:
        raise RuntimeError(f"the stream ended after {len(lines)} events without [DONE]")
    for at, line in lines[:-1]:
        event = json.loads(line.removeprefix(b"data:"))
        if "error" in event:
            raise RuntimeError(f"the server answered {event['error']}")
        if any(choice.get("text") for choice in event.get("choices", ())):
            pieces.append(at)
        usage = event.get("usage") or usage
    got = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if got != lengths or len(pieces) < 2:
        raise RuntimeError(
            f"the answer has {got[0]} prompt tokens and {got[1]} tokens in {len(pieces)} pieces; "
            f"the request asked for {lengths[0]} and {lengths[1]}"
        )
    return Answer(sent, pieces)


def measure_servers(
    bench: ServerBench, setting: Setting, *, repeats: int
) -> dict[str, list[Figures]]:
    """Return the alternating runs `ours` and `baseline`, after a short warm-up of each server."""
    warm = replace(bench, answer_tokens=8)
    with running(bench.our_command()) as ours, running(bench.llama_command(setting)) as baseline:
        for port in (baseline, ours):
            warm.run(port, 2)
        seeds = {port: itertools.count(3) for port in (baseline, ours)}  # new prompts each time
        runs = alternate(
            lambda: bench.run(ours, next(seeds[ours])),
            lambda: bench.run(baseline, next(seeds[baseline])),
            repeats=repeats,
        )
    return dict(zip(("ours", "baseline"), runs, strict=True))


@contextmanager
def running(command: Sequence[str]) -> Iterator[int]:
    """Start a server, yield its port when it is ready, and stop it at the end."""
    with tempfile.NamedTemporaryFile() as log, serving(command, log=Path(log.name)) as server:
        yield server.port


def server_runs(bench: ServerBench, *, repeats: int) -> dict[str, Runs]:
    """Choose the fastest setting of llama-server and measure the rows of both servers."""
    speeds = bench.speeds_of_settings()
    if not speeds:
        raise RuntimeError("llama-server started with none of its settings")
    setting = SETTING_BY_NAME[max(speeds, key=lambda name: speeds[name])]
    results = measure_servers(bench, setting, repeats=repeats)
    fields = {"server-requests": "requests_per_s", "server-p99": "p99_token"}
    note = "; ".join(
        f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in runs[len(runs) // 2].items())
        for name, runs in results.items()
    )
    ours = f"{bench.mode}, {quality_of(bench.mode)}, {bench.load_text}"
    return {
        name: Runs(
            [run[field] for run in results["ours"]],
            [run[field] for run in results["baseline"]],
            ours,
            f"llama-server, {setting.name}",
            note,
        )
        for name, field in fields.items()
    }


def measure_ours(bench: ServerBench, *, repeats: int) -> Figures:
    """Return the medians of our server's figures, after a warm-up."""
    with running(bench.our_command()) as port:
        bench.run(port, 2)
        runs = [bench.run(port, 3 + i) for i in range(repeats)]
    return {key: float(f"{statistics.median(run[key] for run in runs):.4g}") for key in runs[0]}


def run(options: argparse.Namespace) -> None:
    """Measure both servers, or only ours, and write the rows."""
    from lmdeploy.engine.model_files import open_files

    info = open_files(options.model).info
    cell = BY_NAME["server-requests"].cell
    machine = options.machine or describe_machine(options.num_threads)
    bench = ServerBench(
        str(info.path),
        info.config.vocab_size,
        llama_server=options.llama_server,
        threads=options.num_threads,
        device=options.device,
        clients=options.clients or cell.batch,
        prompt_tokens=cell.context,
        answer_tokens=cell.steps,
    )
    if bench.llama_server is None:
        file = ResultsFile(options.json, machine=machine, key=SERVER_KEY)
        row: Row = {"model": Path(info.path).stem, "work": "server", "mode": bench.mode}
        row |= {"quality": quality_of(bench.mode), "clients": bench.clients}
        row |= {"context": bench.prompt_tokens, "answer": bench.answer_tokens}
        file.add({**row, **measure_ours(bench, repeats=options.repeats)})
        print(json.dumps(file.rows[-1]))
        return
    file = ResultsFile(options.json, machine=machine, key=ROW_KEY)
    for name, runs in server_runs(bench, repeats=options.repeats).items():
        workload, model = BY_NAME[name], Path(info.path).stem
        file.add(row_of(workload, runs, model=model, baseline_by="llama-server"))
        print(format_row(file.rows[-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="GGUF file or smollm2")
    add("--json", type=Path, help="add the rows to this file of JSON Lines")
    add("--llama-server", type=Path, help="binary llama-server (default: no baseline)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of our server")
    add("--clients", type=int, help="without a baseline (default: 16)")
    add("--machine", help="how rows name the machine (default: this CPU)")
    add("--repeats", type=int, default=5)
    add("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    if options.llama_server and (options.clients or options.device != "cpu"):
        parser.error("--clients and --device are for our server alone, without --llama-server.")
    try:
        run(options)
    except (ValueError, RuntimeError) as error:
        print(f"bench_server.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
