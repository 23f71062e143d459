"""④ Remembers which replica has computed which beginnings of prompts."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np

Replica = TypeVar("Replica", bound=Hashable)

_BLOCK_TOKENS = 64  # beginnings are compared in steps of this many tokens
_DIGEST_BYTES = 8
_MAX_BLOCKS = 1 << 17  # about 70 MB
# A replica may have this many requests more than the least loaded one before its prefixes are also
# computed elsewhere.
_SLACK_FACTOR = 1.5
_SLACK_REQUESTS = 4


def prefix_keys(prompt: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """Return one key for each whole block of a prompt. It depends on all tokens up to its end.

    Prompts with different salts have no key in common.
    """
    tokens = np.asarray(prompt, dtype=np.int32)
    key = blake2b(salt, digest_size=_DIGEST_BYTES).digest()
    keys = []
    for first in range(0, len(tokens) - _BLOCK_TOKENS + 1, _BLOCK_TOKENS):
        block = tokens[first : first + _BLOCK_TOKENS].tobytes()
        key = blake2b(block, key=key, digest_size=_DIGEST_BYTES).digest()
        keys.append(key)
    return keys


class PrefixTable(Generic[Replica]):
    """Chooses replicas by their prefixes and their load.

    It learns only from `record`, so a replica may have evicted what the table says. Such a
    mistake costs the time to compute the prefix. At most `max_blocks` blocks are remembered. Those
    that were not used for the longest time are forgotten first.
    """

    def __init__(self, *, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, set[Replica]] = OrderedDict()
        self._num_blocks: Counter[Replica] = Counter()

    def __len__(self) -> int:
        """Return the number of blocks that are remembered."""
        return len(self._holders)

    def choose(self, keys: Sequence[bytes], loads: Mapping[Replica, int]) -> Replica:
        """Return the replica for a prompt.

        Args:
            keys: keys of the prompt.
            loads: available replicas, and the number of requests that each has now.

        Of the replicas that are not much busier than others, it is the one with the longest
        prefix. Of equal ones, it is the one with the fewest requests, then with the fewest blocks.
        """
        limit = min(loads.values()) * _SLACK_FACTOR + _SLACK_REQUESTS
        lengths = self._prefix_lengths(keys, {r for r, load in loads.items() if load <= limit})
        return min(lengths, key=lambda r: (-lengths[r], loads[r], self._num_blocks[r]))

    def record(self, keys: Sequence[bytes], replica: Replica) -> None:
        """Remember that a replica computes a prompt."""
        for key in reversed(keys):  # so that the end of a prefix is forgotten before its beginning
            holders = self._holders.setdefault(key, set())
            self._holders.move_to_end(key)
            if replica not in holders:
                holders.add(replica)
                self._num_blocks[replica] += 1
        while len(self._holders) > self._max_blocks:
            _, holders = self._holders.popitem(last=False)
            self._num_blocks.subtract(holders)

    def forget(self, replicas: set[Replica]) -> None:
        """Forget replicas that no longer exist."""
        if not any(self._num_blocks.pop(replica, 0) for replica in replicas):
            return
        for key, holders in list(self._holders.items()):
            holders -= replicas
            if not holders:
                del self._holders[key]

    def _prefix_lengths(self, keys: Sequence[bytes], replicas: set[Replica]) -> dict[Replica, int]:
        """Return the number of blocks at the beginning of a prompt that each replica has."""
        lengths = dict.fromkeys(replicas, 0)
        having = replicas
        for key in keys:
            having = having & self._holders.get(key, set())
            if not having:
                break
            for replica in having:
                lengths[replica] += 1
        return lengths
