"""Tests of `lmdeploy serve ray` with real Ray processes, which are killed, stopped and replaced."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from build_folder import built
from tiny_models import TINY_MODELS, make_model, save_model

pytest.importorskip("ray.serve")
import grpc
import psutil

pytestmark = [pytest.mark.timeout(200), pytest.mark.xdist_group("ray")]  # one after another
ROOT = Path(__file__).resolve().parents[3]
KEY = {"Authorization": "Bearer secret"}
BODIES = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 11, "frequency_penalty": 0.5},
}


class Server:
    """A running `lmdeploy serve ray` command. `cluster` is the parent of Ray's processes."""

    def __init__(self, folder, log, *flags, env, cluster=None):
        command = [sys.executable, "-m", "lmdeploy", "serve", "ray", folder, "--server-port", "0"]
        command += ["--num-replicas", "2", "--cpus-per-replica", "1", "--model-name", "m"]
        command += ["--session-len", "2048", "--cache-max-entry-count", "100", "--deterministic"]
        command += ["--api-keys", "secret", *flags]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "LMDEPLOY_CACHE": "0", **env}
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


@contextmanager
def running_cluster(log, *flags, **more):
    """Run a Ray cluster that asks for a token. Yield its process, address and environment."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    command = [ray, "start", "--head", "--block", "--port", str(port), "--num-cpus", "2"]
    command += ["--include-dashboard=false", "--disable-usage-stats", *flags]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **token, **more}
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
    deadline = time.monotonic() + 60
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    address = re.search(r"--address='(\S+)'", log.read_text())[1]
    yield process, address, token
    parts = psutil.Process(process.pid).children(recursive=True)
    for part in [*parts, process]:  # Ray itself waits 30 s for the controller of Serve
        part.kill()
    process.wait(60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def server(folder, cluster, tmp_path_factory):
    """A command without --address, beside a cluster that it must not join."""
    _, address, token = cluster
    log = tmp_path_factory.mktemp("log") / "log"
    server = Server(folder, log, env={**token, "RAY_ADDRESS": address})
    assert len(server.replicas()) == 2  # children of the command
    yield server
    left = server.replicas()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert not any(psutil.pid_exists(pid) for pid in left)


@pytest.fixture(scope="module")
def texts(server):
    """The text of an undisturbed stream of each body."""
    return {name: server.stream(body) for name, body in BODIES.items()}


def wait_for_two(server, gone):
    """Wait until two replicas run that are not in `gone`."""
    deadline = time.monotonic() + 60
    while len(server.replicas() - gone) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def send_to_all(pids, number):
    for pid in pids:
        os.kill(pid, number)


def test_api_keys_hold(server):
    body = {"model": "m", "prompt": "x"}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 401
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=KEY, timeout=60)
    assert reply.status_code == 200


def test_every_port_is_on_loopback_or_asks_for_a_fresh_token(server):
    def call(port, metadata):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            handle = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as refusal:
                handle(b"", metadata=metadata, timeout=20)
            return refusal.value.code()

    parent, ports, tokens = psutil.Process(server.process.pid), {}, set()
    for process in [parent, *parent.children(recursive=True)]:
        found = [item.laddr for item in process.net_connections("tcp") if item.status == "LISTEN"]
        ports |= {port: process for ip, port in found if not ip.endswith("127.0.0.1")}
    assert {process.pid for process in ports.values()} == server.replicas()
    for port, process in ports.items():
        assert call(port, []) == grpc.StatusCode.UNAUTHENTICATED
        token = process.environ()["RAY_AUTH_TOKEN"]
        tokens.add(token)
        known = call(port, [("authorization", f"Bearer {token}")])
        assert known not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
    assert len(tokens) == 1 and len(tokens & {"0" * 64}) == 0


def test_engines_run_at_the_priority_of_the_command(server):
    own = psutil.Process(server.process.pid).nice()
    assert {psutil.Process(pid).nice() for pid in server.replicas()} == {own}


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


def test_streams_survive_the_death_of_both_replicas(server, texts):
    before = server.replicas()
    assert len(before) == 2
    all_begun = threading.Barrier(2, lambda: send_to_all(before, signal.SIGKILL), timeout=60)
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda name: server.stream(BODIES[name], after=all_begun.wait), BODIES)
    assert dict(zip(BODIES, found, strict=True)) == texts
    assert "A request continues on another replica" in server.log.read_text()
    wait_for_two(server, before)


def test_a_stream_leaves_a_stopped_replica(server, texts):
    before = server.replicas()

    def stop_all():
        send_to_all(before, signal.SIGSTOP)
        threading.Timer(3.5, lambda: send_to_all(before, signal.SIGCONT)).start()

    assert server.stream(BODIES["greedy"], after=stop_all) == texts["greedy"]
    assert "The replica sends no heartbeat." in server.log.read_text()


def test_an_update_replaces_the_replicas_and_breaks_no_stream(server, texts):
    before = server.replicas()
    server.process.send_signal(signal.SIGHUP)
    while server.replicas() & before:
        assert server.stream(BODIES["seeded"]) == texts["seeded"]
    wait_for_two(server, before)
    deadline = time.monotonic() + 60
    while "All replicas are replaced." not in server.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert server.stream(BODIES["seeded"]) == texts["seeded"]


def cpu_seconds(pids):
    """Return the processor time that processes have used."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def test_commands_share_the_replicas_of_a_cluster(folder, server, texts, cluster, tmp_path):
    process, address, token = cluster

    def serve(name, *flags):
        flags = ("--address", address, *flags)
        return Server(folder, tmp_path / name, *flags, env=token, cluster=process)

    first = serve("first")
    replicas = first.replicas()
    assert len(replicas) == 2 and not replicas & server.replicas()
    body = {**BODIES["seeded"], "n": 120, "max_tokens": 2000, "logprobs": 5}  # 19 s of a core
    all_begun = threading.Barrier(3, first.process.kill, timeout=60)
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(first.stream, body, after=all_begun.wait) for _ in range(3)]
    assert all(isinstance(call.exception(), httpx.TransportError) for call in calls)
    deadline = time.monotonic() + 12
    used, past = cpu_seconds(replicas), 0.0
    while used - past > 0.25:  # in a second
        assert time.monotonic() < deadline, "The replicas still generate."
        time.sleep(1)
        used, past = cpu_seconds(replicas), used
    second = serve("second")
    assert second.replicas() == replicas
    third = serve("third", "--max-batch-size", "8")
    assert len(third.replicas()) == 2 and not third.replicas() & replicas
    assert second.stream(BODIES["greedy"]) == third.stream(BODIES["greedy"]) == texts["greedy"]
    for command, num_left in ((third, 2), (second, 0)):  # the last one that ends stops them
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(60) == 0
        assert len(command.replicas()) == num_left


DESCRIBE = """
import json, ray
from ray import serve

ray.init(address="auto", log_to_driver=False)
handle = serve.get_app_handle("lmdeploy-m")
found = {}
while len(found) < 2:
    described = handle.describe.remote().result(timeout_s=60)
    found[described["gpus"]] = described["device"]
print(json.dumps(found))
"""


def test_each_replica_has_a_gpu_of_its_own(folder, tmp_path):
    gpu = {"LMDEPLOY_CUDA_LIBRARY": str(built("libturbomind_cuda_shim.so")), "LMDEPLOY_TUNER": "0"}
    flags = ["--device", "cuda", "--cache-max-entry-count", "20"]
    with running_cluster(tmp_path / "cluster", "--num-gpus", "2", **gpu) as running:
        process, address, token = running
        env = {**token, **gpu}
        flags += ["--address", address]
        server = Server(folder, tmp_path / "log", *flags, env=env, cluster=process)
        body = {"model": "m", "prompt": "x", "max_tokens": 2}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=KEY, timeout=120)
        assert reply.status_code == 200, reply.text
        env = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT), **env}
        described = subprocess.run(
            [sys.executable, "-c", DESCRIBE], env=env, stdout=subprocess.PIPE, text=True, check=True
        )
        found = json.loads(described.stdout.splitlines()[-1])
        assert set(found) == {"0", "1"}
        assert all("cuda:0 (shim" in device for device in found.values())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
