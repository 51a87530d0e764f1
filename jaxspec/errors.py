"""Errors that callers can catch, and helpers for messages about OS errors."""

from __future__ import annotations


class EngineDead(RuntimeError):
    """The engine loop failed, for the reason in the message. The engine serves no more requests."""


class EngineDraining(RuntimeError):
    """The engine is shutting down and accepts no new requests."""


class ModelLoadError(ValueError):
    """A model cannot be loaded; the message names the file or tensor and says what to do."""


class InvalidRequest(ValueError):
    """A request that cannot be served; `field` names the invalid parameter."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str]]:
        """Pickled for a request that runs in another process."""
        return InvalidRequest, (self.field, str(self))


def reason(error: BaseException) -> str:
    """The error's message; of an `OSError` without number and file, for messages that name the file themselves."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def explained(error: BaseException) -> str:
    """The error's message with its file, if it is an `OSError`: `FILE: No such file or directory`."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return reason(error)


def out_of_memory(error: BaseException) -> bool:
    """Whether the host's or the device's memory did not suffice; JAX has no class of its own for that."""
    return isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED")
