"""Predict how many prompt tokens replicas find in their caches, and how their load differs.

    python benchmarks/simulate_routing.py --replicas 4 --users 64 --turns 20 --blocks 256
    python benchmarks/simulate_routing.py --replicas 100 --users 1000000 --groups 1000 \
        --active 20000 --requests 500000 --concurrent 1600 --blocks 16384

Users hold conversations: a beginning that the users of a group share, then turns. At most
`--active` users talk at a time, and each request comes from a random one of them. The router is
that of `lmdeploy serve ray`. A replica is a cache of blocks, the oldest of which are evicted, and a
queue in which each request takes time for the tokens that are not cached and for its answer.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import OrderedDict
from collections.abc import Iterator

from lmdeploy.replicas.prefix_table import PrefixTable

BLOCK_TOKENS = 64
PROMPT_TOKENS_PER_SECOND = 2000.0
ANSWER_SECONDS = 0.05

Key = tuple[str, int, int]  # "group" or "user", its number, and the block


class Replica:
    """The cache and the queue of an engine."""

    def __init__(self, blocks: int) -> None:
        self._max_blocks = blocks
        self._blocks: OrderedDict[Key, None] = OrderedDict()
        self._free_at = 0.0
        self.running = 0
        self.requests = 0

    def run(self, keys: list[Key], tokens: int, *, now: float) -> tuple[int, float]:
        """Take a request. Return its cached tokens and the time at which it ends."""
        hits = sum(1 for _ in itertools.takewhile(self._blocks.__contains__, keys))
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        cached = hits * BLOCK_TOKENS
        work = (tokens - cached) / PROMPT_TOKENS_PER_SECOND + ANSWER_SECONDS
        self._free_at = max(self._free_at, now) + work
        self.running += 1
        self.requests += 1
        return cached, self._free_at


def prompts(args: argparse.Namespace) -> Iterator[tuple[list[Key], int]]:
    """Yield the blocks and the length of each prompt."""
    shared = args.prefix_tokens // BLOCK_TOKENS if args.groups else 0
    for user, turn in itertools.islice(_talk(args), args.requests or None):
        tokens = args.prefix_tokens + turn * args.turn_tokens
        group = ("group", user % max(args.groups, 1))
        owners = itertools.chain(itertools.repeat(group, shared), itertools.repeat(("user", user)))
        numbered = enumerate(itertools.islice(owners, tokens // BLOCK_TOKENS))
        yield [(*owner, i) for i, owner in numbered], tokens


def _talk(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yield users and the turns of their conversations."""
    rng = random.Random(args.seed)
    if not args.active:  # all users, in a new order for each turn
        for turn in range(1, args.turns + 1):
            yield from ((user, turn) for user in rng.sample(range(args.users), args.users))
        return
    waiting = iter(range(args.users))
    talking = [[user, 0] for user in itertools.islice(waiting, args.active)]
    while talking:
        place = rng.randrange(len(talking))
        talking[place][1] += 1
        user, turn = talking[place]
        yield user, turn
        if turn == args.turns:
            talking[place] = talking[-1]
            talking.pop()
            talking += [[user, 0] for user in itertools.islice(waiting, 1)]


def simulate(args: argparse.Namespace, *, by_prefix: bool) -> dict[str, float]:
    """Run all requests, with `concurrent` of them at a time. Return the figures."""
    replicas = [Replica(args.blocks) for _ in range(args.replicas)]
    table: PrefixTable[int] = PrefixTable(max_blocks=args.table_blocks)
    turn = itertools.cycle(range(args.replicas))
    running: list[tuple[float, int]] = []
    now, cached, total = 0.0, 0, 0
    for keys, tokens in prompts(args):
        if len(running) == args.concurrent:
            now, ended = heapq.heappop(running)
            replicas[ended].running -= 1
        if by_prefix:
            names = [repr(key).encode() for key in keys]
            loads = {i: replica.running for i, replica in enumerate(replicas)}
            chosen = table.choose(names, loads)
            table.record(names, chosen)
        else:
            chosen = next(turn)
        found, end = replicas[chosen].run(keys, tokens, now=now)
        heapq.heappush(running, (end, chosen))
        cached, total = cached + found, total + tokens
    counts = [replica.requests for replica in replicas]
    return {
        "cached": round(cached / total, 3),
        "max_over_min_requests": round(max(counts) / max(min(counts), 1), 2),
        "table_blocks": len(table),
    }


def main() -> None:
    """Print one line of JSON for each kind of routing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--groups", type=int, default=0, help="0: no two users share a beginning")
    parser.add_argument("--active", type=int, default=0, help="users at a time; 0: all, in rounds")
    parser.add_argument("--turns", type=int, default=20, help="of a conversation")
    parser.add_argument("--prefix-tokens", type=int, default=256)
    parser.add_argument("--turn-tokens", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=256, help="of the cache of a replica")
    parser.add_argument("--table-blocks", type=int, default=1 << 17, help="that the router knows")
    parser.add_argument("--concurrent", type=int, default=8, help="requests at a time")
    parser.add_argument("--requests", type=int, default=0, help="0: all of them")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for routing in ("prefix", "in turns"):
        figures = simulate(args, by_prefix=routing == "prefix")
        print(json.dumps({"routing": routing, **figures}))


if __name__ == "__main__":
    main()
