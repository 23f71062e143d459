"""Tests of the commands as processes, with signals and pipes, on SmolLM2."""

from __future__ import annotations

import json
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from hostile_redis import hostile_redis
from terminals import Terminal

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
COMMAND = [sys.executable, "-m", "lmdeploy"]
SERVER = [*COMMAND, "serve", "api_server", "smollm2", "--server-port", "0"]
FUNCTION = """
import lmdeploy
lmdeploy.serve("smollm2", "small", lmdeploy.TurbomindEngineConfig(session_len=512), server_port=0)
"""


@contextmanager
def started(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server process and yield it with its URL."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            line = next((line for line in server.stdout if b" at http" in line), b"")
            assert line, server.stderr and server.stderr.read().decode()
            yield server, line.split(b" at ")[1].split()[0].decode()
        finally:
            server.kill()


def end_quietly(server: subprocess.Popen[bytes]) -> None:
    log = server.communicate(timeout=30)[1].decode()
    assert server.returncode == 0
    assert "ERROR" not in log
    assert "Traceback" not in log


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_api_server_signal_ends_streams_and_process_without_errors(sent: signal.Signals) -> None:
    with started([*SERVER, "--session-len", "32768"]) as (server, url):
        body = {"model": "smollm2", "messages": PARIS, "ignore_eos": True, "stream": True}
        body["max_tokens"] = 30000
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            server.send_signal(sent)
            told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "closed" in told[-1]["error"]["message"]
        end_quietly(server)


@pytest.mark.parametrize("behavior", ["hang", "trickle"])
def test_api_server_ends_in_time_while_its_store_hangs(tmp_path: Path, behavior: str) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("0123456789abcdef")
    with hostile_redis(behavior) as store:
        command = [*SERVER, "--session-len", "1024", "--kv-store", store.url]
        with started([*command, "--kv-store-key", str(key)]) as (server, url):
            body = {"model": "smollm2", "prompt": "a b c d " * 30, "max_tokens": 2}
            with ThreadPoolExecutor(1) as thread:
                reply = thread.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=30)
                assert store.asked.wait(10)
                server.send_signal(signal.SIGTERM)
                begin = time.monotonic()
                server.communicate(timeout=30)
                assert time.monotonic() - begin < 3
                assert server.returncode == 0
                assert reply.result().status_code == 200


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_api_server_second_signal_ends_the_process_at_once(sent: signal.Signals) -> None:
    command = [*SERVER, "--session-len", "32768", "--shutdown-timeout", "300"]
    with started(command) as (server, url):
        body = {"model": "smollm2", "messages": PARIS, "ignore_eos": True, "stream": True}
        body["max_tokens"] = 30000
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.send_signal(sent)
            for _ in range(100):  # the response continues
                next(lines)
            server.send_signal(sent)
            start = time.monotonic()
            assert server.wait(timeout=30) == -sent
            assert time.monotonic() - start < 2


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def test_api_server_frees_large_refused_bodies() -> None:
    numbers = [f"{i:013}" for i in range(1 << 20)]
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": numbers}}}
    body = {"model": "smollm2", "prompt": "a", "response_format": schema}
    data, json_type = json.dumps(body).encode(), {"content-type": "application/json"}
    with started([*SERVER, "--session-len", "512"]) as (server, url):

        def send(_: int) -> int:
            path = f"{url}/v1/completions"
            return httpx.post(path, content=data, headers=json_type, timeout=120).status_code

        before = resident_bytes(server)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(send, range(8))) == [400] * 8
        deadline = time.monotonic() + 2  # the last response arrives before its body is freed
        while resident_bytes(server) - before >= 64 << 20 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert resident_bytes(server) - before < 64 << 20


def test_api_server_without_enough_memory_names_the_flags() -> None:
    limit = 3 << 30  # of the address space; the KV cache needs more
    done = subprocess.run(
        [*SERVER, "--cache-max-entry-count", "10000000"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("lmdeploy: error: The KV cache takes ")
    for flag in ("--cache-max-entry-count", "--session-len", "--max-batch-size"):
        assert flag in line
    assert "bad_alloc" not in done.stderr and "Traceback" not in done.stderr


def test_serve_function_starts_a_server() -> None:
    with started([sys.executable, "-c", FUNCTION]) as (server, url):
        model = httpx.get(f"{url}/v1/models").json()["data"][0]
        assert (model["id"], model["max_model_len"]) == ("small", 512)
        server.send_signal(signal.SIGINT)
        end_quietly(server)


def test_chat_reads_questions_from_a_pipe() -> None:
    talk = "What is the capital of France?\n/clear\n/exit\nnever read\n"
    done = subprocess.run(
        [*COMMAND, "chat", "smollm2", "--session-len", "512"],
        input=talk,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert "rror" not in done.stderr and "Traceback" not in done.stderr
    start, answer, after = done.stdout.split("you>")[:3]
    assert "KV cache: format none" in start
    answer, forgotten = answer.rsplit("\n", 1)[0].strip(), after
    assert answer
    assert forgotten.strip().startswith("Started a new conversation.")
    assert "never read" not in done.stdout


def test_chat_in_a_terminal_edits_stops_and_leaves(tmp_path: Path) -> None:
    flags = ["--session-len", "8192", "--temperature", "0"]
    with Terminal(
        [*COMMAND, "chat", "smollm2", *flags], {"XDG_CACHE_HOME": str(tmp_path)}
    ) as terminal:
        terminal.read_until("you>")
        terminal.type("What is the capital of Grance?" + "\x1b[D" * 6 + "\x08F\r")
        terminal.read_until("Paris")
        terminal.read_until("you>")
        terminal.type("\x1b[A\r")  # the arrow up brings the question back
        terminal.read_until("What is the capital of France?")
        terminal.read_until("Paris")
        terminal.read_until("you>")
        terminal.type("Write a very long story about the sea, with many chapters.\r")
        terminal.read_until("many chapters.")
        terminal.read_until("…")
        time.sleep(0.3)
        terminal.type("\x03")
        terminal.read_until("[stopped]")
        terminal.read_until("you>")
        terminal.type("unfinished\x03")
        terminal.type("\x03")
        terminal.read_until("Press Ctrl-C again or Ctrl-D to leave.")
        terminal.type("\x03")
        assert terminal.process.wait(timeout=30) == 0
    history = tmp_path / "lmdeploy" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert history.read_text().count("+What is the capital of France?\n") == 1


def test_chat_in_a_terminal_ends_at_ctrl_d(tmp_path: Path) -> None:
    command = [*COMMAND, "chat", "smollm2", "--session-len", "512"]
    with Terminal(command, {"XDG_CACHE_HOME": str(tmp_path)}) as terminal:
        terminal.read_until("you>")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=30) == 0


class FakeProxy(BaseHTTPRequestHandler):
    """LMDeploy's proxy: it asks a server that registers for its models."""

    seen: ClassVar[list[tuple[str, dict[str, Any], list[str]]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        models = httpx.get(f"{body['url']}/v1/models").json()["data"] if "status" in body else []
        if not self.seen:
            self.seen.append(("failed", {}, []))
            self.send_error(502)
            return
        self.seen.append((self.path, body, [model["id"] for model in models]))
        self.send_response(200)
        self.end_headers()


def test_api_server_registers_at_a_proxy_and_leaves_it() -> None:
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), FakeProxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{proxy.server_port}"
    command = [*SERVER, "--session-len", "512", "--model-name", "small", "--proxy-url", address]
    try:
        with started(command) as (server, url):
            deadline = time.monotonic() + 30
            while len(FakeProxy.seen) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            added = ("/nodes/add", {"url": url, "status": {"models": ["small"]}}, ["small"])
            assert FakeProxy.seen[1:] == [added]
            server.send_signal(signal.SIGTERM)
            assert b"502" in server.communicate(timeout=30)[1]
            assert FakeProxy.seen[2:] == [("/nodes/remove", {"url": url}, [])]
    finally:
        proxy.shutdown()


def test_api_server_generation_config_replaces_the_models(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    command = [*SERVER, "--session-len", "512", "--generation-config", str(tmp_path)]
    with started(command) as (server, url):
        body = {"model": "smollm2", "messages": PARIS, "max_tokens": 8}
        texts = {
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0][
                "message"
            ]["content"]
            for _ in range(4)
        }
        assert len(texts) == 1
        server.send_signal(signal.SIGTERM)
        end_quietly(server)


def test_terminate_stops_the_server_like_a_signal() -> None:
    with started([*SERVER, "--allow-terminate-by-client"]) as (server, url):
        assert httpx.get(f"{url}/terminate").status_code == 200
        end_quietly(server)


def test_a_sleeping_server_has_freed_its_weights_and_answers_alike_afterwards() -> None:
    with started(SERVER) as (server, url):
        body = {"model": "smollm2", "messages": PARIS, "temperature": 0, "max_tokens": 12}

        def answer() -> str:
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            text: str = reply["choices"][0]["message"]["content"]
            return text

        before = answer()
        awake = resident_bytes(server)
        assert httpx.post(f"{url}/sleep", timeout=60).status_code == 200
        # SmolLM2 has 89 MB of weights.
        assert awake - resident_bytes(server) > 80_000_000
        assert httpx.post(f"{url}/wakeup", timeout=60).json() == {"is_sleeping": False}
        assert answer() == before
