"""Tests of the commands as processes, with signals and pipes, on SmolLM2."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

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
    # uvicorn raises the signal again after an orderly shutdown.
    assert server.returncode in (0, 130, -signal.SIGINT, -signal.SIGTERM)
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
    assert "KV cache: mode none" in start
    answer, forgotten = answer.rsplit("\n", 1)[0].strip(), after
    assert answer
    assert forgotten.strip().startswith("Started a new conversation.")
    assert "never read" not in done.stdout
