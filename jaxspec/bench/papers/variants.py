"""What a user puts into a paper's experiment: further systems, another length predictor, another trace."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxspec.bench import BenchError
from jaxspec.bench.papers.presets import Preset
from jaxspec.config import ConfigError, parse_overrides
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.arrivals import Arrival

#: Values of `--predictor`.
ORACLE, NOISY = "oracle", "noisy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("your own systems, predictor or trace (simulated)")
    group.add_argument(
        "--system", action="append", default=[], metavar="NAME=PRESET[,KEY=VALUE...]",
        help="add a system to the comparisons: a preset of configs/ and settings that differ from it; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--predictor", metavar="oracle|noisy:SIGMA",
        help="length predictor of all systems that have one: true lengths, or with a log-normal error",
    )  # fmt: skip
    group.add_argument(
        "--arrivals", metavar="CSV",
        help="arrival times: a random part of this file's column arrival_s for each seed, scaled to each rate",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variants:
    """systems: further ones by name; predictor: settings of the length predictor; trace: a CSV file of arrivals."""

    systems: Mapping[str, Preset] = field(default_factory=dict[str, Preset])
    predictor: Mapping[str, str | float] = field(default_factory=dict[str, "str | float"])
    trace: str | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Variants:
        """The variants given by the options. Raises `BenchError` naming the option that is wrong."""
        systems = dict(_system(text) for text in args.system)
        return cls(systems, _predictor(args.predictor) if args.predictor else {}, args.arrivals)

    def __bool__(self) -> bool:
        return bool(self.systems or self.predictor or self.trace)

    def apply(self, presets: Mapping[str, Preset]) -> dict[str, Preset]:
        """The presets with this predictor where they have one, and the further systems."""
        changed = {
            name: preset.but(**self.predictor) if self.predictor and preset.load().predictor != "none" else preset
            for name, preset in presets.items()
        }
        return changed | dict(self.systems)

    def arrivals(self, count: int, rate: float, rng: np.random.Generator) -> list[Arrival]:
        """`count` arrivals at `rate` requests per second: of the trace, or else a Poisson process."""
        if self.trace is None:
            return arrivals.poisson(count, rate, rng)
        return arrivals.part(arrivals.trace(self.trace), count, rate, rng)


def _system(text: str) -> tuple[str, Preset]:
    name, _, rest = text.partition("=")
    preset, *settings = rest.split(",")
    if not name or not preset:
        raise BenchError(f"--system: expected NAME=PRESET[,KEY=VALUE...], got {text}")
    try:
        found = Preset(preset).but(**parse_overrides(settings))
        found.load()
    except (BenchError, ConfigError) as error:
        raise BenchError(f"--system {name}: {error}") from None
    return name, found


def _predictor(text: str) -> dict[str, str | float]:
    kind, _, sigma = text.partition(":")
    if kind == ORACLE and not sigma:
        return {"predictor": "oracle"}
    try:
        noise = float(sigma) if kind == NOISY else -1.0
    except ValueError:
        noise = -1.0
    if noise < 0:
        raise BenchError(f"--predictor: expected oracle or noisy:SIGMA, got {text}")
    return {"predictor": "noisy_oracle", "predictor_noise": noise}
