"""A local Ray cluster with a tiny model. Ray is imported in fixtures only: other test runs have none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.ray_cluster import Cluster
from jaxspec import LLM


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Ray on this machine. All of its processes end with the session."""
    from jaxspec.deploy.ray_local import local_ray

    with local_ray(16) as url:
        yield Cluster(url)


@pytest.fixture(scope="session")
def reference() -> Iterator[LLM]:
    """The same model in this process."""
    settings: dict[str, Any] = Cluster.ENGINE
    with LLM(**settings) as llm:
        yield llm
