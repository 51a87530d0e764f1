"""Output lengths: oracles for benchmarks and the simulator, predictors of the engine. One kind per file."""

from jaxspec.sched.length.length import LengthSource, check, corrected, true_len

__all__ = ["LengthSource", "check", "corrected", "true_len"]
