"""④ Sends each request to the replica of Ray Serve that has the beginning of its prompt."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from lmdeploy.replicas.prefix_table import PrefixTable, prefix_keys
from lmdeploy.replicas.transport import REQUEST_ID

_MAX_TRIED = 1 << 14  # requests whose replicas are remembered


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Chooses by prefix and load. A request that continues goes to a replica it was not on."""

    def initialize_state(self, **_: Any) -> None:
        """Begin with an empty table. Ray calls this once."""
        self._table: PrefixTable[ReplicaID] = PrefixTable()
        self._running: Counter[ReplicaID] = Counter()
        self._tried: OrderedDict[int, set[ReplicaID]] = OrderedDict()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the best replica, then the others."""
        found = self.select_available_replicas(candidate_replicas)
        if not found:
            return []
        fields = _fields_of(pending_request)
        if fields is None:
            return [found]
        tried = self._tried.get(fields[REQUEST_ID], set())
        usable = [r for r in found if r.replica_id not in tried] or found
        loads = {r.replica_id: self._running[r.replica_id] for r in usable}
        keys = prefix_keys(fields["prompt"], fields["cache_salt"])
        best = self._table.choose(keys, loads)
        self._table.record(keys, best)
        self._remember(fields[REQUEST_ID], best)
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
        super().update_replicas(replicas)

    def _remember(self, request_id: int, replica_id: Any) -> None:
        self._tried.setdefault(request_id, set()).add(replica_id)
        while len(self._tried) > _MAX_TRIED:
            self._tried.popitem(last=False)


def _fields_of(request: PendingRequest | None) -> dict[str, Any] | None:
    """Return the fields of a call of `EngineReplica.generate`, or None for other calls."""
    if request is None or not request.args or not isinstance(request.args[0], dict):
        return None
    return request.args[0]
