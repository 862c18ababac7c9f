"""PolicyRouter: headrace's routing policies as a request router of Ray Serve."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from headrace.choices import RoutingPolicy
from headrace.deploy.book import ReplicaBook


class PolicyRouter(RequestRouter):
    """Chooses among the replicas of a deployment as the router of a server with replicas does (``ReplicaBook``)."""

    def initialize_state(self, policy: RoutingPolicy, max_replicas: int) -> None:
        self._book: ReplicaBook[ReplicaID] = ReplicaBook(policy, max_replicas)
        self._lock = threading.Lock()
        """Completions are reported from other threads."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        with self._lock:
            self._book.update({replica.replica_id: replica.routing_stats for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # A replica that has no room is asked again later.
        pending_request.routing_context.should_backoff = True
        name = pending_request.metadata.internal_request_id
        with self._lock:
            chosen = self._book.choose(name, pending_request.args[0], time.monotonic())
        if chosen is None:
            return [candidate_replicas]
        pending_request.future.add_done_callback(lambda future: self._if_cancelled(future, name))
        return [[replica for replica in candidate_replicas if replica.replica_id == chosen]]

    def _if_cancelled(self, future: asyncio.Future[Any], name: str) -> None:
        if future.cancelled():
            with self._lock:
                self._book.end(name, computed=False)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        with self._lock:
            self._book.end(internal_request_id)
