"""Tests of `lmdeploy serve ray` with real Ray processes: kill and stop replicas during streams."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from tiny_models import TINY_MODELS, make_model, save_model

pytest.importorskip("ray.serve")
psutil = pytest.importorskip("psutil")
ROOT = Path(__file__).resolve().parents[3]
KEY = {"Authorization": "Bearer secret"}
BODIES = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 11, "frequency_penalty": 0.5},
}


class Server:
    """A running `lmdeploy serve ray` command."""

    def __init__(self, folder, log):
        command = [sys.executable, "-m", "lmdeploy", "serve", "ray", folder, "--server-port", "0"]
        command += ["--num-replicas", "2", "--cpus-per-replica", "1", "--model-name", "m"]
        command += ["--session-len", "2048", "--cache-max-entry-count", "100", "--deterministic"]
        command += ["--api-keys", "secret"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "LMDEPLOY_CACHE": "0"}
        with open(log, "w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=env)
        deadline = time.monotonic() + 120
        while (found := re.search(r"^Serving m at (\S+)", log.read_text(), re.M)) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        self.url = found[1]

    def replicas(self):
        """Return the processes of the replicas by their ids."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        names = {child.pid: " ".join(child.cmdline()) for child in children if child.is_running()}
        return {pid for pid, name in names.items() if "ServeReplica:lmdeploy" in name}

    def stream(self, options, *, after=None):
        """Return the text of a stream. Call `after` once, when some of it has arrived."""
        body = {"model": "m", "prompt": "hello world", "max_tokens": 1500, "ignore_eos": True}
        body |= {"stream": True, **options}
        text, ends = "", []
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json=body, headers=KEY, timeout=120
        ) as lines:
            assert lines.status_code == 200
            for line in lines.iter_lines():
                if not line.startswith("data: {"):
                    ends += [line] if line else []
                    continue
                choice = json.loads(line[6:])["choices"][0]
                text += choice["text"]
                if choice["finish_reason"]:
                    ends.append(choice["finish_reason"])
                if after is not None and len(text) > 20:
                    after()
                    after = None
        assert ends == ["length", "data: [DONE]"]
        return text


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_model(make_model(TINY_MODELS[0]), folder)
    server = Server(str(folder), tmp_path_factory.mktemp("log") / "log")
    yield server
    left = server.replicas()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert not any(psutil.pid_exists(pid) for pid in left)


def wait_for_two(server, gone):
    """Wait until two replicas run that are not in `gone`. Return the seconds."""
    start = time.monotonic()
    while len(server.replicas() - gone) < 2:
        assert time.monotonic() - start < 60
        time.sleep(0.1)
    return time.monotonic() - start


def test_api_keys_hold(server):
    body = {"model": "m", "prompt": "x"}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 401
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=KEY, timeout=60)
    assert reply.status_code == 200


def test_turns_of_a_conversation_meet_the_replica_that_has_its_beginning(server):
    prompts = {i: f"conversation {i} " * 20 for i in range(8)}
    cached = []
    for _ in range(3):
        for i in prompts:
            body = {"model": "m", "prompt": prompts[i], "max_tokens": 4}
            reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=KEY, timeout=60)
            usage = reply.json()["usage"]
            cached.append((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))
            assert usage["prompt_tokens"] > 200
            prompts[i] += f"and so on {i} " * 20
    assert all(tokens >= 128 for tokens in cached[8:16])
    assert all(tokens >= 256 for tokens in cached[16:])


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.timeout(200)
def test_a_stream_survives_the_death_of_both_replicas(server, name):
    whole = server.stream(BODIES[name])
    before = server.replicas()
    assert len(before) == 2

    def kill_all():
        for pid in before:
            os.kill(pid, signal.SIGKILL)

    assert server.stream(BODIES[name], after=kill_all) == whole
    wait_for_two(server, before)


@pytest.mark.timeout(200)
def test_a_stream_leaves_a_stopped_replica(server):
    whole = server.stream(BODIES["greedy"])
    before = server.replicas()

    def stop_all():
        for pid in before:
            os.kill(pid, signal.SIGSTOP)

    assert server.stream(BODIES["greedy"], after=stop_all) == whole
    wait_for_two(server, before)
