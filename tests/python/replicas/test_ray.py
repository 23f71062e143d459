"""Tests of `lmdeploy serve ray` with real Ray processes, which are killed, stopped and replaced."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
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
    """A running `lmdeploy serve ray` command. `cluster` is the parent of Ray's processes."""

    def __init__(self, folder, log, *flags, cluster=None):
        command = [sys.executable, "-m", "lmdeploy", "serve", "ray", folder, "--server-port", "0"]
        command += ["--num-replicas", "2", "--cpus-per-replica", "1", "--model-name", "m"]
        command += ["--session-len", "2048", "--cache-max-entry-count", "100", "--deterministic"]
        command += ["--api-keys", "secret", *flags]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "LMDEPLOY_CACHE": "0"}
        with open(log, "w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=env)
        deadline = time.monotonic() + 120
        while (found := re.search(r"^Serving m at (\S+)", log.read_text(), re.M)) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        self.url = found[1]
        self.cluster = cluster or self.process
        self.log = log

    def replicas(self):
        """Return the processes of the replicas by their ids."""
        found = set()
        for child in psutil.Process(self.cluster.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                if "ServeReplica:lmdeploy" in " ".join(child.cmdline()):
                    found.add(child.pid)
        return found

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
def folder(tmp_path_factory):
    return str(save_model(make_model(TINY_MODELS[0]), tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    server = Server(folder, tmp_path_factory.mktemp("log") / "log")
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


@pytest.mark.timeout(200)
def test_an_update_replaces_the_replicas_and_breaks_no_stream(server):
    whole = server.stream(BODIES["seeded"])
    before = server.replicas()
    server.process.send_signal(signal.SIGHUP)
    while server.replicas() & before:
        assert server.stream(BODIES["seeded"]) == whole
    wait_for_two(server, before)
    deadline = time.monotonic() + 60
    while "All replicas are replaced." not in server.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert server.stream(BODIES["seeded"]) == whole


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A Ray cluster of its own: its process and its address. It asks for a token."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # by itself, Ray sends none to a host:port
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    command = [ray, "start", "--head", "--block", "--port", str(port), "--num-cpus", "2"]
    command += ["--include-dashboard=false", "--disable-usage-stats"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "ray", "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=tmp_path, env=env)
    deadline = time.monotonic() + 60
    while "Ray runtime started" not in (tmp_path / "ray").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    address = re.search(r"--address='(\S+)'", (tmp_path / "ray").read_text())[1]
    yield process, address
    process.send_signal(signal.SIGTERM)
    process.wait(60)


@pytest.mark.timeout(200)
def test_without_an_address_no_cluster_is_joined(folder, cluster, tmp_path):
    process, _ = cluster
    server = Server(folder, tmp_path / "log")
    assert len(server.replicas()) == 2  # children of the command
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert process.poll() is None


def cpu_seconds(pids):
    """Return the processor time that processes have used."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


@pytest.mark.timeout(200)
def test_replicas_outlive_the_http_process_and_drop_its_requests(folder, cluster, tmp_path):
    process, address = cluster

    def serve(name, *flags):
        return Server(folder, tmp_path / name, "--address", address, *flags, cluster=process)

    first = serve("first")
    whole = first.stream(BODIES["greedy"])
    replicas = first.replicas()
    with pytest.raises(httpx.RemoteProtocolError):  # 120 x 2000 tokens need more than 10 s
        first.stream({**BODIES["seeded"], "n": 120, "max_tokens": 2000}, after=first.process.kill)
    time.sleep(2)
    used = cpu_seconds(replicas)
    time.sleep(2)
    assert cpu_seconds(replicas) - used < 0.5
    second = serve("second")
    assert second.replicas() == replicas
    assert second.stream(BODIES["greedy"]) == whole
    third = serve("third", "--max-batch-size", "8")
    assert len(third.replicas()) == 2 and not third.replicas() & replicas
    assert second.stream(BODIES["greedy"]) == third.stream(BODIES["greedy"]) == whole
    for server, num_left in ((second, 2), (third, 0)):
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert len(server.replicas()) == num_left
