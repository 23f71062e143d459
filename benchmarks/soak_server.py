"""Thousands of small requests to one server, and the growth of its memory.

    python benchmarks/soak_server.py --requests 20000

A tiny random model answers requests of every endpoint, whole and as streams. The client leaves a
fifth of them in the middle. The result is the slope of the resident memory over the last half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from server_process import Server, serving

sys.path.append(str(Path(__file__).parents[1] / "tests" / "python" / "support"))

CLIENTS = 16
ABORTED = 0.2  # of all requests
SAMPLES = 80
MODEL = "soaked"


@dataclass
class Soak:
    """The load of one run and what was seen."""

    server: Server
    requests: int
    chance: random.Random
    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, float]] = field(default_factory=list)  # requests, MiB

    async def run(self) -> None:
        """Send all requests."""
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(
            base_url=self.server.url, limits=limits, timeout=60, trust_env=False
        ) as client:
            await asyncio.gather(*(self._send_many(client) for _ in range(CLIENTS)))

    async def _send_many(self, client: httpx.AsyncClient) -> None:
        while self.sent < self.requests:
            self.sent += 1
            if self.sent % max(self.requests // SAMPLES, 1) == 0:
                self.memory.append((self.sent, resident_mib(self.server.process.pid)))
            path, body = self._request()
            leaves = self.chance.random() < ABORTED
            self.outcomes[await self._send(client, path, body=body, leaves=leaves)] += 1

    async def _send(
        self, client: httpx.AsyncClient, path: str, *, body: dict[str, Any], leaves: bool
    ) -> str:
        events = self.chance.randrange(1, 6)
        try:
            async with client.stream("POST", path, json=body) as reply:
                if leaves and not body.get("stream"):
                    return "left"
                async for _ in reply.aiter_lines():
                    events -= 1
                    if leaves and events < 0:
                        return "left"
                return str(reply.status_code)
        except httpx.HTTPError as error:
            return type(error).__name__

    def _request(self) -> tuple[str, dict[str, Any]]:
        words = self.chance.choices(
            ["tea", "rain", "stone", "ship", "n"], k=self.chance.randrange(60)
        )
        text = f"{self.chance.randrange(1 << 30)} {' '.join(words)}"
        tokens = self.chance.randrange(1, 24)
        messages = [{"role": "user", "content": text}]
        path, body = self.chance.choice(
            [
                ("/v1/chat/completions", {"messages": messages, "max_tokens": tokens}),
                ("/v1/completions", {"prompt": text, "max_tokens": tokens, "logprobs": 2}),
                ("/v1/messages", {"messages": messages, "max_tokens": tokens}),
                ("/v1/responses", {"input": text, "max_output_tokens": tokens, "store": False}),
                ("/generate", {"prompt": text, "max_tokens": tokens}),
            ]
        )
        return path, {**body, "model": MODEL, "stream": self.chance.random() < 0.5}

    def slope(self) -> float:
        """Return MiB per 10,000 requests over the last half."""
        half = [point for point in self.memory if point[0] > self.requests / 2]
        counts, sizes = np.array(half).T
        return float(np.polyfit(counts, sizes, 1)[0] * 10_000)


def resident_mib(process: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    found = re.search(r"^VmRSS:\s*(\d+) kB", status, re.M)
    assert found is not None
    return int(found[1]) / 1024


def main() -> int:
    """Run the soak, print the memory, and return 1 if a request failed."""
    from tiny_models import TinyModel, make_model, save_model

    parser = argparse.ArgumentParser(description="Measure the growth of a server's memory.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny = TinyModel("llama", "Llama", {"max_position_embeddings": 1024})
        save_model(make_model(tiny), folder / "model")
        command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", str(folder / "model")]
        command += ["--model-name", MODEL, "--quant-policy", "16"]
        command += ["--cache-max-entry-count", "300", "--server-port"]
        with serving(command, log=folder / "log") as server:
            soak = Soak(server, args.requests, random.Random(args.seed))
            asyncio.run(soak.run())
            for count, size in soak.memory[:: SAMPLES // 10]:
                print(f"{count:8d} requests: {size:7.1f} MiB")
            metrics = server.get("/metrics")
    running = re.findall(r"^lmdeploy:num_requests_(?:running|waiting)\{.*\} (\S+)", metrics, re.M)
    print(json.dumps({"outcomes": dict(soak.outcomes), "running and waiting": running}))
    print(f"slope of the last half: {soak.slope():+.2f} MiB per 10,000 requests")
    return int(bool(soak.outcomes.keys() - {"200", "left"}))


if __name__ == "__main__":
    sys.exit(main())
