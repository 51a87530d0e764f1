"""The systems of an experiment: presets of `configs/`, and what differs from them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.bench import BenchError, options
from jaxspec.config import ConfigError, EngineConfig, parse_overrides

if TYPE_CHECKING:
    from jaxspec.llm import LLM

CONFIGS = Path(__file__).parents[3] / "configs"


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset of `configs/` by name, and settings that differ from it."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def but(self, **changes: Any) -> Preset:
        """A copy with further changes, which replace equal ones."""
        return replace(self, changes={**self.changes, **changes})

    @property
    def path(self) -> Path:
        """The preset's file. Raises `BenchError` if it is missing."""
        path = CONFIGS / f"{self.name}.yaml"
        if not path.exists():
            raise BenchError(f"{path} is missing: the experiments run from a checkout and read its presets")
        return path

    def load(self, **settings: Any) -> EngineConfig:
        """All settings; `settings` override the file, but not the changes. Raises `BenchError`."""
        try:
            return EngineConfig.load(self.path, **{**settings, **self.changes})
        except ConfigError as error:
            raise BenchError(f"{self.name}: {error}") from None


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Settings given by `--set`. Raises `BenchError`."""
    try:
        return parse_overrides(args.set)
    except ConfigError as error:
        raise BenchError(str(error)) from None


@contextmanager
def engines(presets: Mapping[str, Preset], model: str | None) -> Iterator[dict[str, LLM]]:
    """Start one engine per preset, and close them at the end. Raises `BenchError` if one cannot start."""
    from jaxspec.llm import LLM

    with ExitStack() as stack:
        loaded = {}
        for name, preset in presets.items():
            settings = {**options.COMPILE_ALL_FIRST, **({"model": model} if model else {}), **preset.changes}
            try:
                llm = LLM(config=str(preset.path), **settings)
                loaded[name] = stack.enter_context(llm)
            except (OSError, ValueError, RuntimeError) as error:
                raise BenchError(f"{name}: {error}") from None
        yield loaded
