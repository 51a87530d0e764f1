"""Batching: when waiting requests are admitted (SSJF §3.2)."""

from jaxspec.sched.batching.batching import Batching

__all__ = ["Batching"]
