"""Pace: which requests decode in a step while some have a TPOT SLO."""

from jaxspec.sched.pace.pace import Pace, Throttle

__all__ = ["Pace", "Throttle"]
