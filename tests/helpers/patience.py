"""How long tests wait for what should happen at once."""

from __future__ import annotations

#: Seconds: on a starved machine, importing JAX takes a minute. Only a test that fails waits this long.
PATIENCE = 600.0
