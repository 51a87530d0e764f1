"""Loads a file as the engine and the simulator do, and uses what it holds.

Run as a module, it is the process in which files are loaded: for each line of JSON on its input, `[kind, path]`, it
writes a line with what is wrong, or null.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from jaxspec.bench import prompts
from jaxspec.bench.fuzz.corpus import WIDTH
from jaxspec.config import EngineConfig
from jaxspec.draft.suffix_memory import SuffixMemory
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load import LoadedModel, load_model
from jaxspec.models.load.drafter_file import load_drafter
from jaxspec.models.load.probe_file import load_probe
from jaxspec.models.load.tokenizer import Tokenizer
from jaxspec.predict import index_file, predictor_file
from jaxspec.sched.sim import acceptance, arrivals, cost, workload
from jaxspec.sched.sim.recording import Recording

#: Bytes of address space that loading one file may add.
MEMORY = 3 * 2**30
#: Texts that a tokenizer must take, whatever it makes of them.
_TEXTS = ("The quick brown fox", "äöü 漢字 🦉 \x00 ", "<|im_end|>" * 3, " " * 300 + "a" * 300)
_TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "?"}]


def use(model: LoadedModel) -> None:
    """Read all weights and use the tokenizer."""
    for name in model.weights:
        np.asarray(model.weights[name])
    _use_tokenizer(model.tokenizer, model.config)


def _use_tokenizer(tokenizer: Tokenizer, config: DecoderConfig) -> None:
    for text in _TEXTS:
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)
        tokenizer.decode(ids, skip_special_tokens=False)
    for id in range(config.vocab_size + 3):
        tokenizer.token_bytes(id)
    with suppress(ValueError):  # templates may refuse what they are shown
        tokenizer.apply_chat_template(_TALK, tools=[{"type": "function", "function": {"name": "f"}}])


def loaders(target: LoadedModel) -> dict[str, Callable[[Path], object]]:
    """How a file of each kind is loaded. target: of drafters and probes."""
    return {
        "model": lambda path: use(load_model(str(path))),
        "drafter": lambda path: [*load_drafter(path, target.config, target.weights)[1].values()],
        "probe": lambda path: load_probe(path, target.config),
        "predictor": predictor_file.read,
        "lengths_index": lambda path: index_file.read(path, "tiny", np.eye(1, WIDTH, dtype=np.float32)[0]),
        "answers": lambda path: SuffixMemory(1000, path=path, model="tiny"),
        "arrivals": arrivals.trace,
        "lengths": lambda path: workload.read_lengths(path, None if path.suffix == ".jsonl" else "predicted"),
        "prompts": prompts.load,
        "profile": cost.load_profile,
        "process": lambda path: acceptance.load_process(str(path)),
        "recording": Recording.read,
        "config": EngineConfig.load,
    }


#: Kinds whose caller adds the file's name, or whose messages name the setting.
_UNNAMED = ("lengths_index", "answers", "config")


def flaw(kind: str, path: Path, known: dict[str, Callable[[Path], object]]) -> str | None:
    """What is wrong with how a file is loaded; None: it was loaded, or refused with a message that names it."""
    try:
        known[kind](path)
    except (ValueError, OSError) as error:
        names = (path.name, path.parent.name)
        message = f"{error} {getattr(error, 'filename', '') or ''}"
        if kind not in _UNNAMED and not any(name in message for name in names):
            return f"{type(error).__name__} without the file's name: {str(error)[:300]}"
        if len(message) > 4000:
            return f"a message of {len(message)} characters"
    except BaseException as error:  # a panic of Rust code is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


def main() -> None:
    """The process: `python -m jaxspec.bench.fuzz.loading MODEL_FOLDER`."""
    import psutil

    target = load_model(sys.argv[1])
    known = loaders(target)
    use(target)
    for kind in ("drafter", "probe", "predictor"):  # imports what the first one needs
        with suppress(Exception):
            known[kind](Path(sys.argv[1]).parent / f"{kind}.safetensors")
    with suppress(ImportError, ValueError, OSError):
        import resource

        most = psutil.Process().memory_info().vms + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        kind, path = json.loads(line)
        print(json.dumps(flaw(kind, Path(path), known)), file=answers, flush=True)


if __name__ == "__main__":
    main()
