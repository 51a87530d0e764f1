"""Errors that callers can catch, and their messages."""


class EngineDead(RuntimeError):
    """The engine loop failed; the message carries its reason. No request will be served."""


class EngineDraining(RuntimeError):
    """The engine is shutting down and takes no new requests."""


class ModelLoadError(ValueError):
    """A model that can't be loaded; the message names the file or tensor and says what to do."""


def reason(error: BaseException) -> str:
    """What went wrong, for a message that names the file itself: an `OSError` without its number and its file."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def explained(error: BaseException) -> str:
    """What went wrong, in a line of its own: `FILE: No such file or directory`."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return reason(error)
