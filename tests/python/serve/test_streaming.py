"""Tests of how streams are sent."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fake_engine import make_engine
from hypothesis import given
from hypothesis import strategies as st
from serving import CHAT, connect, post_head, serving

from lmdeploy import GenerationConfig
from lmdeploy._turbomind import RequestOutput
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.engine.stream import LogprobQueue
from lmdeploy.response import Response
from lmdeploy.serve import streaming
from lmdeploy.serve.errors import json_bytes
from lmdeploy.serve.http import connections
from lmdeploy.serve.streaming import HOLE, OPENAI_EVENTS, EventForm, EventTemplate, SseResponse

ANSWER_CHARS = 6000


def test_sse_response_sends_once_per_turn_of_the_event_loop() -> None:
    """A client that is gone is then noticed before the next event is written."""
    sent: list[bytes] = []
    has_turned = True

    def turn() -> None:
        nonlocal has_turned
        has_turned = True

    async def events() -> AsyncIterator[bytes]:
        for i in range(20):
            yield b"data: %d\n\n" % i

    async def send(message: dict[str, Any]) -> None:
        nonlocal has_turned
        assert has_turned
        has_turned = False
        asyncio.get_running_loop().call_soon(turn)
        sent.append(message.get("body", b""))

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    scope = {"type": "http", "asgi": {"spec_version": "2.0"}}
    asyncio.run(SseResponse(events(), [])(scope, receive, send))
    assert b"".join(sent) == b"".join(b"data: %d\n\n" % i for i in range(20))


def test_an_event_is_one_line_for_clients_that_split_at_every_unicode_line_end() -> None:
    text = "a\x85b\u2028c\u2029d"
    assert json_bytes({"text": text}).decode().splitlines() == [
        '{"text":"a\\u0085b\\u2028c\\u2029d"}'
    ]


@given(st.text(), st.lists(st.integers(0, 2**31)), st.booleans())
def test_a_template_writes_the_event_that_json_bytes_writes(
    text: str, ids: list[int], is_named: bool
) -> None:
    form = EventForm(is_named=True) if is_named else OPENAI_EVENTS

    def body(text: Any, ids: Any) -> dict[str, Any]:
        return {"type": "t", "choices": [{"delta": {"content": text}}], "ids": ids, "n": None}

    assert EventTemplate(body(HOLE, HOLE), form).event(text, ids) == form.event(body(text, ids))


def long_answer(prompt: str) -> str:
    return "".join(chr(97 + i % 26) for i in range(ANSWER_CHARS))


def slow_engine(step_seconds: float = 0.0005) -> AsyncEngine:
    engine = make_engine(long_answer, step_seconds=step_seconds, session_len=2 * ANSWER_CHARS)
    engine.running.core.cache_tokens = 2 * ANSWER_CHARS
    return engine


def open_stream(url: str, path: str = "/v1/chat/completions", **fields: Any) -> socket.socket:
    """Send a request whose response is longer than what the system buffers, and read nothing."""
    body = json.dumps({**CHAT, "stream": True, "max_tokens": ANSWER_CHARS, **fields}).encode()
    host, port = url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(30)
    sock.connect((host, int(port)))
    sock.sendall(post_head(path, len(body), "Connection: close") + body)
    return sock


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


def content_of(data: bytes) -> list[str]:
    """Return the texts of the events of a chunked response."""
    body, rest = b"", data.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    return [choice["delta"].get("content", "") for c in chunks for choice in c["choices"]]


def wait_for(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_client_that_reads_nothing_is_disconnected_and_its_request_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.3)
    engine = slow_engine()
    core = engine.running.core
    with serving(engine, log_level="WARNING") as url, open_stream(url) as sock:
        wait_for(lambda: core.cancelled)
        assert "has read nothing" in caplog.text
        assert not read_all(sock).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")


def test_a_client_that_reads_late_gets_the_whole_text_in_fewer_events() -> None:
    engine = slow_engine()
    with serving(engine) as url, open_stream(url) as sock:
        core = engine.running.core
        wait_for(lambda: core.requests and not core.stats().num_running)
        texts = content_of(read_all(sock))
    assert "".join(texts) == long_answer("")
    assert len(texts) < ANSWER_CHARS / 2


def test_a_client_that_reads_slowly_but_steadily_is_not_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.5)
    engine = slow_engine()
    data = b""
    begin = time.monotonic()
    with serving(engine) as url, open_stream(url) as sock:
        while part := sock.recv(2048):
            data += part
            time.sleep(0.012)
    assert time.monotonic() - begin > 1
    assert "".join(content_of(data)) == long_answer("")


def test_a_token_that_waits_for_its_reader_takes_4_bytes() -> None:
    num_tokens = 100_000
    engine = make_engine(lambda _: "a", step_seconds=5)
    output = RequestOutput()
    output.tokens = [97]

    async def run() -> int:
        stream = await engine.submit([97])
        tracemalloc.start()
        for _ in range(num_tokens):
            stream.deliver(output)
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len((await anext(stream)).token_ids) == num_tokens
        stream.close()
        return taken

    assert asyncio.run(run()) < 5 * num_tokens  # arrays grow by an eighth
    engine.close()


def logprobs_of(token: int) -> tuple[float, list[tuple[int, float]]]:
    return -token / 8, [(token + i, -i / 4) for i in range(1, 21)]


def test_log_probabilities_that_wait_for_their_reader_are_packed() -> None:
    num_tokens, output = 3000, RequestOutput()
    engine = make_engine(lambda _: "a", step_seconds=5)

    async def run() -> tuple[int, list[Response]]:
        stream = await engine.submit([97], GenerationConfig(logprobs=20, max_new_tokens=400))
        tracemalloc.start()
        for i in range(num_tokens):
            output.tokens, output.logprobs = [97 + i % 26], [logprobs_of(97 + i)]
            stream.deliver(output)
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        chunks: list[Response] = []
        while sum(len(chunk.token_ids) for chunk in chunks) < num_tokens:
            chunks.append(await anext(stream))
        stream.close()
        return taken, chunks

    taken, chunks = asyncio.run(run())
    assert taken < 1.2 * num_tokens * (4 + 8 + 20 * 8)
    assert max(len(chunk.token_ids) for chunk in chunks) <= 256
    found = [row for chunk in chunks for row in chunk.logprobs or []]
    assert len(found) == num_tokens
    for i, row in enumerate(found):
        chosen, top = logprobs_of(97 + i)
        assert row == {**dict(top), 97 + i % 26: dict(top).get(97 + i % 26, chosen)}
    engine.close()


@given(st.data())
def test_packed_log_probabilities_are_those_that_came(data: st.DataObject) -> None:
    value = st.floats(width=32, allow_nan=False)
    rows = data.draw(
        st.lists(
            st.tuples(value, st.lists(st.tuples(st.integers(0, 2**31 - 1), value), max_size=3))
        )
    )
    logprobs, found = LogprobQueue(), []
    for i in range(0, len(rows), 7):
        logprobs.extend(rows[i : i + 7] * 20)
        found += logprobs.take(data.draw(st.integers(0, 150)))
    found += logprobs.take(len(logprobs))
    assert found == [row for i in range(0, len(rows), 7) for row in rows[i : i + 7] * 20]
    assert len(logprobs) == 0 and logprobs.take(5) == []


def test_prompt_log_probabilities_come_in_parts_before_the_tokens() -> None:
    output = RequestOutput()
    output.tokens, output.logprobs = [97], [logprobs_of(97)]
    output.prompt_logprobs = [logprobs_of(98)] * 599
    engine = make_engine(lambda _: "a", step_seconds=5, session_len=1024)

    async def run() -> list[Response]:
        config = GenerationConfig(logprobs=20, prompt_logprobs=20)
        stream = await engine.submit([98] * 600, config)
        stream.deliver(output)
        chunks = [await anext(stream) for _ in range(3)]
        stream.close()
        return chunks

    chunks = asyncio.run(run())
    assert [len(chunk.prompt_logprobs or []) for chunk in chunks] == [256, 256, 87]
    assert [len(chunk.token_ids) for chunk in chunks] == [0, 0, 1]
    engine.close()


def test_a_stream_of_http_1_0_has_no_chunk_sizes() -> None:
    with serving(make_engine()) as url, connect(url) as sock:
        body = json.dumps({**CHAT, "stream": True}).encode()
        head = post_head("/v1/chat/completions", len(body)).replace(b"HTTP/1.1", b"HTTP/1.0")
        sock.sendall(head + body)
        data = read_all(sock).partition(b"\r\n\r\n")[2]
    assert data.startswith(b"data: {") and data.endswith(b"\n\ndata: [DONE]\n\n")


def test_one_output_at_a_time_is_one_event_each() -> None:
    engine = make_engine()
    permits = engine.running.core.permits = threading.Semaphore(1)  # type: ignore[attr-defined]
    with serving(engine) as url, connect(url) as sock:
        body = json.dumps({**CHAT, "stream": True}).encode()
        sock.sendall(post_head("/v1/chat/completions", len(body)) + body)
        data, num_read = b"", 0
        while b"[DONE]" not in data:
            data += sock.recv(1 << 16)
            num_events = data.count(b'"content":"') - 1  # the first event has the role
            assert num_events - num_read in (-1, 0, 1)
            if num_events > num_read:
                num_read = num_events
                permits.release()
    assert num_read == len("You said: HELLO")


def test_events_before_an_error_of_a_chunk_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def one_chunk(*args: Any) -> AsyncIterator[tuple[None, Response]]:
        yield None, Response(text="a", generate_token_len=1, input_token_len=1)

    def bodies(job: Any, chunk: Response) -> Iterator[dict[str, Any]]:
        yield {"text": chunk.text}
        raise ValueError("out of luck")

    async def run() -> list[bytes]:
        return [piece async for piece in streaming.answer_events([], None, bodies=bodies)]  # type: ignore[arg-type]

    monkeypatch.setattr(streaming, "_merge", one_chunk)
    pieces = asyncio.run(run())
    assert pieces[0] == b'data: {"text":"a"}\n\n'
    assert len(pieces) == 2 and b'"error"' in pieces[1]


def test_outputs_that_wait_become_one_chunk() -> None:
    engine = make_engine(lambda _: "h\u00e9llo w\u00f6rld")

    async def chunks(pause: float) -> list[Response]:
        stream = await engine.submit([97], GenerationConfig(logprobs=0))
        time.sleep(pause)  # the event loop is busy
        return [chunk async for chunk in stream]

    joined = asyncio.run(chunks(0.3))
    engine.close()
    assert [chunk.text for chunk in joined] == ["h\u00e9llo w\u00f6rld", ""]
    assert joined[0].token_ids == list("h\u00e9llo w\u00f6rld".encode())
    assert [next(iter(item)) for item in joined[0].logprobs or []] == joined[0].token_ids
    assert (joined[1].finish_reason, joined[1].generate_token_len) == ("stop", 13)


def test_a_step_wakes_an_event_loop_once_for_all_its_streams() -> None:
    engine = make_engine(lambda _: "abcdef", step_seconds=0.02)
    num_calls = 0

    async def run() -> list[str]:
        nonlocal num_calls
        streams = [await engine.submit([97]) for _ in range(8)]
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def counted(*args: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return call(*args, **options)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]

        async def text(stream: Any) -> str:
            return "".join([chunk.text async for chunk in stream])

        return await asyncio.gather(*map(text, streams))

    assert asyncio.run(run()) == ["abcdef"] * 8
    engine.close()
    assert num_calls < 3 * 7
