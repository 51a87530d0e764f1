"""How the remote engine reaches the replicas, whatever runs them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from jaxspec.deploy.load import Load
from jaxspec.deploy.messages import Message, Submission


class Fleet(Protocol):
    """The replicas by name. A name is never given to another replica."""

    async def names(self, fresh: bool = False) -> frozenset[str]:
        """The replicas that may get requests. Those that are being scaled down are not among them.

        `fresh`: as of now, which waits for a replica if there is none; else perhaps as of an earlier call.
        """
        ...

    def generate(self, replica: str, submission: Submission) -> AsyncGenerator[Message, None]:
        """Have a replica serve a request. Closing the generator cancels it. Raises `ReplicaLost`."""
        ...

    async def load(self, replica: str) -> Load:
        """Ask a replica for its load. Raises `ReplicaLost`."""
        ...
