"""Needs Ray. The replicas of a Ray Serve deployment."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import ActorDiedError, RayError, TaskCancelledError  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import RayServeException  # pyright: ignore[reportMissingImports]
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]

from jaxspec.deploy.address import Address, Board
from jaxspec.deploy.load import Load
from jaxspec.deploy.messages import Facts, Message, ReplicaLost, Submission


class RayFleet:
    """Reaches the replicas through a handle of their deployment, whose router is an `AddressedRouter`.

    Used in one event loop.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._board = Board()
        self._handle, self._streams = handle, handle.options(stream=True)

    async def facts(self) -> Facts:
        """The engine's facts, from any replica; waits for the first replica."""
        return await self._handle.facts.remote(Address(None, self._board))

    async def names(self, fresh: bool = False) -> frozenset[str]:
        """As of the last call to any replica; `fresh`, or without any, of a new one."""
        if fresh or not self._board.names:
            await self._ask("facts", None)
        return self._board.names

    async def load(self, replica: str) -> Load:
        return await self._ask("load", replica)

    async def generate(self, replica: str, submission: Submission) -> AsyncGenerator[Message, None]:
        messages = self._streams.generate.remote(Address(replica, self._board), submission)
        ended = False
        try:
            async for message in messages:
                yield message
            ended = True
        except (RayError, RayServeException, TaskCancelledError) as error:
            raise _lost(error) from error
        finally:
            if not ended:
                messages.cancel()

    async def _ask(self, method: str, replica: str | None) -> Any:
        try:
            answer = await getattr(self._handle, method).remote(Address(replica, self._board))
        except (RayError, RayServeException) as error:
            raise _lost(error) from error
        if answer is None:
            raise ReplicaLost("another replica answered", final=True)
        return answer


def _lost(error: Exception) -> ReplicaLost:
    return ReplicaLost(f"{type(error).__name__}: {error}".splitlines()[0], final=isinstance(error, ActorDiedError))
