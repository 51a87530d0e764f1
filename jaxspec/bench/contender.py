"""One of several compared presets: its engine, and its prompts. Their engines are loaded in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxspec.bench import BenchError, options
from jaxspec.draft.suffix import SuffixDrafter
from jaxspec.errors import explained
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.llm import LLM

#: Prompts of `learn` between which the progress bar moves.
_KNOWN_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Contender:
    """One of the compared presets: its engine, and the prompts of all turns as token ids of its tokenizer."""

    name: str
    llm: LLM
    prompts: list[list[int]]


def load(presets: Sequence[str], overrides: dict[str, Any], stack: ExitStack) -> list[LLM]:
    """An engine for each preset, which `stack` closes. Raises `BenchError`."""
    from jaxspec.config import EngineConfig
    from jaxspec.llm import LLM

    for preset in presets:  # check all presets before the first engine, which takes long to load
        with naming_preset(preset):
            EngineConfig.load(preset, **overrides)
    engines = []
    for preset, name in zip(presets, options.preset_names(presets), strict=True):
        with naming_preset(preset):
            settings = {**options.COMPILE_ALL_FIRST, **overrides}
            engines.append(stack.enter_context(LLM(config=preset, show_progress=name, **settings)))
    return engines


@contextmanager
def naming_preset(preset: str) -> Iterator[None]:
    """Convert errors to a `BenchError` that names the preset."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, BenchError) as error:
        message = explained(error)
        raise BenchError(message if preset in message else f"{preset}: {message}") from None


def learn(contenders: Sequence[Contender], texts: Sequence[str], params: SamplingParams) -> None:
    """Let the contenders that remember answers for suffix drafting answer these prompts, unmeasured."""
    from jaxspec.models.load.tokenizer import chat_ids

    learning = [c for c in contenders if remembers(c.llm)]
    parts = [texts[i : i + _KNOWN_AT_ONCE] for i in range(0, len(texts), _KNOWN_AT_ONCE)]
    with progress("answers before the turns", len(learning) * len(parts)) as advance:
        for contender in learning:
            for part in parts:
                with naming_preset(contender.name):
                    contender.llm.generate([chat_ids(contender.llm.tokenizer, text) for text in part], params)
                advance()


def remembers(llm: LLM) -> bool:
    """Whether one of the engine's drafters learns from answers."""
    drafters = llm.engine.speculator.drafters
    return any(isinstance(d, SuffixDrafter) and d.memory is not None for d in drafters)
