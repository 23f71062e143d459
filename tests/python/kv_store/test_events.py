"""Tests of the publisher of KV events: vLLM's wire format, replay, salts, the life of a cache."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
from tiny_models import TINY_MODELS, make_model, save_model

from lmdeploy import GenerationConfig, Pipeline, TurbomindEngineConfig
from lmdeploy.config.kv_events import KvEventsConfig, parse_kv_events
from lmdeploy.kv_store.events import KvEventPublisher, encode_event

msgpack = pytest.importorskip("msgpack")
zmq = pytest.importorskip("zmq")
BLOCK = 16
NO_SALT = bytes(16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_model(make_model(TINY_MODELS[0]), path)
    return str(path)


def subscribe(endpoint):
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.connect(endpoint)
    time.sleep(0.2)  # a subscription takes effect when the publisher has received it
    return socket


def collect(socket, count):
    """Return the first `count` events and the numbers of their batches."""
    events, numbers = [], []
    while len(events) < count:
        topic, number, payload = socket.recv_multipart()
        assert topic == b"kv" and len(number) == 8
        seconds, batch, rank = msgpack.unpackb(payload)
        assert abs(time.time() - seconds) < 60 and rank == 0
        events += batch
        numbers.append(int.from_bytes(number, "big"))
    return events, numbers


def ask(pipe, prompt, *, salt=None):
    options = GenerationConfig(max_new_tokens=1, cache_salt=salt)

    async def run():
        return [chunk async for chunk in pipe.engine.generate(prompt, options)]

    assert asyncio.run(run())[-1].finish_reason == "length"


def test_events_are_encoded_with_the_names_of_vllms_fields():
    stored = SimpleNamespace(kind="stored", blocks=[7, 2**64 - 1], parent=3, tokens=[1, 2, 3, 4])
    stored.salt = NO_SALT
    want = {
        "type": "BlockStored",
        "block_hashes": [7, 2**64 - 1],
        "parent_block_hash": 3,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    assert encode_event(stored, block_tokens=2) == want
    stored.salt = bytes(range(16))
    salt = bytes(range(16)).hex()
    assert encode_event(stored, block_tokens=2) == {**want, "extra_keys": [[salt], [salt]]}
    removed = SimpleNamespace(kind="removed", blocks=[7])
    want = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
    assert encode_event(removed, block_tokens=2) == want
    cleared = SimpleNamespace(kind="cleared")
    assert encode_event(cleared, block_tokens=2) == {"type": "AllBlocksCleared"}


def test_an_engine_publishes_the_life_of_its_cache(folder, tmp_path):
    endpoint = f"ipc://{tmp_path}/events"
    config = TurbomindEngineConfig(
        num_threads=1,
        session_len=256,
        cache_block_seq_len=BLOCK,
        cache_max_entry_count=6,  # blocks, so that the third prompt evicts others
        kv_events_config={"endpoint": endpoint, "topic": "kv", "publisher": "zmq"},
    )
    with Pipeline(folder, config) as pipe:
        socket = subscribe(endpoint)
        prompt = list(range(3 * BLOCK))
        ask(pipe, prompt)
        (first,), numbers = collect(socket, 1)
        assert first["type"] == "BlockStored" and first["parent_block_hash"] is None
        assert first["block_size"] == BLOCK and first["token_ids"] == prompt
        assert len(first["block_hashes"]) == 3
        ask(pipe, [*prompt[: 2 * BLOCK], *[5] * BLOCK])
        (second,), more = collect(socket, 1)
        assert second["parent_block_hash"] == first["block_hashes"][1]  # the common part is known
        assert second["token_ids"] == [5] * BLOCK
        assert more == [numbers[-1] + 1]
        ask(pipe, [9] * 4 * BLOCK, salt="tenant")
        events = []
        while "BlockStored" not in {event["type"] for event in events}:
            events += collect(socket, 1)[0]
        assert "BlockRemoved" in {event["type"] for event in events}
        known = {*first["block_hashes"], *second["block_hashes"]}
        for event in events:
            if event["type"] == "BlockRemoved":
                assert set(event["block_hashes"]) <= known
            else:
                assert len(event["extra_keys"]) == len(event["block_hashes"])
                assert event["extra_keys"][0] != ["tenant"]
        pipe.engine.loaded.cpp_engine.clear_prefix_cache()
        while events[-1] != {"type": "AllBlocksCleared"}:
            events, _ = collect(socket, 1)
    socket.close()


def test_the_replay_socket_repeats_batches_from_a_number(tmp_path):
    address = f"ipc://{tmp_path}/replay"
    config = KvEventsConfig(f"ipc://{tmp_path}/events", replay_endpoint=address, buffer_steps=3)
    publisher = KvEventPublisher(config, block_tokens=2)
    for block in range(5):
        publisher._publish([SimpleNamespace(kind="removed", blocks=[block])])
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 5000)
    dealer.connect(address)
    dealer.send_multipart([b"", b"short"])  # ignored
    dealer.send_multipart([b"", (3).to_bytes(8, "big")])
    received = [dealer.recv_multipart() for _ in range(3)]
    numbers = [int.from_bytes(part[1], "big", signed=True) for part in received]
    assert numbers == [3, 4, -1] and received[-1][2] == b""
    assert msgpack.unpackb(received[0][2])[1] == [
        encode_event(SimpleNamespace(kind="removed", blocks=[3]), block_tokens=2)
    ]
    dealer.send_multipart([b"", bytes(8)])
    oldest = int.from_bytes(dealer.recv_multipart()[1], "big")
    assert oldest == 2  # three batches are kept
    publisher.close()
    publisher.close()
    dealer.close(linger=0)


def test_options_are_those_of_vllm_and_wrong_ones_are_named():
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "max_queue_size": 5, "topic": "t"}
    assert parse_kv_events(json.dumps(given)) == KvEventsConfig(topic="t")
    assert KvEventsConfig().endpoint == "tcp://127.0.0.1:5557"  # other machines see no prompts
    assert parse_kv_events({"enable_kv_cache_events": False}) is None
    assert parse_kv_events({"publisher": "null"}) is None and parse_kv_events(None) is None
    for wrong, match in (
        ("[1]", "JSON object"),
        ("{", "JSON object"),
        ({"endpoint": "http://x"}, "endpoint"),
        ({"buffer_steps": 0}, "buffer_steps"),
        ({"publisher": "kafka"}, "publisher"),
        ({"endpont": "tcp://x"}, "no field 'endpont'"),
    ):
        with pytest.raises(ValueError, match=match):
            TurbomindEngineConfig(kv_events_config=wrong)
    with pytest.raises(ValueError, match="needs the prefix cache"):
        TurbomindEngineConfig(kv_events_config={}, enable_prefix_caching=False)


def test_a_taken_address_is_refused():
    config = KvEventsConfig("tcp://127.0.0.1:21555")
    publisher = KvEventPublisher(config, block_tokens=2)
    with pytest.raises(ValueError, match="cannot be used"):
        KvEventPublisher(config, block_tokens=2)
    publisher.close()
