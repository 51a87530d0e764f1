"""Needs Ray. The request router that sends a call to the replica that it is meant for.

Ray Serve pickles this module by value, so classes that others compare with are defined elsewhere.
"""

from __future__ import annotations

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

from jaxspec.deploy.address import Address


class AddressedRouter(RequestRouter):
    """Sends a call to the replica of its `Address`, and tells the address's board which replicas there are.

    The ingress has chosen the replica by its own policy. If Ray Serve no longer has that replica, another one gets the
    call; it sees that it is not meant, and the ingress chooses again.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        address = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(address, Address):
            return [candidate_replicas]
        if address.board is not None:
            address.board.names = frozenset(replica.replica_id.unique_id for replica in candidate_replicas)
        meant = [r for r in candidate_replicas if r.replica_id.unique_id == address.replica]
        return [meant or candidate_replicas]
