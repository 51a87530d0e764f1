"""Needs Ray. Ray Serve on this machine, for benchmarks and tests."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil
import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]

_MEMORY = 100 * 2**20
#: For Ray and all processes that it starts.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAXSPEC_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    # On a busy machine the HTTP proxy takes longer than 5 s to start, and would be killed and started again for ever.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}


@contextmanager
def local_ray(actors: int, environment: Mapping[str, str] = {}) -> Iterator[str]:
    """Start Ray, without a dashboard and with little memory, and its HTTP proxy on a free port. -> the proxy's URL.

    actors: how many may run, one CPU each in Ray's books, whatever cores there are. environment: variables of Ray's
    processes, which are set here too until they have ended.
    """
    ours = _ENVIRONMENT | dict(environment)
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    folder = tempfile.mkdtemp(prefix="ray")  # short: it is part of the names of sockets
    try:
        with warnings.catch_warnings():
            # JAX warns of any fork; what Ray starts here executes another program at once.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(
                num_cpus=actors, object_store_memory=_MEMORY, include_dashboard=False, log_to_driver=False,
                logging_level="error", _temp_dir=folder,
            )  # fmt: skip
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def deploy(application: serve.Application, name: str) -> None:
    """Start an application under a name, instead of the one that has it, and wait until it runs. Raises
    `RuntimeError`."""
    serve.run(application, name=name, route_prefix="/")


def processes(deployment: str, application: str) -> list[psutil.Process]:
    """Operating-system processes of a deployment's replicas on this machine, in order of process id."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            if f"ServeReplica:{application}:{deployment}" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return sorted(found, key=lambda process: process.pid)
