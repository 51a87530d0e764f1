"""Settings for all tests: programs that are compiled quickly and shared, and few samples per measured time."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from helpers import quick_xla
from jaxspec.paths import cache_folder

#: Suites with a make target and an environment of their own. Naming such a folder on the command line still runs it.
collect_ignore = ["gpu_compile", "ray_serve", "ui"]

#: Tests about numbers, where engines' programs are compiled as they are for users: folders, and a part of files' names.
_AS_SERVED, _REAL = {"kernels", "models", "step"}, "smollm2"

#: Seconds after which a compiled program is thrown away: after changes to the code it is never used again.
_KEPT = 7 * 24 * 3600

#: Memory mappings of a process from which on JAX's programs are dropped between modules. Linux allows 65,530, a
#: compiled program has dozens, and LLVM ends the process if it gets no further one.
_MAPPINGS = 15_000
_MAPS = Path("/proc/self/maps")


def pytest_addoption(parser: pytest.Parser) -> None:
    on_gpu = os.environ.get("JAX_PLATFORMS") != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))
    parser.addoption(
        "--quickly",
        choices=("none", "most", "all"),
        default="none" if on_gpu else "most",
        help="programs that XLA hardly optimises; most: all but those of engines in tests about numbers",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before JAX reads it, here and in the processes that tests start."""
    if config.getoption("quickly") != "none":
        os.environ |= quick_xla.environment()


def _share_programs() -> None:
    """Give JAX a persistent cache, in this process and those that it starts (xdist's workers, servers).

    Without it, most of the suite's time would go into compiling the same small programs in each module and worker.
    """
    folder = cache_folder("compiled-tests")
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.stat().st_mtime < time.time() - _KEPT:
            file.unlink(missing_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"


@pytest.fixture(scope="session", autouse=True)
def _own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measure step times with one sample: tests need no exact times, and a server must not find them in its cache."""
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.step.profiles.SAMPLES", 1)
        patch.setattr("jaxspec.step.profiles.ROUNDS", 1)
        patch.setattr("jaxspec.engine.startup.cache_folder", lambda kind: folder / kind)
        yield


@pytest.fixture(scope="module", autouse=True)
def _compiled_as_for_users(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let XLA optimise the programs of engines in tests about numbers."""
    from jaxspec import compilation  # which imports JAX

    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    with pytest.MonkeyPatch.context() as patch:
        if (folder in _AS_SERVED or _REAL in request.path.name) and request.config.getoption("quickly") == "most":
            usual, full = compilation.graph_options, quick_xla.AS_FOR_USERS
            patch.setattr(compilation, "graph_options", lambda backend: full if backend == "cpu" else usual(backend))
        yield


@pytest.fixture(scope="module", autouse=True)
def _few_mappings() -> Iterator[None]:
    """Drop the programs that modules before have left in JAX's caches, if they are many."""
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


# When pytest reads this file JAX has not been imported, which is when it reads these variables.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _share_programs()

# On a busy machine any example may take longer than hypothesis's 200 ms, once.
settings.register_profile("no deadline", parent=settings.default, deadline=None)
settings.load_profile("no deadline")
