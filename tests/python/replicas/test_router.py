"""Tests of the router of Ray Serve, with replicas that are only names."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve")

from lmdeploy.replicas.router import PrefixRouter
from lmdeploy.replicas.transport import StreamAddress, Submission

REPLICAS = [SimpleNamespace(replica_id=name) for name in "ab"]


class Router(PrefixRouter):
    """A router without Ray's queues: all replicas are available."""

    def __init__(self):
        self.initialize_state()

    def select_available_replicas(self, candidates=None):
        return candidates


def choose(router, prompt, *, request_id, salt=b""):
    call = Submission("client", request_id, 0, {"prompt": prompt, "cache_salt": salt})
    ranks = asyncio.run(router.choose_replicas(REPLICAS, SimpleNamespace(args=[call])))
    assert sorted(replica.replica_id for rank in ranks for replica in rank) == ["a", "b"]
    return ranks[0][0].replica_id


def test_conversations_spread_and_each_stays_on_its_replica():
    router = Router()
    prompts = [[i] * 128 for i in range(8)]
    first = [choose(router, prompt, request_id=i) for i, prompt in enumerate(prompts)]
    assert sorted(first) == ["a"] * 4 + ["b"] * 4
    again = [choose(router, [*p, *p], request_id=8 + i) for i, p in enumerate(prompts)]
    assert again == first


def test_another_salt_does_not_follow_a_prefix():
    router = Router()
    first = choose(router, [1] * 128, request_id=0, salt=b"x")
    assert choose(router, [1] * 128, request_id=1, salt=b"y") != first
    assert choose(router, [1] * 128, request_id=2, salt=b"x") == first


def test_a_request_that_continues_goes_to_another_replica():
    router = Router()
    first = choose(router, [1] * 128, request_id=0)
    assert choose(router, [1] * 130, request_id=0) != first
    assert choose(router, [1] * 130, request_id=0) in ("a", "b")  # both were tried


def test_a_replica_that_a_request_has_left_is_avoided_for_a_while(monkeypatch):
    router = Router()
    prompt = [1] * 128
    hung = choose(router, prompt, request_id=0)
    assert choose(router, prompt, request_id=1) == hung
    other = choose(router, prompt, request_id=0)
    assert other != hung
    assert {choose(router, [i] * 128, request_id=i) for i in range(2, 9)} == {other}
    monkeypatch.setattr("lmdeploy.replicas.router._AVOID_SECONDS", 0)
    assert choose(router, [9] * 128, request_id=9) == hung


def test_an_output_stream_is_read_on_its_replica():
    ids = [SimpleNamespace(unique_id=name) for name in "abc"]
    replicas = [SimpleNamespace(replica_id=name) for name in ids]

    def owners(name):
        pending = SimpleNamespace(args=[StreamAddress(name, "stream")])
        return asyncio.run(Router().choose_replicas(replicas, pending))

    assert owners("b") == [[replicas[1]]]
    assert owners("gone") == [replicas]  # each of them refuses the call
