"""Errors that a client can meet while its request is good."""


class EngineDead(RuntimeError):
    """The engine loop failed; the message carries its reason. No request will be served."""


class EngineDraining(RuntimeError):
    """The engine is shutting down and takes no new requests."""


def reason(error: BaseException) -> str:
    """What went wrong, for a message that names the file itself: an `OSError` without its number and its file."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def explained(error: BaseException) -> str:
    """What went wrong, in a line of its own: `FILE: No such file or directory`."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return reason(error)
