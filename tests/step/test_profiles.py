"""Measured times are believed if they repeat and fit each other, and kept for their programs and device."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import chain, pairwise, repeat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.step import profiles
from jaxspec.step.profiles import KEPT, NOT_KEPT, Profile, ProfileStore, implausible

SAMPLES, ROUNDS = 5, 3
NAMES, ORDERED = ["1", "8"], [("1", "8")]


@pytest.fixture(autouse=True)
def as_in_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """`conftest` lets the other tests measure once."""
    monkeypatch.setattr(profiles, "SAMPLES", SAMPLES)
    monkeypatch.setattr(profiles, "ROUNDS", ROUNDS)


class Machine:
    """A clock that moves while programs run: `seconds` gives, by name, what the runs take one after another."""

    def __init__(self, **seconds: Iterator[float]) -> None:
        self.now, self.seconds, self.runs = 0.0, seconds, 0

    def clock(self) -> float:
        return self.now

    def run(self, name: str) -> Callable[[], None]:
        def once() -> None:
            self.now += next(self.seconds[name])
            self.runs += 1

        return once

    def measured(self, store: ProfileStore, key: object = "k") -> Profile:
        """The profile after everything has been offered and measured."""
        profile = store.open("step", key, NAMES, ORDERED)
        profile._clock = self.clock
        for name in profile.names:
            profile.offer(name, self.run(f"p{name}"))
        profile.measure()
        return profile


def steady(one: float = 0.5, eight: float = 1.0) -> Machine:
    return Machine(p1=repeat(one), p8=repeat(eight))


def test_once_for_a_key_and_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, machine = ProfileStore(tmp_path), steady()
    first = machine.measured(store)
    assert first.seconds == {"1": 0.5, "8": 1.0} and machine.runs == 2 * (SAMPLES + 1)
    again = machine.measured(store)
    assert again.seconds == first.seconds and machine.runs == 2 * (SAMPLES + 1), "it was measured again"
    assert again.measured is not None and first.measured is not None
    assert abs((again.measured - first.measured).total_seconds()) <= 1
    machine.measured(store, key="another")
    monkeypatch.setattr(profiles, "device", lambda: "another")
    machine.measured(store)
    assert len(list(tmp_path.iterdir())) == 3


def test_the_order_of_the_names_does_not_matter(tmp_path: Path) -> None:
    """Programs are compiled by threads and come in any order: a start must find what another one left."""
    store = ProfileStore(tmp_path)
    steady().measured(store)
    assert store.open("step", "k", NAMES[::-1], ORDERED).seconds == {"1": 0.5, "8": 1.0}
    assert len(list(tmp_path.iterdir())) == 1


def test_nothing_is_kept_without_a_folder_and_nothing_read_with_renew(tmp_path: Path) -> None:
    assert steady().measured(NOT_KEPT).seconds["8"] == 1.0
    steady().measured(ProfileStore(tmp_path))
    assert steady(2.0, 3.0).measured(ProfileStore(tmp_path, renew=True)).seconds == {"1": 2.0, "8": 3.0}
    assert ProfileStore(tmp_path).open("step", "k", NAMES).seconds == {"1": 2.0, "8": 3.0}


STORED = '{"what": "step", "measured": "2026-01-01T00:00:00+00:00", "seconds": %s}'


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "3", STORED % '{"1": 1.0}', STORED % '{"1": 1.0, "8": -1.0}', STORED % '{"1": "x", "8": 1.0}',
     STORED % '{"1": 0.112, "8": 0.063}', '{"1": 0.1, "8": 0.2}'],
)  # fmt: skip
def test_a_file_that_cannot_be_right_is_replaced(tmp_path: Path, content: str) -> None:
    """Also times of a busy machine, by which a step of 1 token takes longer than one of 8."""
    store = ProfileStore(tmp_path)
    steady().measured(store)
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    assert steady(3.0, 6.0).measured(store).seconds == {"1": 3.0, "8": 6.0}
    assert json.loads(path.read_text())["seconds"] == {"1": 3.0, "8": 6.0}


def test_after_a_week_it_is_measured_again(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    steady().measured(store)
    (path,) = tmp_path.iterdir()
    os.utime(path, (0, path.stat().st_mtime - KEPT - 60))
    assert steady(3.0, 6.0).measured(store).seconds["8"] == 6.0


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert steady().measured(ProfileStore(tmp_path / "file")).seconds["8"] == 1.0


def test_times_that_do_not_repeat_are_measured_again(tmp_path: Path) -> None:
    """Something else runs through the first round and its guess, then the machine is quiet."""
    busy = SAMPLES + 1
    machine = Machine(p1=chain(repeat(0.5, busy - 2), repeat(2.0, 2), repeat(0.5)), p8=repeat(1.0))
    assert machine.measured(ProfileStore(tmp_path)).seconds == {"1": 0.5, "8": 1.0}
    assert machine.runs == 2 * busy + SAMPLES, "only the doubtful one is measured again"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_stays_implausible_is_used_but_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile = steady(2.0, 1.0).measured(ProfileStore(tmp_path))
    assert profile.seconds == {"1": 2.0, "8": 1.0} and profile.measured is not None
    assert not list(tmp_path.iterdir()) and "the machine seems busy" in caplog.text.lower()


def test_times_that_never_repeat_are_the_median_of_all_rounds(tmp_path: Path) -> None:
    """A neighbour comes and goes: the last round alone would tell of one of its visits only."""
    often, last = [1.0, 1.0, 1.0, 4.0, 4.0], [1.0, 1.0, 4.0, 4.0, 4.0]
    machine = Machine(p1=chain([9.0], often, often, last), p8=repeat(5.0))
    assert machine.measured(ProfileStore(tmp_path)).seconds == {"1": 1.0, "8": 5.0}
    assert not list(tmp_path.iterdir())


def test_guesses_are_kept_until_there_is_better(tmp_path: Path) -> None:
    """A process that ends soon leaves them to the next, which measures in their place."""
    store, machine = ProfileStore(tmp_path), steady()
    first = store.open("step", "k", NAMES, ORDERED)
    first._clock = machine.clock
    first.offer("8", machine.run("p8"))
    first.guess()
    second = store.open("step", "k", NAMES, ORDERED)
    assert second.seconds == {"8": 1.0} and second.measured is None
    second.offer("8", machine.run("p8"))
    assert not second.unknown and not second.pending
    assert steady(3.0, 6.0).measured(store).seconds == {"1": 3.0, "8": 6.0}
    assert store.open("step", "k", NAMES, ORDERED).measured is not None
    assert len(list(tmp_path.iterdir())) == 1


def test_a_first_guess_until_all_are_measured() -> None:
    machine, told = steady(), []
    profile = NOT_KEPT.open("step", "k", NAMES, ORDERED)
    profile._clock = machine.clock
    profile.on_measured.append(lambda: told.append(dict(profile.seconds)))
    profile.offer("1", machine.run("p1"))
    assert profile.unknown == ["1"] and not profile.seconds
    profile.guess()
    assert profile.seconds == {"1": 0.5} and not profile.pending
    profile.offer("8", machine.run("p8"), guess=0.75)
    assert profile.seconds == {"1": 0.5, "8": 0.75} and profile.pending and machine.runs == 1
    profile.measure()
    assert told == [{"1": 0.5, "8": 1.0}] and not profile.pending


def test_a_program_that_cannot_run_is_run_once() -> None:
    """It has no time, so it is not used; the others keep theirs."""
    profile = Profile("steps", ["small", "large"])

    def fail() -> None:
        raise MemoryError("no room")

    profile.offer("small", lambda: None)
    profile.offer("large", fail)
    profile.sample()
    with pytest.raises(MemoryError):
        profile.sample()
    assert not profile.pending and not profile.unknown and list(profile.seconds) == ["small"]


@given(st.lists(st.floats(3e-3, 10), min_size=2, max_size=8), st.data())
def test_rising_times_are_plausible_and_a_much_faster_larger_one_is_not(
    times: list[float], data: st.DataObject
) -> None:
    names = [str(i) for i in range(len(times))]
    ordered = list(pairwise(names))
    rising = dict(zip(names, sorted(times), strict=True))
    assert implausible(rising, ordered) is None
    at = data.draw(st.integers(1, len(times) - 1))
    reason = implausible(rising | {names[at]: rising[names[at - 1]] / 4}, [(names[at - 1], names[at])])
    # Below two milliseconds it may be jitter.
    assert (reason is not None) == (rising[names[at - 1]] / 4 < 0.8 * rising[names[at - 1]] - 2e-3)
