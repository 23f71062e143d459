"""Tests of the stream by which a replica sends the outputs of one client."""

from __future__ import annotations

import asyncio

import pytest

from lmdeploy.replicas import output_stream
from lmdeploy.replicas.output_stream import OutputStream


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(output_stream, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(output_stream, "_READ_SECONDS", 0.1)
    monkeypatch.setattr(output_stream, "_TIMEOUT_SECONDS", 0.5)


def put(stream, request_id, token):
    stream.put({"request_id": request_id, "tokens": [token]})


def pairs(batch):
    return [(fields["request_id"], *fields["tokens"]) for fields in batch]


async def test_one_message_has_the_outputs_of_all_requests_in_their_order():
    stream = OutputStream()
    for request_id, token in [(1, 10), (2, 20), (1, 11)]:
        put(stream, request_id, token)
    batches = stream.read()
    assert pairs(await anext(batches)) == [(1, 10), (2, 20), (1, 11)]
    put(stream, 2, 21)
    assert pairs(await anext(batches)) == [(2, 21)]
    assert await anext(batches) == []  # the heartbeat


async def test_no_output_is_lost_between_two_calls():
    stream = OutputStream()
    found = []
    for call in range(3):
        async for batch in stream.read():
            found += pairs(batch)
        assert len(found) == call  # the call has ended without an output after its last
        put(stream, call, 0)
        await asyncio.sleep(0.01)
    assert not stream.closed.done()


async def test_a_stream_that_breaks_closes():
    stream = OutputStream()
    batches = stream.read()
    await anext(batches)
    with pytest.raises(LookupError, match="is not open"):
        await anext(stream.read())  # a second reader
    await batches.aclose()
    with pytest.raises(LookupError, match="is not open"):
        await anext(stream.read())
    assert stream.closed.done()


@pytest.mark.parametrize("is_abandoned", [False, True])
async def test_a_stream_without_a_reader_closes_unless_it_is_renewed(is_abandoned):
    order = []
    streams = {name: OutputStream() for name in ("renewed", "left")}
    for name, stream in streams.items():
        stream.closed.add_done_callback(lambda _, name=name: order.append(name))
    batches = streams["left"].read()
    if is_abandoned:  # the call has neither ended nor failed
        await anext(batches)
    await asyncio.sleep(0.1)
    streams["renewed"].renew()
    await asyncio.wait_for(asyncio.gather(*(item.closed for item in streams.values())), 10)
    assert order == ["left", "renewed"]
