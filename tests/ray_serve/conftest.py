"""A local Ray cluster with a tiny model. Ray is imported in fixtures only: other test runs have none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.ray_cluster import Cluster
from jaxspec import LLM

#: For Ray and all processes that it starts.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAXSPEC_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """Ray on this machine, without a dashboard and with little memory. All of its processes end with the session."""
    os.environ.update(ENVIRONMENT)
    import ray  # pyright: ignore[reportMissingImports]

    folder = tempfile.mkdtemp(prefix="ray")  # short: it is part of the names of sockets
    ray.init(
        num_cpus=16, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False,
        logging_level="warning", _temp_dir=folder,
    )  # fmt: skip
    try:
        yield
    finally:
        from ray import serve  # pyright: ignore[reportMissingImports]

        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(ray_here: None) -> Cluster:
    return Cluster()


@pytest.fixture(scope="session")
def reference() -> Iterator[LLM]:
    """The same model in this process."""
    settings: dict[str, Any] = Cluster.ENGINE
    with LLM(**settings) as llm:
        yield llm
