"""Concurrent streaming clients against our server and llama.cpp's server, in turns.

    python benchmarks/bench_server.py --model smollm2 --llama-server BUILD/bin/llama-server
    python benchmarks/bench_server.py --model smollm2 --starts 5

16 clients, 512 tokens in, 128 out: requests per second, time to the first token, time per token.
llama-server has one slot per client, continuous batching and the fastest of three KV settings. It
builds from the sources of llama-cpp-python:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B build-llama -G Ninja \\
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \\
        -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF \\
        -DLLAMA_BUILD_EXAMPLES=OFF
    ninja -C build-llama llama-server

On a CPU with AMX, use the compiler and the flags of docs/performance.md, "Measure it yourself":
gcc 12 miscompiles that code. Both servers stay up during the run, and the idle one sleeps. All
prompts differ and are given as token ids. Answers run to their limit.

--starts N measures the seconds from the command to the first 200 on /health instead: one start with
an empty weight cache, then N starts with the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

MODEL_NAME = "measured"
FIRST_WORD_ID, LAST_WORD_ID = 300, 40_000  # above special tokens and single bytes
MAX_EVENT_BYTES = 1 << 20
REQUEST_TIMEOUT_S = 1800.0
START_SECONDS, STOP_SECONDS, POLL_SECONDS = 600.0, 15.0, 0.05
CACHE_SECONDS = 300.0
SLOT_MARGIN = 64
TAIL_BYTES = 1500


@dataclass(frozen=True)
class LlamaServerSetting:
    """KV types and flash attention of llama-server."""

    k: str
    v: str
    flash_attention: bool

    @property
    def name(self) -> str:
        """The name in tables and on the command line."""
        types = self.k if self.k == self.v else f"{self.k} keys, {self.v} values"
        return types + (", flash attention" if self.flash_attention else "")

    @classmethod
    def named(cls, name: str) -> LlamaServerSetting:
        """Return the setting with this name."""
        for setting in SERVER_SETTINGS:
            if setting.name == name:
                return setting
        names = ", ".join(repr(setting.name) for setting in SERVER_SETTINGS)
        raise ValueError(
            f"--peer-setting {name!r} is unknown to the server; choose one of {names}."
        )


SERVER_SETTINGS = (
    LlamaServerSetting("f16", "f16", True),
    LlamaServerSetting("q8_0", "f16", False),
    LlamaServerSetting("q4_0", "q4_0", True),
)


@dataclass(frozen=True)
class ServerBench:
    """The load of one measurement: `clients` clients send `requests` requests each."""

    model: str
    vocab_size: int
    llama_server: Path
    threads: int
    clients: int = 16
    requests: int = 1
    prompt_tokens: int = 512
    answer_tokens: int = 128
    mode: str = "nvfp4"

    @property
    def load_text(self) -> str:
        """The load in words, for results."""
        return (
            f"{self.clients} clients with {self.requests} requests each, {self.prompt_tokens} in, "
            f"{self.answer_tokens} out"
        )

    @property
    def session_len(self) -> int:
        """Slots of one request, rounded up to 256."""
        return -(-(self.prompt_tokens + self.answer_tokens + SLOT_MARGIN) // 256) * 256

    def our_command(self) -> list[str]:
        """Return the command of our server; the port comes last."""
        return [
            *(sys.executable, "-m", "lmdeploy", "serve", "api_server", self.model),
            *("--server-name", "127.0.0.1", "--model-name", MODEL_NAME, "--log-level", "ERROR"),
            *("--quant-policy", self.mode, "--max-batch-size", str(self.clients)),
            *("--session-len", str(self.session_len), "--num-threads", str(self.threads)),
            "--server-port",
        ]

    def llama_command(self, setting: LlamaServerSetting) -> list[str]:
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
        shape = (self.clients * self.requests, self.prompt_tokens)
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

    def run(self, port: int, seed: int) -> LoadResult:
        """Send all requests. The clock runs from the first request to the last answer."""
        bodies = self.bodies(seed)
        begun = time.perf_counter()
        answers = asyncio.run(self._clients(port, bodies))
        return summarize(answers, time.perf_counter() - begun)

    async def _clients(self, port: int, bodies: Sequence[bytes]) -> list[Answer]:
        async def client(own: Sequence[bytes]) -> list[Answer]:
            lengths = (self.prompt_tokens, self.answer_tokens)
            return [
                await asyncio.wait_for(send(port, body, lengths=lengths), REQUEST_TIMEOUT_S)
                for body in own
            ]

        tasks = [client(bodies[i :: self.clients]) for i in range(self.clients)]
        return [answer for answers in await asyncio.gather(*tasks) for answer in answers]

    def speeds_of_settings(self) -> dict[str, float]:
        """Return requests per second of every setting of llama-server, after a small warm-up."""
        warm = replace(self, requests=1, prompt_tokens=8, answer_tokens=8)
        speeds: dict[str, float] = {}
        for setting in SERVER_SETTINGS:
            try:
                with running(self.llama_command(setting)) as port:
                    warm.run(port, 2)
                    speeds[setting.name] = self.run(port, 1).requests_per_s
            except RuntimeError as error:
                print(f"llama-server, {setting.name}: skipped: {error}", file=sys.stderr)
        return speeds


@dataclass(frozen=True)
class Answer:
    """The time at which a request was sent and at which each piece of its text arrived."""

    sent: float
    pieces: list[float]
    tokens: int


@dataclass(frozen=True)
class LoadResult:
    """Figures of one run, times in seconds.

    A piece is the text of one event: a token, or several tokens that form a character together.
    99 % of the pieces arrived within `p99_token` after the previous piece.
    """

    requests_per_s: float
    tokens_per_s: float
    p50_token: float
    p99_token: float
    p50_first: float
    p99_first: float
    pieces_per_token: float

    @property
    def text(self) -> str:
        """The times in words, for notes."""
        return (
            f"first token {self.p50_first:.3g} s (p99 {self.p99_first:.3g}), token "
            f"{self.p50_token * 1e3:.3g} ms (p99 {self.p99_token * 1e3:.3g}), "
            f"{self.pieces_per_token:.2f} pieces per token"
        )


def summarize(answers: Sequence[Answer], seconds: float) -> LoadResult:
    """Return the figures of a run. ValueError is raised if there are no two pieces to time."""
    gaps = [b - a for x in answers for a, b in zip(x.pieces, x.pieces[1:], strict=False)]
    if not gaps:
        raise ValueError(f"none of {len(answers)} answers has two pieces to time")
    tokens = sum(answer.tokens for answer in answers)
    firsts = [answer.pieces[0] - answer.sent for answer in answers]
    return LoadResult(
        requests_per_s=len(answers) / seconds,
        tokens_per_s=tokens / seconds,
        p50_token=statistics.median(gaps),
        p99_token=float(np.percentile(gaps, 99)),
        p50_first=statistics.median(firsts),
        p99_first=float(np.percentile(firsts, 99)),
        pieces_per_token=sum(len(answer.pieces) for answer in answers) / tokens,
    )


async def send(port: int, body: bytes, *, lengths: tuple[int, int]) -> Answer:
    """Send one request and read its answer.

    Parsing waits until the answer is complete, because client and server share the cores.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MAX_EVENT_BYTES)
    try:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        sent = time.perf_counter()
        writer.write(head.encode() + body)
        await writer.drain()
        lines: list[tuple[float, bytes]] = []
        status = await reader.readline()
        while line := await reader.readline():
            if line.startswith(b"data:"):
                lines.append((time.perf_counter(), line))
            elif not status.startswith(b"HTTP/1.1 200"):
                status += line
    finally:
        writer.close()
    if not status.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the server answered {status[:1000].decode(errors='replace')}")
    return read_answer(sent, lines, lengths=lengths)


def read_answer(
    sent: float, lines: Sequence[tuple[float, bytes]], *, lengths: tuple[int, int]
) -> Answer:
    """Parse the events of a stream. RuntimeError is raised for errors and for wrong lengths."""
    pieces: list[float] = []
    usage: dict[str, Any] = {}
    for at, line in lines:
        text = line[len(b"data:") :].strip()
        if text == b"[DONE]":
            break
        event = json.loads(text)
        if "error" in event:
            raise RuntimeError(f"the server answered {event['error']}")
        if any(choice.get("text") for choice in event.get("choices", ())):
            pieces.append(at)
        usage = event.get("usage") or usage
    else:
        raise RuntimeError(f"the stream ended after {len(lines)} events without [DONE]")
    got = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if got != lengths or len(pieces) < 2:
        raise RuntimeError(
            f"the answer has {got[0]} prompt tokens and {got[1]} tokens in {len(pieces)} pieces; "
            f"the request asked for {lengths[0]} and {lengths[1]}"
        )
    return Answer(sent, pieces, lengths[1])


def measure_servers(
    bench: ServerBench, setting: LlamaServerSetting, *, repeats: int
) -> dict[str, list[LoadResult]]:
    """Return the alternating runs `ours` and `peer`, after a short warm-up of each server."""
    warm = replace(bench, requests=1, answer_tokens=8)
    results: dict[str, list[LoadResult]] = {"peer": [], "ours": []}
    with running(bench.our_command()) as ours, running(bench.llama_command(setting)) as peer:
        ports = {"peer": peer, "ours": ours}
        for port in ports.values():
            warm.run(port, 2)
        for turn in range(repeats):
            for name in ports if turn % 2 == 0 else reversed(ports):
                result = bench.run(ports[name], 3 + turn)
                results[name].append(result)
                print(f"run {turn + 1}, {name}: {result.requests_per_s:.3g} requests/s", flush=True)
    return results


@contextmanager
def running(command: Sequence[str]) -> Iterator[int]:
    """Start a server, wait until /health answers 200, yield its port, and stop it at the end.

    RuntimeError with the end of the log is raised if the server does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", log=log)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, *, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    why = f"no answer from {url} within {START_SECONDS:.0f} s"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            why = f"the server ended with {process.returncode}"
            break
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:
            pass
        time.sleep(POLL_SECONDS)
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - TAIL_BYTES))
    raise RuntimeError(f"{why}: {log.read().decode(errors='replace')}")


def start_seconds(command: Sequence[str], *, until: Callable[[], bool] = lambda: True) -> float:
    """Return the seconds of one start. The server stops when `until` returns true."""
    begun = time.perf_counter()
    with running(command):
        seconds = time.perf_counter() - begun
        deadline = time.monotonic() + CACHE_SECONDS
        while not until():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the weight cache was not written in {CACHE_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
    return seconds


def measure_starts(bench: ServerBench, count: int) -> None:
    """Print the seconds of a start without the weight cache and of `count` starts with it."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"LMDEPLOY_CACHE": "1", "LMDEPLOY_CACHE_DIR": folder}
        command = bench.our_command()
        first = start_seconds(command, until=lambda: any(Path(folder).glob("*.packed")))
        later = [start_seconds(command) for _ in range(count)]
    print(f"first start  {first:6.2f} s")
    shown = ", ".join(f"{seconds:.2f}" for seconds in later)
    print(f"later starts {statistics.median(later):6.2f} s (median of {shown})")


def run(options: argparse.Namespace) -> None:
    """Measure both servers and write the rows."""
    from results import ResultsFile, describe_machine
    from targets import BY_NAME, SuiteOptions, TargetRow, as_trial, format_row, row_of, server_runs

    from lmdeploy.engine.model_files import open_files

    info = open_files(options.model).info
    bench = ServerBench(
        str(info.path),
        info.config.vocab_size,
        llama_server=options.llama_server or Path(),
        threads=options.num_threads,
        clients=options.clients,
        requests=options.requests,
        prompt_tokens=options.prompt_tokens,
        answer_tokens=options.answer_tokens,
    )
    if options.starts:
        measure_starts(bench, options.starts)
        return
    file = ResultsFile(options.json, make_row=lambda fields: TargetRow(**fields))
    file.measured_on(describe_machine(options.num_threads))
    suite = SuiteOptions(options.num_threads, options.repeats, peer_setting=options.peer_setting)
    name = Path(info.path).stem
    for target, runs in server_runs(bench, file, model=name, options=suite).items():
        row = row_of(BY_NAME[target], runs, model=name)
        cell = BY_NAME[target].cell
        if (cell.batch, cell.context, cell.steps) != (
            bench.clients,
            bench.prompt_tokens,
            bench.answer_tokens,
        ):
            row = as_trial(row, bench.load_text)
        file.add(row)
        print(format_row(row))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="GGUF file or smollm2")
    add("--json", type=Path, help="add the rows to this file")
    add("--llama-server", type=Path, help="binary llama-server")
    add("--peer-setting", help="name of its setting instead of the fastest")
    add("--clients", type=int, default=16)
    add("--requests", type=int, default=1, help="requests of each client (default: 1)")
    add("--prompt-tokens", type=int, default=512)
    add("--answer-tokens", type=int, default=128)
    add("--repeats", type=int, default=5)
    add("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--starts", type=int, help="measure starts instead: one without and N with a weight cache")
    options = parser.parse_args(arguments)
    if not options.starts and not options.llama_server:
        parser.error("--llama-server is required, except with --starts.")
    try:
        run(options)
    except (ValueError, RuntimeError) as error:
        print(f"bench_server.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
