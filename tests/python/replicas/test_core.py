"""Tests of requests that move from one replica to another. The replicas live in this process."""

from __future__ import annotations

import asyncio
import time

import pytest
from tiny_models import TINY_MODELS, make_model, save_model

from lmdeploy import GenerationConfig, TurbomindEngineConfig
from lmdeploy._turbomind import Request
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.engine.core import StartedCore
from lmdeploy.engine.load import load_engine
from lmdeploy.replicas import output_stream
from lmdeploy.replicas.core import ReplicatedCore
from lmdeploy.replicas.replica import EngineReplica
from lmdeploy.replicas.transport import StreamAddress, Submission, request_fields
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
    replica = EngineReplica(folder, CONFIG, log_level="WARNING", replica_id="a")
    yield replica
    replica._engine.close()


class Call:
    """A call of a replica, which runs on its own, as in Ray.

    `cut` changes each item, and returns True after the last one that arrives.
    """

    def __init__(self, items, *, failure=None, cut=lambda item: (item, False)):
        self._sent = asyncio.Queue()
        self._task = asyncio.create_task(self._run(items, cut, failure))
        self.is_cancelled = False

    async def _run(self, items, cut, failure):
        last = StopAsyncIteration()
        try:
            async for item in items:
                item, is_last = cut(item)
                self._sent.put_nowait(item)
                if is_last and failure is None:
                    await asyncio.sleep(60)
                if is_last:
                    raise failure
        except BaseException as error:
            last = error
        finally:
            await items.aclose()
            self._sent.put_nowait(last)

    def __aiter__(self):
        return self

    async def __anext__(self):
        item = await self._sent.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self):
        self.is_cancelled = True
        self._task.cancel()


class Fleet:
    """Replicas that break after they have sent these numbers of tokens. The last one is sound.

    With 0 tokens, a replica breaks before it sends the address of its output stream.
    """

    def __init__(self, replica, limits, *, failure=DEAD):
        self._replica = replica
        self._limits = list(limits)
        self._failure = failure
        self.submissions = []
        self.calls = []

    def generate(self, submission):
        self.submissions.append(submission)
        if self._limits and self._limits[0] == 0:
            self._limits.pop(0)
            return self._call(script(self._failure))
        return self._call(self._replica.generate(submission))

    def read(self, address):
        return self._call(self._replica.read(address), cut=self._cut)

    def _cut(self, batch):
        """Return a batch without the outputs after the limit, and whether it is reached."""
        if not self._limits:
            return batch, False
        kept = []
        while batch and self._limits[0] > 0:
            kept.append(batch.pop(0))
            self._limits[0] -= len(kept[-1]["tokens"])
        is_last = self._limits[0] <= 0
        if is_last:
            self._limits.pop(0)
        return kept, is_last

    def _call(self, items, **options):
        self.calls.append(Call(items, failure=self._failure, **options))
        return self.calls[-1]

    def core(self, **options):
        plan = self._replica.describe()["plan"]
        return ReplicatedCore(self.generate, read=self.read, plan=plan, **options)


async def script(*items):
    """Yield items. An exception is raised, and a number is a pause in seconds."""
    for item in items:
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, float):
            await asyncio.sleep(item)
        else:
            yield item


def new_request(request_id, **fields):
    values = {"id": request_id, "prompt": PROMPT, "max_new_tokens": 100, "ignore_eos": True}
    return Request.from_dict(values | fields)


def wait_for_ends(core, count):
    """Return the outputs of a core until this many requests have ended."""
    outputs, num_ended = [], 0
    deadline = time.monotonic() + 30
    while num_ended < count:
        assert time.monotonic() < deadline
        outputs += (found := core.wait_outputs(100))
        num_ended += sum(output.finish_reason != "none" for output in found)
    return outputs


def ask(folder, fleet, options, **core_options):
    """Return the response of an engine whose core is the fleet."""
    core = fleet.core(**core_options)
    engine = AsyncEngine(*load_engine(folder, CONFIG, start_core=lambda: StartedCore(core)))

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
    resumed = [item.fields["num_resumed"] for item in fleet.submissions]
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
    response = ask(folder, fleet, options, heartbeat_timeout=1)
    assert 1 < time.monotonic() - start < 15
    assert response.token_ids == whole.token_ids
    assert all(call.is_cancelled for call in fleet.calls[:2])  # in case it was only slow


def test_a_request_that_no_replica_continues_fails(folder, replica):
    fleet = Fleet(replica, [0] * 1000)
    response = ask(folder, fleet, OPTIONS["greedy"], resume_timeout=0.3)
    assert response.finish_reason == "error" and response.error_code == "engine_error"
    assert "No replica answered: dead" in response.error_message
    assert 1 < len(fleet.submissions) < 20


def test_logits_of_all_positions_are_not_sent_twice(folder, replica):
    options = GenerationConfig(max_new_tokens=8, ignore_eos=True, output_logits="all")
    fleet = Fleet(replica, [3])
    assert ask(folder, fleet, options).finish_reason == "error"
    assert len(fleet.submissions) == 1


def test_requests_on_one_replica_share_a_stream_and_survive_its_loss(replica):
    def tokens_of(fleet):
        core = fleet.core()
        for i in range(3):
            core.submit(new_request(i, prompt=PROMPT[i:]))
        outputs = wait_for_ends(core, 3)
        core.close()
        return [[t for out in outputs if out.request_id == i for t in out.tokens] for i in range(3)]

    whole = Fleet(replica, [])
    fleet = Fleet(replica, [60, 90])
    assert tokens_of(fleet) == tokens_of(whole)
    assert len(fleet.submissions) > 5 and len(whole.submissions) == 3
    assert all(fields["num_resumed"] for fields in [item.fields for item in fleet.submissions[6:]])


def test_a_cancelled_request_ends_and_reaches_the_replica(replica):
    fleet = Fleet(replica, [4], failure=None)
    core = fleet.core()
    core.submit(new_request(5))
    while not core.wait_outputs(100):
        pass
    core.cancel(5)
    core.cancel(6)
    assert wait_for_ends(core, 1)[-1].finish_reason == "cancelled" and fleet.calls[0].is_cancelled
    assert core.stats().num_running == 0
    core.close()
    core.close()


@pytest.mark.parametrize(
    ("fields", "error_field"),
    [
        ({"prompt": []}, ""),
        ({"stop_sequences": [[]]}, "stop_sequences"),
        ({"grammar": "no grammar"}, "response_format"),
        ({"top_p": 2.0}, "top_p"),
    ],
)
def test_a_wrong_request_is_not_tried_again(replica, monkeypatch, fields, error_field):
    monkeypatch.setattr(
        "lmdeploy.replicas.core.request_fields", lambda request: request_fields(request) | fields
    )
    fleet = Fleet(replica, [])
    core = fleet.core()
    core.submit(new_request(1))
    (output,) = wait_for_ends(core, 1)
    assert output.finish_reason == "error" and output.is_request_fault and output.error
    assert output.error_field == error_field
    assert len(fleet.submissions) == 1
    core.close()


def test_requests_of_a_client_that_does_not_read_are_dropped(replica, monkeypatch):
    class Endless:
        """An engine whose requests never end."""

        def __init__(self):
            self.forgotten = []

        async def relay(self, request, sink):
            request.id = 7

        def forget(self, request_id):
            self.forgotten.append(request_id)

    async def run():
        call = replica.generate(Submission("killed", 1, 1, fields))
        await asyncio.wait_for(anext(call), 10)
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(call), 10)
        return replica._engine.forgotten

    fields = request_fields(new_request(1))
    monkeypatch.setattr(output_stream, "_TIMEOUT_SECONDS", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(replica, "_engine", Endless())
        assert asyncio.run(run()) == [7]


def scripted_core(generated, read):
    """Return a core whose calls are scripts, and the list of the addresses that it has read."""
    addresses = []

    def next_read(address):
        addresses.append(address)
        return Call(script(*read.pop(0)))

    core = ReplicatedCore(lambda _: Call(script(*generated.pop(0))), read=next_read, plan={})
    return core, addresses


def last(attempt):
    return {"request_id": attempt, "tokens": [attempt], "finish_reason": "length"}


def test_a_lost_stream_is_not_read_again(replica):
    a, b, c = (StreamAddress("r", name) for name in "abc")
    calls = [[a, 60.0], [0.3, a, 60.0], [b, 60.0], [c, 60.0]]  # the second address arrives late
    reads = [[0.1, DEAD], [0.3, [last(2)], 60.0], [0.3, [last(3)], 60.0]]
    core, addresses = scripted_core(calls, reads)
    core.submit(new_request(0))
    core.submit(new_request(1))
    assert [output.tokens for output in wait_for_ends(core, 2)] == [[2], [3]]
    assert addresses == [a, b, c]
    core.close()


def test_a_call_that_ray_cancels_does_not_cancel_the_request(replica):
    a, b = (StreamAddress("r", name) for name in "ab")
    calls = [[asyncio.CancelledError()], [a, 60.0], [b, 60.0]]
    reads = [[asyncio.CancelledError()], [[], [last(2)], 60.0]]
    core, _ = scripted_core(calls, reads)
    core.submit(new_request(0))
    assert [output.finish_reason for output in wait_for_ends(core, 1)] == ["length"]
    core.close()


def test_a_stream_is_read_by_one_call_after_another(replica):
    a = StreamAddress("r", "a")
    output = {"request_id": 0, "tokens": [5]}
    core, addresses = scripted_core([[a, 60.0]], [[[], [output]], [[]], [[last(0)], 60.0]])
    core.submit(new_request(0))
    assert [output.tokens for output in wait_for_ends(core, 1)] == [[5], [0]]
    assert addresses == [a, a, a]
    core.close()
