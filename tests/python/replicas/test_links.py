"""Tests of the calls that hand outputs to requests. The replicas are scripts."""

from __future__ import annotations

import asyncio

import pytest

from lmdeploy.replicas.links import Links, LostReplica
from lmdeploy.replicas.transport import First, Output


class Script:
    """A call that sends items. None at the end keeps it open; an exception breaks it."""

    def __init__(self, *items):
        self._items = items
        self.is_cancelled = False

    async def __aiter__(self):
        for item in self._items:
            if isinstance(item, Exception):
                raise item
            if item == "silence":
                await asyncio.sleep(60)
            await asyncio.sleep(0)
            yield item

    def cancel(self):
        self.is_cancelled = True


def output(token, finish_reason="none"):
    return Output(0, tokens=[token], finish_reason=finish_reason)


def first(token, mailbox="m"):
    return First(output(token), "r", mailbox)


def links_of(*scripts, silent_seconds=0.5):
    """Return links whose mailboxes send these scripts, and the list of mailboxes that were read."""
    waiting, opened = list(scripts), []

    def read(item):
        opened.append(item)
        return waiting.pop(0)

    return Links(read, silent_seconds=silent_seconds), opened


async def collect(links, ticket, *, call, count):
    """Return the first tokens of a request."""
    tokens = []
    outputs = links.outputs(ticket, call)
    async for item in outputs:
        tokens += item.tokens
        if len(tokens) == count:
            break
    await outputs.aclose()
    return tokens


def test_requests_share_one_call_and_each_gets_its_outputs():
    async def run():
        letters = [[(0, output(11)), (1, output(21))], [], [(1, output(22)), (0, output(12))]]
        links, opened = links_of(Script(*letters, "silence"))
        tickets = [links.new_ticket(), links.new_ticket()]
        calls = [Script(None, first(10)), Script(first(20))]
        pairs = zip(tickets, calls, strict=True)
        found = await asyncio.gather(
            *(collect(links, ticket, call=call, count=3) for ticket, call in pairs)
        )
        assert found == [[10, 11, 12], [20, 21, 22]]
        assert opened == [first(10)] or opened == [first(20)]
        await links.close()

    asyncio.run(run())


def test_outputs_that_arrive_before_the_first_one_follow_it():
    async def run():
        links, _ = links_of(Script([(1, output(21)), (0, output(11))], "silence"))
        early, late = links.new_ticket(), links.new_ticket()
        assert await collect(links, early, call=Script(first(10)), count=2) == [10, 11]
        assert await collect(links, late, call=Script(first(20)), count=2) == [20, 21]
        await links.close()

    asyncio.run(run())


@pytest.mark.parametrize("end", [ConnectionError("dead"), ValueError("bad bytes"), "silence", None])
def test_a_broken_mailbox_ends_all_its_requests(end):
    async def run():
        script = Script([(0, output(11))], *([] if end is None else [end]))
        links, _ = links_of(script, silent_seconds=0.1)
        tickets = [links.new_ticket(), links.new_ticket()]
        calls = [Script(first(10)), Script(first(20))]
        pairs = zip(tickets, calls, strict=True)
        found = await asyncio.gather(
            *(collect(links, ticket, call=call, count=3) for ticket, call in pairs),
            return_exceptions=True,
        )
        assert [type(error) for error in found] == [LostReplica, LostReplica]
        await asyncio.sleep(0)
        assert script.is_cancelled

    asyncio.run(run())


def test_a_request_without_a_sign_of_life_before_its_first_output_is_lost():
    async def run():
        links, opened = links_of(silent_seconds=0.1)
        with pytest.raises(LostReplica, match="silent"):
            await collect(links, links.new_ticket(), call=Script(None, "silence"), count=1)
        assert not opened

    asyncio.run(run())


def test_outputs_of_a_cancelled_request_are_dropped():
    async def run():
        letters = [[(0, output(11)), (1, output(21))]] * 2
        links, _ = links_of(Script(*letters, "silence"))
        assert await collect(links, links.new_ticket(), call=Script(first(10)), count=1) == [10]
        ticket = links.new_ticket()
        assert await collect(links, ticket, call=Script(first(20)), count=3) == [20, 21, 21]
        await links.close()

    asyncio.run(run())
