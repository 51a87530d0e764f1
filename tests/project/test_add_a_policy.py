"""A policy is one file, and a preset to select it: everything finds the example's in a copy of the checkout.

In a copy, and in processes of its own, because a policy registers itself wherever it is imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.paths import ROOT

EXAMPLE = ROOT / "examples" / "add_a_policy"
FOLDERS = ("jaxspec", "sched", "models", "train_predictor", "configs", "tests")
#: Where the files of the example go.
PLACES = {"mlfq.py": "sched/order", "mlfq.yaml": "configs", "test_mlfq.py": "tests/sched/order"}

Run = Callable[..., str]


def link(source: str, target: str) -> None:
    """A hard link, or a copy where the folders are on different file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout with the example's files added, and nothing else changed."""
    folder = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        # Links are copied as links: jaxspec/sched points to the copy's ../sched.
        shutil.copytree(ROOT / name, folder / name, symlinks=True, copy_function=link, ignore=ignore)
    link(str(ROOT / "pyproject.toml"), str(folder / "pyproject.toml"))
    assert {path.name for path in EXAMPLE.iterdir() if path.is_file()} == PLACES.keys()
    for name, place in PLACES.items():
        link(str(EXAMPLE / name), str(folder / place / name))
    return folder


@pytest.fixture
def run(copy: Path) -> Run:
    """Runs Python with these arguments in the copy; -> what it prints."""

    def python(*arguments: str) -> str:
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(copy), str(copy / "tests")]), "COLUMNS": "120"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=copy, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return python


def test_the_copy_is_what_runs(run: Run, copy: Path) -> None:
    shown = run("-c", "import jaxspec, jaxspec.sched.order.mlfq as m; print(jaxspec.__file__, m.__file__)").split()
    assert shown == [str(copy / "jaxspec" / "__init__.py"), str(copy / "jaxspec" / "sched" / "order" / "mlfq.py")]


def test_the_settings_have_it(run: Run) -> None:
    """Name and section, from a preset, from options and from Python; an invalid value is refused by name."""
    script = """
from jaxspec.config import ConfigError, EngineConfig, parse_overrides
config = EngineConfig.load("configs/mlfq.yaml", **parse_overrides(["mlfq.queues=6"]))
print(config.order, config.mlfq.queues, config.mlfq.quantum_ms, config.mlfq.growth)
try:
    EngineConfig.load("configs/mlfq.yaml", mlfq={"growth": 1})
except ConfigError as error:
    print(error)
"""
    first, second = run("-c", script).splitlines()
    assert first == "mlfq 6 100.0 2.0"
    assert second.startswith("mlfq.growth: ")


def test_the_property_tests_draw_it(run: Run) -> None:
    script = """
from random import Random
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from helpers.drive import PREEMPTIVE, Drive, policies
from helpers.paged import crowd
from jaxspec.sched import PagePool, Scheduler, SchedulerConfig
from helpers.drive import TIMES

drawn = []

@settings(max_examples=100, deadline=None, database=None, phases=[Phase.generate], derandomize=True)
@given(policies())
def draws(policy):
    drawn.append(policy)

@settings(max_examples=10, deadline=None, database=None)
@given(policies(order="mlfq"), st.integers(0, 99))
def serves(policy, seed):
    random = Random(seed)
    jobs = crowd(random)
    Drive(Scheduler(SchedulerConfig(3, 8, 40, None, 4, policy, times=TIMES), PagePool(10, 4)), jobs, random).run()

draws()
serves()
print("mlfq" in PREEMPTIVE, sum(policy.order == "mlfq" for policy in drawn) > 0)
"""
    assert run("-c", script).split() == ["True", "True"]


def test_the_simulator_and_the_benchmark_of_the_scheduler_find_it(run: Run) -> None:
    simulate = ("simulate", "--config", "configs/mlfq.yaml", "--num-requests", "20", "--request-rate", "5")
    assert "20 completed, 0 failed" in run("-m", "jaxspec.bench", *simulate)
    table = run("-m", "jaxspec.bench", "scheduler", "--waiting", "20", "--iterations", "20", "--drafting", "4")
    assert "mlfq" in {line.split()[1] for line in table.splitlines() if line.startswith("│")}


def test_the_server_knows_it(run: Run) -> None:
    """Up to the loading of the model, which is not there."""
    script = """
from jaxspec.serve.__main__ import main
try:
    main(["--config", "configs/mlfq.yaml", "--set", "mlfq.queues=0", "--model", "none.gguf"])
except SystemExit:
    pass
try:
    main(["--config", "configs/mlfq.yaml", "--set", "mlfq.queues=2", "--model", "none.gguf", "--port", "0"])
except SystemExit:
    pass
"""
    first, second = run("-c", "import sys; sys.stderr = sys.stdout\n" + script).splitlines()
    assert "mlfq.queues" in first
    assert "cannot load none.gguf" in second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("tests/sched/order/test_mlfq.py", ("a_short_request_overtakes", "moves_down", "first_come_first_served")),
        ("tests/sched/test_policies.py", ("preemption_loses_nothing[mlfq]", "no_request_starves[mlfq]")),
        ("tests/engine/test_engine_policies.py", ("writes_what_a_request_writes_alone[mlfq]", "survive_pauses[mlfq]")),
    ],
    ids=["its own", "properties", "engine"],
)
def test_it_passes_the_tests_of_orders(run: Run, file: str, names: tuple[str, ...]) -> None:
    shown = run("-m", "pytest", "-rA", "-p", "no:cacheprovider", file, "-k", "mlfq")
    passed = [line for line in shown.splitlines() if line.startswith("PASSED")]
    assert all(any(name in line for line in passed) for name in names), shown
    assert "failed" not in shown
