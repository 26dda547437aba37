"""Sends a request to the replica that was chosen for it. Ray Serve makes one for each handle."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from dsv4.integrations.ray.messages import Ask


class AimedRouter(RequestRouter):
    """The replica that an `Ask` names; if it is gone, or none is named, the least busy one of those
    that were not given up, and else any: Ray Serve looks how long their queues are."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # between two rounds
        asked: list[Any] = [each for each in pending_request.args if isinstance(each, Ask)]
        if not asked:
            return [candidate_replicas]
        ask: Ask = asked[0]
        aimed = [each for each in candidate_replicas if _name(each) == ask.replica]
        left = [each for each in candidate_replicas if _name(each) not in ask.avoided]
        return [aimed or left or candidate_replicas]


def _name(replica: RunningReplica) -> str:
    return replica.replica_id.unique_id
