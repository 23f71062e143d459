"""Replay interleaved conversations against a server, and count the prompt tokens read again.

    python benchmarks/replay_conversations.py -- lmdeploy serve api_server MODEL --server-port
    python benchmarks/replay_conversations.py -- llama-server -m MODEL.gguf --port

The port is added to the end of the command. Every conversation has its own system prompt of 500 to
3,000 tokens, and each turn adds 70 to 600: an answer whose reasoning was dropped, so that no server
has seen its text, and a question. The turns of all conversations come in random order, one at a
time, and the prompts are token ids, which no template changes. A token is read again if an earlier
request had the same prompt up to it and the server does not report it as cached.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results import ResultsFile, describe_machine
from server_process import Server, serving

REQUEST_SECONDS = 600.0
SYSTEM_TOKENS, TURN_TOKENS = (500, 3000), (70, 600)
ANSWER_TOKENS = 4
FIRST_ID = 300  # smaller ids are bytes, which some tokenizers reserve


@dataclass
class Turn:
    """A prompt: `known` tokens at its start were part of an earlier one."""

    prompt: list[int]
    known: int


@dataclass
class Tally:
    """The sums over all requests."""

    prompt: int = 0
    known: int = 0
    again: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, turn: Turn, *, cached: int, seconds: float) -> None:
        """Count one request."""
        self.prompt += len(turn.prompt)
        self.known += turn.known
        self.again += max(0, turn.known - cached)
        self.seconds.append(seconds)


def conversations(options: argparse.Namespace) -> Iterator[Turn]:
    """Yield the turns of all conversations in random order."""
    source = random.Random(options.seed)
    count, turns = options.conversations, options.turns

    def text(bounds: tuple[int, int]) -> list[int]:
        length = max(1, round(source.randint(*bounds) * options.scale))
        return source.choices(range(FIRST_ID, options.vocabulary), k=length)

    prompts = [text(SYSTEM_TOKENS) for _ in range(count)]
    known = [0] * count
    order = [i for i in range(count) for _ in range(turns)]
    source.shuffle(order)
    for i in order:
        prompts[i] = prompts[i] + text(TURN_TOKENS)
        yield Turn(prompts[i], known[i])
        known[i] = len(prompts[i])


def complete(server: Server, prompt: Sequence[int], *, model: str) -> int:
    """Send a prompt, and return how many of its tokens the server took from its cache."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=REQUEST_SECONDS) as reply:
        usage: dict[str, Any] = json.load(reply)["usage"]
    if usage["prompt_tokens"] != len(prompt):
        raise ValueError(f"{usage['prompt_tokens']} of {len(prompt)} prompt tokens were read.")
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def replay(server: Server, options: argparse.Namespace) -> Tally:
    """Send all turns, one after the other."""
    model = json.loads(server.get("/v1/models"))["data"][0]["id"]
    tally = Tally()
    for turn in conversations(options):
        begin = time.perf_counter()
        cached = complete(server, turn.prompt, model=model)
        tally.add(turn, cached=cached, seconds=time.perf_counter() - begin)
    return tally


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of all texts")
    parser.add_argument("--vocabulary", type=int, default=8192, help="token ids are below it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of the server, for the row")
    parser.add_argument("--name", default="", help="how the row names the server")
    parser.add_argument("--json", type=Path, help="add the row to this file")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one server and print its row."""
    options = parse(arguments)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(options.command, log=Path(folder) / "server.log") as server,
    ):
        tally = replay(server, options)
    row = {
        "name": options.name or Path(options.command[0]).name,
        "conversations": options.conversations,
        "turns": options.turns,
        "scale": options.scale,
        "prompt_tokens": tally.prompt,
        "known_tokens": tally.known,
        "read_again_tokens": tally.again,
        "read_again": round(tally.again / max(1, tally.known), 4),
        "median_seconds": round(statistics.median(tally.seconds), 4),
        "total_seconds": round(sum(tally.seconds), 1),
    }
    print(json.dumps(row))
    if options.json is not None:
        machine = describe_machine(options.threads)
        ResultsFile(options.json, machine=machine, key=("name",)).add(row)


if __name__ == "__main__":
    main()
