"""Tests of the mailboxes of a replica."""

from __future__ import annotations

import asyncio

import pytest

from lmdeploy.replicas.mailbox import Mailboxes
from lmdeploy.replicas.transport import Output


def output(token):
    return Output(0, tokens=[token])


def tokens(letters):
    return [(ticket, output.tokens) for ticket, output in letters]


def test_one_message_has_the_outputs_of_all_requests_in_their_order():
    async def run():
        boxes = Mailboxes()
        mailbox = boxes.enter("a")
        assert boxes.enter("a") is mailbox
        for ticket, token in [(1, 10), (2, 20), (1, 11)]:
            mailbox.put(ticket, output(token))
        letters = boxes.read(mailbox.name)
        assert tokens(await anext(letters)) == [(1, [10]), (2, [20]), (1, [11])]
        mailbox.put(2, output(21))
        assert tokens(await anext(letters)) == [(2, [21])]
        await letters.aclose()

    asyncio.run(run())


def test_each_core_has_its_own_mailbox():
    async def run():
        boxes = Mailboxes()
        assert boxes.enter("a").name != boxes.enter("b").name

    asyncio.run(run())


def test_a_mailbox_without_outputs_sends_a_sign_of_life(monkeypatch):
    monkeypatch.setattr("lmdeploy.replicas.mailbox.HEARTBEAT_SECONDS", 0.01)

    async def run():
        boxes = Mailboxes()
        letters = boxes.read(boxes.enter("a").name)
        assert [await anext(letters) for _ in range(3)] == [[], [], []]

    asyncio.run(run())


def test_an_idle_mailbox_ends_and_the_next_request_has_a_new_one(monkeypatch):
    monkeypatch.setattr("lmdeploy.replicas.mailbox.HEARTBEAT_SECONDS", 0.01)

    async def run():
        boxes = Mailboxes(idle_seconds=0.05)
        mailbox = boxes.enter("a")
        letters = boxes.read(mailbox.name)
        for _ in range(10):  # longer than idle_seconds, but with a request
            assert await anext(letters) == []
        boxes.leave(mailbox)
        assert all([group == [] async for group in letters])
        assert boxes.enter("a").name != mailbox.name

    asyncio.run(run())


def test_a_mailbox_is_read_once():
    async def run():
        boxes = Mailboxes()
        mailbox = boxes.enter("a")
        mailbox.put(1, output(10))
        letters = boxes.read(mailbox.name)
        await anext(letters)
        with pytest.raises(LookupError, match="is not open"):
            await anext(boxes.read(mailbox.name))
        await letters.aclose()  # the reader breaks, so no other one may miss its outputs
        with pytest.raises(LookupError, match="is not open"):
            await anext(boxes.read(mailbox.name))
        assert boxes.enter("a").name != mailbox.name

    asyncio.run(run())


def test_a_mailbox_that_nobody_reads_ends_with_its_last_request():
    async def run():
        boxes = Mailboxes()
        mailbox = boxes.enter("a")
        boxes.enter("a")
        boxes.leave(mailbox)
        assert boxes.enter("a") is mailbox
        boxes.leave(mailbox)
        boxes.leave(mailbox)
        assert boxes.enter("a") is not mailbox

    asyncio.run(run())


def test_outputs_of_a_request_that_has_ended_wait_for_their_reader():
    async def run():
        boxes = Mailboxes()
        mailbox = boxes.enter("a")
        mailbox.put(1, output(10))
        boxes.leave(mailbox)  # before the call that reads it has arrived
        letters = boxes.read(mailbox.name)
        assert tokens(await anext(letters)) == [(1, [10])]
        await letters.aclose()

    asyncio.run(run())


def test_outputs_of_a_core_that_never_reads_are_dropped():
    async def run():
        boxes = Mailboxes(idle_seconds=0.01)
        mailbox = boxes.enter("a")
        mailbox.put(1, output(10))
        boxes.leave(mailbox)
        await asyncio.sleep(0.02)
        boxes.enter("b")
        with pytest.raises(LookupError, match="is not open"):
            await anext(boxes.read(mailbox.name))

    asyncio.run(run())
