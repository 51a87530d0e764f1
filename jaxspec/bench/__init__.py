"""Benchmarks of the engine, the server and the simulator."""


class BenchError(Exception):
    """Its message is all that the user sees; the exit code is 2."""
