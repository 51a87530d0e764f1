"""Errors that a client can meet while its request is good."""


class EngineDead(RuntimeError):
    """The engine loop failed; the message carries its reason. No request will be served."""


class EngineDraining(RuntimeError):
    """The engine is shutting down and takes no new requests."""
