"""`LLM`: the engine for offline use."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.models.load import LoadedModel
from jaxspec.outputs import CompletionOutput, OutputDelta, RequestMetrics, RequestOutput
from jaxspec.progress import bar
from jaxspec.sampling_params import InvalidRequest, SamplingParams
from jaxspec.sched.scheduler import QueueFull
from jaxspec.sched.slo import Slo
from jaxspec.slo import read, resolve

Prompt = str | Sequence[int]
#: As over HTTP: tpot_ms, ttft_ms, category.
SloFields = Mapping[str, Any]


class LLM:
    """A model and its engine; use as a context manager, or call `close`.

    Args: `model` and `draft` as `--model` and `--draft` of the server (`draft=()` switches a preset's drafter off);
    `config` a YAML preset; `overrides` any setting of `EngineConfig`.
    Raises `ConfigError` and `ModelLoadError`.
    """

    def __init__(
        self,
        model: str | LoadedModel | None = None,
        draft: Sequence[str] | str | None = None,
        config: str | None = None,
        *,
        show_progress: bool = False,
        **overrides: Any,
    ):
        loaded = model if isinstance(model, LoadedModel) else None
        if isinstance(model, str):
            overrides["model"] = model
        if draft is not None:
            overrides["draft"] = draft if isinstance(draft, str) else list(draft)
        settings = EngineConfig.load(config, **overrides)
        with bar(show_progress) as progress:
            self.engine = Engine(settings, model=loaded, progress=progress)
        self.engine.start()

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine; unfinished requests are aborted."""
        self.engine.shutdown()

    def chat(
        self, messages: Sequence[Any], params: SamplingParams | None = None, *, slo: SloFields | None = None
    ) -> list[RequestOutput]:
        """Generate for one conversation (a list of messages) or several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [self.tokenizer.apply_chat_template(list(c)) for c in conversations]
        return self.generate([self.tokenizer.encode(p, add_special_tokens=False) for p in prompts], params, slo=slo)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SloFields | Sequence[SloFields | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt (text, or token ids), in the order given.

        `params` is one for all or one each; the default is greedy with 16 tokens. `slo`, one for all or one each, are
        latency targets: `{"tpot_ms": …, "ttft_ms": …, "category": …}`, the configuration's where nothing is named.

        Raises `InvalidRequest` before anything runs if one of them can't be served, RuntimeError if the engine fails
        meanwhile, and with `slo.admission: strict` `SloRefused`: then all that it was given is cancelled.
        """
        batch = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams(temperature=0)] * len(batch)
        if len(each) != len(batch):
            raise InvalidRequest("params", f"{len(each)} params for {len(batch)} prompts")
        named = list(slo) if isinstance(slo, Sequence) and not isinstance(slo, str) else [slo] * len(batch)
        if len(named) != len(batch):
            raise InvalidRequest("slo", f"{len(named)} slo for {len(batch)} prompts")
        slos = [resolve(read(n), self.engine.config.slo) for n in named]
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in batch]  # type: ignore[arg-type]
        for prompt, p, one in zip(ids, each, slos, strict=True):
            self.engine.check(prompt, p, one)
        gathered = _Gathered(sum(p.n for p in each))
        outputs = [
            RequestOutput(
                str(i), source if isinstance(source, str) else None, prompt,
                [CompletionOutput(k) for k in range(p.n)], RequestMetrics(0.0),
            )
            for i, (source, prompt, p) in enumerate(zip(batch, ids, each, strict=True))
        ]  # fmt: skip
        submitted: list[str] = []
        try:
            for output, p, one in zip(outputs, each, slos, strict=True):
                for choice in output.outputs:
                    submitted.append(self._submit(gathered, output, choice, p, one))
            gathered.wait(self.engine)
        except BaseException:
            for request_id in submitted:
                self.engine.cancel(request_id)
            raise
        return outputs

    def _submit(
        self, gathered: _Gathered, output: RequestOutput, choice: CompletionOutput, params: SamplingParams, slo: Slo
    ) -> str:
        def take(delta: OutputDelta) -> None:
            gathered.add(output, choice, delta)

        if params.seed is not None and choice.index:
            params = params.with_seed(params.seed + choice.index)
        while True:
            try:
                return self.engine.submit(output.prompt_token_ids, params, take, slo=slo)
            except QueueFull:
                gathered.wait_for_room()


class _Gathered:
    """Collects deltas from the engine's thread until `expected` requests have ended."""

    def __init__(self, expected: int):
        self._changed = threading.Condition()
        self._open = expected
        self._errors: list[str] = []

    def add(self, output: RequestOutput, choice: CompletionOutput, delta: OutputDelta) -> None:
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        if delta.logprobs:
            choice.logprobs = [*(choice.logprobs or []), *delta.logprobs]
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = list(delta.prompt_logprobs)
        if delta.finish_reason is None:
            return
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.metrics is not None:
            output.metrics = delta.metrics
        with self._changed:
            self._open -= 1
            if delta.error:
                self._errors.append(delta.error)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait(0.1)

    def wait(self, engine: Engine) -> None:
        """Until all have ended: the engine answers every request, also when it fails or is shut down."""
        with self._changed:
            while self._open and (self._changed.wait(1.0) or engine.health != "dead"):
                pass
            if self._open:
                raise RuntimeError(engine.failure or "the engine has stopped")
        if self._errors:
            raise RuntimeError(self._errors[0])
