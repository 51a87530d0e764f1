"""Output lengths: oracles for benchmarks and the simulator, predictors of the engine. One kind per file."""

from jaxspec.sched.length.length import LengthOracle, check, corrected, true_len

__all__ = ["LengthOracle", "check", "corrected", "true_len"]
