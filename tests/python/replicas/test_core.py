"""Tests of requests that move from one replica to another. The replicas live in this process."""

from __future__ import annotations

import asyncio
import time

import pytest
from tiny_models import TINY_MODELS, make_model, save_model

from lmdeploy import GenerationConfig, TurbomindEngineConfig
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.engine.load import Core, TextOptions, load_engine_with
from lmdeploy.replicas.callers import Callers
from lmdeploy.replicas.core import Patience, ReplicatedCore
from lmdeploy.replicas.replica import EngineReplica
from lmdeploy.replicas.transport import CALLER, CORE, MAILBOX, TICKET, First, request_fields
from lmdeploy.response import join_pieces

PROMPT = list(range(3, 40))
CONFIG = TurbomindEngineConfig(
    num_threads=1, session_len=256, cache_max_entry_count=40, deterministic=True
)
NUM_NEW = 40
DEAD = ConnectionError("dead")
REGEX = {"type": "regex_schema", "regex_schema": "[a-z ]{60}"}
OPTIONS = {
    "greedy": GenerationConfig(max_new_tokens=NUM_NEW, ignore_eos=True),
    "seeded": GenerationConfig(
        max_new_tokens=NUM_NEW,
        ignore_eos=True,
        do_sample=True,
        temperature=1.2,
        random_seed=7,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
    ),
    "logprobs": GenerationConfig(
        max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=2, prompt_logprobs=1
    ),
    "logits": GenerationConfig(max_new_tokens=8, ignore_eos=True, output_logits="generation"),
    "grammar": GenerationConfig(
        max_new_tokens=NUM_NEW, do_sample=True, random_seed=3, response_format=REGEX
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_model(make_model(TINY_MODELS[0]), tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def replica(folder):
    replica = EngineReplica(folder, CONFIG, log_level="WARNING", find_id=lambda: "a")
    yield replica
    replica._engine.close()


class Call:
    """A call of a replica. Cancelling it closes the generator on the replica."""

    def __init__(self, items, *, limit=None, failure=None):
        self._items = items
        self._limit = limit
        self._failure = failure
        self.is_cancelled = False

    async def __aiter__(self):
        try:
            async for item in self._items:
                yield item if self._limit is None else self._limit.cut(item)
                if self._limit is not None and self._limit.is_reached:
                    if self._failure is None:
                        await asyncio.sleep(60)
                    raise self._failure
        finally:
            await self._items.aclose()

    def cancel(self):
        self.is_cancelled = True


class Limit:
    """Counts the tokens of a request up to the last one that its replica sends."""

    def __init__(self, num_tokens):
        self._num_left = num_tokens

    @property
    def is_reached(self):
        return self._num_left <= 0

    def cut(self, item):
        """Return an item without the outputs beyond the limit."""
        if item is None or isinstance(item, First):
            self._num_left -= len(item.output.tokens) if item else 0
            return item
        kept = []
        for ticket, output in item:
            if not self.is_reached:
                kept.append((ticket, output))
            self._num_left -= len(output.tokens)
        return kept


class Fleet:
    """Replicas that break after the given numbers of tokens. The last one is sound.

    With 0 tokens, a replica breaks at its first sign of life.
    """

    def __init__(self, replica, limits, *, failure=DEAD):
        self._replica = replica
        self._limits = list(limits)
        self._limit = None
        self._failure = failure
        self.requests = []  # the fields that each replica received
        self.calls = []

    def generate(self, fields):
        self._limit = Limit(self._limits.pop(0)) if self._limits else None
        self.requests.append(fields)
        items = self._replica.generate(fields)
        return self._call(_broken() if self._limit and self._limit.is_reached else items)

    def read(self, fields):
        return self._call(self._replica.read(fields))

    def _call(self, items):
        self.calls.append(Call(items, limit=self._limit, failure=self._failure))
        return self.calls[-1]

    def core(self, **options):
        plan = self._replica.describe()["plan"]
        return ReplicatedCore(self.generate, read=self.read, plan=plan, **options)


async def _broken():
    yield None


def ask(folder, fleet, options, *, patience=None):
    """Return the response of an engine whose core is the fleet."""
    core = fleet.core(patience=patience)
    engine = AsyncEngine(
        load_engine_with(
            folder,
            CONFIG,
            options=TextOptions(),
            start_core=lambda: Core(core, lambda: None),
        )
    )

    async def run():
        return join_pieces([chunk async for chunk in engine.generate(PROMPT, options)])

    try:
        return asyncio.run(run())
    finally:
        engine.close()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_response_equals_the_unbroken_one(folder, replica, name):
    options = OPTIONS[name]
    whole = ask(folder, Fleet(replica, []), options)
    assert whole.generate_token_len > 5
    fleet = Fleet(replica, [0, 3, 1, 2])
    broken = ask(folder, fleet, options)
    resumed = [fields["num_resumed"] for fields in fleet.requests]
    assert resumed == sorted(resumed) and resumed[0] == 0 and resumed[-1] >= 6
    assert broken.token_ids == whole.token_ids and broken.text == whole.text
    assert broken.finish_reason == whole.finish_reason
    assert broken.input_token_len == len(PROMPT)
    assert broken.logprobs == whole.logprobs
    assert broken.prompt_logprobs == whole.prompt_logprobs
    if whole.logits is not None:
        assert (broken.logits == whole.logits).all()


def test_a_silent_replica_is_given_up(folder, replica):
    options = OPTIONS["greedy"]
    whole = ask(folder, Fleet(replica, []), options)
    fleet = Fleet(replica, [4], failure=None)
    start = time.monotonic()
    response = ask(folder, fleet, options, patience=Patience(silent_seconds=1))
    assert 1 < time.monotonic() - start < 15
    assert response.token_ids == whole.token_ids
    assert all(call.is_cancelled for call in fleet.calls[:2])  # in case it was only slow


def test_a_request_that_no_replica_continues_fails(folder, replica):
    fleet = Fleet(replica, [0] * 1000)
    response = ask(folder, fleet, OPTIONS["greedy"], patience=Patience(lost_seconds=0.3))
    assert response.finish_reason == "error" and response.error_code == "engine_error"
    assert "No replica answered: dead" in response.error_message
    assert 1 < len(fleet.requests) < 20


def test_logits_of_all_positions_are_not_sent_twice(folder, replica):
    options = GenerationConfig(max_new_tokens=8, ignore_eos=True, output_logits="all")
    fleet = Fleet(replica, [3])
    assert ask(folder, fleet, options).finish_reason == "error"
    assert len(fleet.requests) == 1


def test_a_cancelled_request_ends_and_reaches_the_replica(replica):
    fleet = Fleet(replica, [4], failure=None)
    core = fleet.core()
    request = replica._engine.loaded.new_request()
    request.id, request.prompt, request.max_new_tokens = 5, PROMPT, 100
    request.ignore_eos = True
    core.submit(request)
    while not core.wait_outputs(100):
        pass
    core.cancel(5)
    core.cancel(6)
    outputs = []
    while not outputs or outputs[-1].finish_reason == "none":
        outputs += core.wait_outputs(1000)
    assert outputs[-1].finish_reason == "cancelled" and fleet.calls[0].is_cancelled
    assert core.stats().num_running == 0
    core.close()
    core.close()


def test_a_wrong_request_is_not_tried_again(replica):
    core = Fleet(replica, []).core()
    request = replica._engine.loaded.new_request()
    request.prompt, request.max_new_tokens = [], 4
    core.submit(request)
    (output,) = core.wait_outputs(5000)
    assert output.finish_reason == "error" and output.is_request_fault
    assert "no tokens" in output.error
    core.close()


@pytest.mark.parametrize("failure", [None, ConnectionError("no head node")])
def test_requests_of_a_caller_that_has_ended_are_dropped(replica, monkeypatch, failure):
    def find_dead():
        if failure is not None:
            raise failure
        return {"01"}

    monkeypatch.setattr(replica, "_callers", Callers(find_dead, period_seconds=0.01))
    request = replica._engine.loaded.new_request()
    request.prompt, request.max_new_tokens, request.ignore_eos = PROMPT, 200, True

    async def ends(caller):
        """Return whether the calls of a core of this caller have sent the last output."""
        fields = {**request_fields(request), CALLER: caller, CORE: caller, TICKET: 0}
        finish_reasons = []
        async for first in replica.generate(fields):
            if first is not None:
                letters = replica.read({CALLER: caller, MAILBOX: first.mailbox})
                async for group in letters:
                    finish_reasons += [output.finish_reason for _, output in group]
                    if "length" in finish_reasons:
                        break
                await letters.aclose()
        return "length" in finish_reasons

    async def both():
        return await asyncio.gather(ends("01"), ends("02"))

    assert asyncio.run(both()) == [bool(failure), True]
    deadline = time.monotonic() + 10
    while replica._engine.loaded.cpp_engine.stats().num_running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
