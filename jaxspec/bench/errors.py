"""What ends a benchmark before it measured anything."""


class BenchError(Exception):
    """Its message is all that the user sees; the exit code is 2."""
