"""Batching: when waiting requests are admitted (SSJF §3.2). One policy per file."""

from jaxspec.sched.batching.batching import Batching

__all__ = ["Batching"]
