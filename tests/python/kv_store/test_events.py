"""Tests of the publisher of KV events: vLLM's wire format, replay, salts, the life of a cache."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_families import HYBRID_MODELS
from tiny_models import TINY_MODELS, make_model, save_model

from lmdeploy import GenerationConfig, Pipeline, TurbomindEngineConfig
from lmdeploy.config.kv_events import KvEventsConfig, parse_kv_events
from lmdeploy.kv_store.event_sockets import is_local
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


def removed_event(*blocks):
    return SimpleNamespace(kind="removed", blocks=list(blocks), group=None)


def test_events_are_encoded_with_the_names_of_vllms_fields():
    stored = SimpleNamespace(kind="stored", blocks=[7, 2**64 - 1], parent=3, tokens=[1, 2, 3, 4])
    stored.salt, stored.group = NO_SALT, None
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
    removed = removed_event(7)
    want = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
    assert encode_event(removed, block_tokens=2) == want
    cleared = SimpleNamespace(kind="cleared")
    assert encode_event(cleared, block_tokens=2) == {"type": "AllBlocksCleared"}


@pytest.mark.parametrize(
    ("is_state", "window", "want"),
    [
        (False, 0, {"kv_cache_spec_kind": "full_attention"}),
        (
            False,
            512,
            {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 512},
        ),
        (False, -512, {"kv_cache_spec_kind": "chunked_local_attention"}),
        (True, 0, {"kv_cache_spec_kind": "mamba"}),
    ],
)
def test_events_of_a_group_have_the_fields_of_vllms_groups(is_state, window, want):
    event = stored(1)
    fields = encode_event(event, block_tokens=2)
    event.group = SimpleNamespace(index=1, is_state=is_state, window=window)
    assert encode_event(event, block_tokens=2) == {**fields, "group_idx": 1, **want}
    removed = removed_event(7)
    removed.group = event.group
    want = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 1}
    assert encode_event(removed, block_tokens=2) == want


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
        pipe.engine.running.core.clear_prefix_cache()
        while events[-1] != {"type": "AllBlocksCleared"}:
            events, _ = collect(socket, 1)
    socket.close()


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid")
    save_model(make_model(HYBRID_MODELS[0]), path)
    return str(path)


def test_a_hybrid_engine_publishes_blocks_and_checkpoints_as_two_groups(hybrid_folder, tmp_path):
    endpoint = f"ipc://{tmp_path}/events"
    config = TurbomindEngineConfig(
        num_threads=1,
        session_len=256,
        cache_block_seq_len=BLOCK,
        cache_max_entry_count=8,  # blocks
        kv_events_config={"endpoint": endpoint, "topic": "kv"},
    )
    held = {0: set(), 1: set()}  # what a router knows, by group

    def follow(events):
        for event in events:
            if event["type"] == "AllBlocksCleared":
                for blocks in held.values():
                    blocks.clear()
                continue
            blocks = set(event["block_hashes"])
            if event["type"] == "BlockStored":
                assert not blocks & held[event["group_idx"]]
                held[event["group_idx"]] |= blocks
            else:
                assert blocks <= held[event["group_idx"]]
                held[event["group_idx"]] -= blocks

    with Pipeline(hybrid_folder, config) as pipe:
        socket = subscribe(endpoint)
        prompt = [7 + i for i in range(3 * BLOCK)]
        ask(pipe, prompt)
        events = collect(socket, 2)[0]
        attention, state = events
        follow(events)
        assert (attention["group_idx"], attention["kv_cache_spec_kind"]) == (0, "full_attention")
        assert attention["token_ids"] == prompt and len(attention["block_hashes"]) == 3
        assert (state["group_idx"], state["kv_cache_spec_kind"]) == (1, "mamba")
        # A prompt leaves checkpoints before its last token, which a hit computes, and after it.
        assert state["block_hashes"] == attention["block_hashes"][1:]
        assert state["parent_block_hash"] == attention["block_hashes"][0]
        assert state["token_ids"] == prompt[BLOCK:]
        for first in range(50, 70):
            ask(pipe, [first] * (2 * BLOCK))
        stats = pipe.engine.stats()
        assert 0 < stats.checkpoints_kept < 21  # the first ones were evicted
        want = (stats.blocks_cached, stats.checkpoints_kept)
        while (len(held[0]), len(held[1])) != want:  # or the socket's time limit ends the test
            follow(collect(socket, 1)[0])
        pipe.engine.running.core.clear_prefix_cache()
        while held[0]:
            follow(collect(socket, 1)[0])
        assert not held[1]
    socket.close()


def test_the_replay_socket_repeats_batches_from_a_number(tmp_path):
    address = f"ipc://{tmp_path}/replay"
    config = KvEventsConfig(f"ipc://{tmp_path}/events", replay_endpoint=address, buffer_steps=3)
    publisher = KvEventPublisher(config, block_tokens=2)
    for block in range(5):
        publisher._publish([removed_event(block)])
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 5000)
    dealer.connect(address)
    dealer.send_multipart([b"", b"short"])  # ignored
    dealer.send_multipart([b"", (3).to_bytes(8, "big")])
    received = [dealer.recv_multipart() for _ in range(3)]
    numbers = [int.from_bytes(part[1], "big", signed=True) for part in received]
    assert numbers == [3, 4, -1] and received[-1][2] == b""
    assert msgpack.unpackb(received[0][2])[1] == [encode_event(removed_event(3), block_tokens=2)]
    dealer.send_multipart([b"", bytes(8)])
    oldest = int.from_bytes(dealer.recv_multipart()[1], "big")
    assert oldest == 2  # three batches are kept
    publisher.close()
    publisher.close()
    dealer.close(linger=0)


def stored(num_blocks, *, first=0):
    """Return the event of a prefix whose blocks have two tokens each."""
    blocks = [2**63 + first + i for i in range(num_blocks)]
    tokens = [2**30 + i for i in range(2 * num_blocks)]
    event = SimpleNamespace(kind="stored", blocks=blocks, parent=9, tokens=tokens, salt=b"s" * 16)
    event.group = None
    return event


@contextmanager
def published(tmp_path, **options):
    """Yield a publisher at an address in a folder."""
    config = KvEventsConfig(
        f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay", **options
    )
    publisher = KvEventPublisher(config, block_tokens=2)
    try:
        yield publisher
    finally:
        publisher.close()


def dealer_of(tmp_path, **options):
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.rcvtimeo, dealer.sndtimeo, dealer.linger = 5000, 5000, 0
    for name, value in options.items():
        setattr(dealer, name, value)
    dealer.connect(f"ipc://{tmp_path}/replay")
    return dealer


def resident_bytes():
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def test_large_events_become_batches_of_limited_size(tmp_path):
    removed = removed_event(*range(5000))
    with published(tmp_path) as publisher:
        publisher._publish([stored(2000), removed, SimpleNamespace(kind="cleared")])
        batches = list(publisher._recent.values())
    assert max(map(len, batches)) <= (16 << 10) + 1024
    events = [event for batch in batches for event in msgpack.unpackb(batch)[1]]
    assert events.pop() == {"type": "AllBlocksCleared"}
    parent, blocks, tokens = 9, [], []
    for event in [event for event in events if event["type"] == "BlockStored"]:
        assert event["parent_block_hash"] == parent
        assert len(event["token_ids"]) == 2 * len(event["block_hashes"])
        assert len(event["extra_keys"]) == len(event["block_hashes"])
        parent = event["block_hashes"][-1]
        blocks += event["block_hashes"]
        tokens += event["token_ids"]
    assert (blocks, tokens) == (stored(2000).blocks, stored(2000).tokens)
    hashes = [block for event in events[-5:] for block in event["block_hashes"]]
    assert hashes[-1] == 4999


def test_a_subscriber_that_never_reads_costs_at_most_64_mib(tmp_path):
    with published(tmp_path, buffer_steps=1) as publisher:
        subscriber = zmq.Context.instance().socket(zmq.SUB)
        subscriber.subscribe(b"")
        subscriber.rcvhwm = 1
        subscriber.connect(f"ipc://{tmp_path}/events")
        time.sleep(0.2)
        before = resident_bytes()
        for i in range(200):  # 1.1 MB each
            publisher._publish([stored(20_000, first=i)])
        assert resident_bytes() - before < (64 << 20) * 1.1
        subscriber.close(linger=0)


def test_replays_are_bounded_in_bytes_and_lose_nothing_for_a_slow_client(tmp_path):
    with published(tmp_path) as publisher:
        for _ in range(100):
            publisher._publish([stored(20_000)])
        assert 60 << 20 < publisher._recent_bytes <= 64 << 20
        oldest, last = next(iter(publisher._recent)), publisher._next - 1
        clients = [dealer_of(tmp_path, rcvhwm=1) for _ in range(2)]
        for client in clients:
            client.send_multipart([b"", bytes(8)])
        time.sleep(0.3)  # every queue is full
        assert publisher._replays
        for client in clients:
            numbers = []
            while numbers[-1:] != [-1]:
                part = client.recv_multipart()[1]
                numbers.append(int.from_bytes(part, "big", signed=True))
            assert numbers == [*range(oldest, last + 1), -1]
            client.close()


def test_a_client_that_leaves_ends_its_replay(tmp_path):
    with published(tmp_path) as publisher:
        for _ in range(20):
            publisher._publish([stored(20_000)])
        client = dealer_of(tmp_path, rcvhwm=1)
        client.send_multipart([b"", bytes(8)])
        client.recv_multipart()
        assert publisher._replays
        client.close()
        end = time.monotonic() + 5
        while publisher._replays and time.monotonic() < end:
            time.sleep(0.01)
        assert not publisher._replays


def test_frames_that_are_too_long_end_their_connection(tmp_path):
    with published(tmp_path) as publisher:
        publisher._publish([removed_event(1)])
        hostile = dealer_of(tmp_path, reconnect_ivl=-1, rcvtimeo=300)
        hostile.send_multipart([b"", bytes(8) + bytes(1 << 20)])
        hostile.send_multipart([b"", bytes(8)])
        with pytest.raises(zmq.Again):
            hostile.recv_multipart()
        client = dealer_of(tmp_path)
        client.send_multipart([b"", bytes(8)])
        assert client.recv_multipart()[1] == bytes(8)
        hostile.close()
        client.close()


def test_too_many_subscriptions_begin_again(tmp_path, caplog):
    with published(tmp_path) as publisher:
        hostile = zmq.Context.instance().socket(zmq.SUB)
        hostile.reconnect_ivl, hostile.sndhwm = -1, 0
        hostile.connect(f"ipc://{tmp_path}/events")
        time.sleep(0.2)
        for i in range(5000):
            hostile.subscribe(b"%d" % i)
        removed = removed_event(1)
        end = time.monotonic() + 5
        while "too many" not in caplog.text and time.monotonic() < end:
            publisher._publish([removed])
            time.sleep(0.01)
        assert "too many" in caplog.text
        hostile.close(linger=0)
        subscriber = subscribe(f"ipc://{tmp_path}/events")
        publisher._publish([removed])
        assert subscriber.recv_multipart()[0] == b""
        subscriber.close()


def test_curve_admits_only_clients_with_a_known_key(tmp_path):
    if not zmq.has("curve"):
        pytest.skip("this libzmq has no CURVE")
    from zmq.auth import create_certificates, load_certificate

    for name in ("known", "server", "stranger"):
        create_certificates(tmp_path, name)
    (tmp_path / "clients").mkdir()
    (tmp_path / "known.key").rename(tmp_path / "clients" / "known.key")
    secret = tmp_path / "server.key_secret"
    options = {"curve_secret_key": str(secret), "curve_client_keys": f"{tmp_path}/clients"}
    secret.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"), published(tmp_path, **options):
        pass
    secret.chmod(0o600)
    server_key = load_certificate(tmp_path / "server.key")[0]

    def keys(name):
        public, private = load_certificate(tmp_path / f"{name}.key_secret")
        return {
            "curve_serverkey": server_key,
            "curve_publickey": public,
            "curve_secretkey": private,
            "rcvtimeo": 500,
            "sndtimeo": 500,
        }

    with published(tmp_path, **options) as publisher:
        publisher._publish([removed_event(1)])
        for wrong in ({"rcvtimeo": 500, "sndtimeo": 500}, keys("stranger")):
            client = dealer_of(tmp_path, **wrong)
            with pytest.raises(zmq.Again):  # of the request, if the server has hung up before it
                client.send_multipart([b"", bytes(8)])
                client.recv_multipart()
            client.close()
        client = dealer_of(tmp_path, **keys("known") | {"rcvtimeo": 5000})
        client.send_multipart([b"", bytes(8)])
        assert client.recv_multipart()[1] == bytes(8)
        client.close()
    for wrong, match in (
        ({"curve_client_keys": "x"}, "needs curve_secret_key"),
        ({"curve_secret_key": ""}, "a path"),
        ({**options, "curve_client_keys": f"{tmp_path}/none"}, "without any file"),
        ({"curve_secret_key": f"{tmp_path}/none"}, "cannot be read"),
    ):
        with pytest.raises(ValueError, match=match), published(tmp_path, **wrong):
            pass


@pytest.mark.parametrize(
    ("address", "want"),
    [
        ("tcp://127.0.0.1:5557", True),
        ("tcp://[::1]:5557", True),
        ("tcp://localhost:5557", True),
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://*:5557", False),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://eth0:5557", False),
        ("tcp://10.0.0.1:5557", False),
    ],
)
def test_addresses_that_other_machines_reach_are_recognized(address, want):
    assert is_local(address) == want


def test_an_open_address_is_a_warning(caplog):
    KvEventPublisher(KvEventsConfig("tcp://0.0.0.0:*"), block_tokens=2).close()
    assert "KV events leave this machine at tcp://0.0.0.0:* without encryption" in caplog.text
    caplog.clear()
    KvEventPublisher(KvEventsConfig("tcp://127.0.0.1:*"), block_tokens=2).close()
    assert caplog.text == ""


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
