"""Benchmarks of the engine, the server and the scheduler, and the simulator's command."""


class BenchError(Exception):
    """A benchmark cannot run. The command prints the message in one line and exits with code 2."""
