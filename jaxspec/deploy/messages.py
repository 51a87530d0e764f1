"""What an ingress and a replica say to each other. Everything here is picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxspec.config import EngineConfig
from jaxspec.errors import EngineDead, EngineDraining, InvalidRequest
from jaxspec.outputs import OutputDelta
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.admission import SloRefused
from jaxspec.sched.scheduler import QueueFull
from jaxspec.sched.slo import Slo


@dataclass(frozen=True, slots=True)
class Facts:
    """What an ingress must know of the replicas' engine, which is the same on all of them. Lengths in tokens.

    config: with the settings resolved that depend on the device. default_sampling: see `generation_config`.
    """

    model_names: list[str]
    max_model_len: int
    vocab_size: int
    config: EngineConfig
    default_sampling: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Submission:
    """A request for a replica: the arguments of `Engine.submit`. `params` have a seed, so that another replica can go
    on with it."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    slo: Slo
    predict: bool
    tenant: str
    #: Output tokens so far; None: no replica has admitted it yet.
    resumed: tuple[int, ...] | None = None
    #: Seconds since its last output, or since its arrival: they count for the replica's aging.
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """The replica has taken the request. The first message of a stream, unless it is `Refused`."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Deltas of a request. `offset`: output tokens before them. Metrics are in the first and the last delta only."""

    offset: int
    deltas: tuple[OutputDelta, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica does not serve the request, or not to its end.

    invalid: no replica can. queue_full, slo: not now, another one may. lost: the replica stops or has failed, and
    another one can go on with the request. absent: it never came to the replica, which is not there any more. `field`:
    of an invalid request. `retry_after`: seconds, of a full queue.
    """

    reason: Literal["invalid", "queue_full", "slo", "lost", "absent"]
    message: str = ""
    field: str = ""
    retry_after: float = 1.0

    @classmethod
    def by(cls, error: Exception) -> Refused:
        """As which an error of `Engine.submit` is sent. Raises others again."""
        match error:
            case InvalidRequest():
                return cls("invalid", str(error), error.field)
            case QueueFull():
                return cls("queue_full", str(error), retry_after=error.retry_after)
            case SloRefused():
                return cls("slo", str(error))
            case EngineDraining() | EngineDead():
                return cls("lost", str(error))
            case _:
                raise error

    @property
    def error(self) -> Exception:
        """What a local engine would have raised."""
        match self.reason:
            case "invalid":
                return InvalidRequest(self.field, self.message)
            case "queue_full":
                return QueueFull(self.message, self.retry_after)
            case "slo":
                return SloRefused(self.message)
            case "lost" | "absent":
                return EngineDead(self.message)


Message = Admitted | Outputs | Refused


class ReplicaLost(Exception):
    """A replica does not answer. `final`: it has died, so that it will never answer again."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final
