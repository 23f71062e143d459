"""④ Sends each request to the replica of Ray Serve that has the beginning of its prompt."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from lmdeploy.replicas.prefix_table import PrefixTable, prefix_keys
from lmdeploy.replicas.transport import StreamAddress, Submission

_MAX_TRIED = 1 << 14  # requests whose replicas are remembered
_AVOID_SECONDS = 5.0  # Ray needs about 10 s to replace a replica that hangs


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Chooses by prefix and load. A request that continues goes to a replica it was not on.

    The replica that it leaves gets no other request for a while if there are others.
    """

    def initialize_state(self, **_: Any) -> None:
        """Begin with an empty table. Ray calls this once."""
        self._table: PrefixTable[ReplicaID] = PrefixTable()
        self._running: Counter[ReplicaID] = Counter()
        self._tried: OrderedDict[int, list[ReplicaID]] = OrderedDict()
        self._left_at: dict[ReplicaID, float] = {}  # when a request left a replica

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the best replica, then the others."""
        found = self.select_available_replicas(candidate_replicas)
        if not found:
            return []
        call = pending_request.args[0] if pending_request and pending_request.args else None
        if isinstance(call, StreamAddress):  # other replicas refuse the call
            owner = [r for r in found if r.replica_id.unique_id == call.replica]
            return [owner or found]
        if not isinstance(call, Submission):
            return [found]
        now = time.monotonic()
        tried = self._tried.get(call.request_id, [])
        if tried:
            self._left_at[tried[-1]] = now
        fresh = [r for r in found if r.replica_id not in tried] or found
        limit = now - _AVOID_SECONDS
        usable = [r for r in fresh if self._left_at.get(r.replica_id, limit) <= limit] or fresh
        loads = {r.replica_id: self._running[r.replica_id] for r in usable}
        keys = prefix_keys(call.fields["prompt"], call.fields["cache_salt"])
        best = self._table.choose(keys, loads)
        self._table.record(keys, best)
        self._remember(call.request_id, best)
        return [
            [r for r in usable if r.replica_id == best],
            [r for r in found if r.replica_id != best],
        ]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that is sent. Ray calls this."""
        super().on_send_request(replica_id)
        self._running[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a request. Ray calls this, also if the request failed."""
        self._running[replica_id] = max(self._running[replica_id] - 1, 0)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that exist now. Ray calls this."""
        gone = set(self.curr_replicas) - {replica.replica_id for replica in replicas}
        self._table.forget(gone)
        for replica_id in gone:
            del self._running[replica_id]
            self._left_at.pop(replica_id, None)
        super().update_replicas(replicas)

    def _remember(self, request_id: int, replica_id: Any) -> None:
        self._tried.setdefault(request_id, []).append(replica_id)
        while len(self._tried) > _MAX_TRIED:
            self._tried.popitem(last=False)
