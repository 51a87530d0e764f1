"""`LLM`: offline inference."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxspec.chat.prompt import render, special, tool_format
from jaxspec.chat.reasoning import reasoning_of
from jaxspec.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.errors import InvalidRequest
from jaxspec.models.load import LoadedModel
from jaxspec.outputs import CompletionOutput, OutputDelta, RequestMetrics, RequestOutput
from jaxspec.progress import bar
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.scheduler import QueueFull
from jaxspec.sched.slo import Slo
from jaxspec.slo import read, resolve

Prompt = str | Sequence[int]
#: The keys of `slo` in the HTTP API: tpot_ms, ttft_ms, category.
SloFields = Mapping[str, Any]


class LLM:
    """A model and its engine. Use it as a context manager, or call `close`.

    `model` and `draft` are those of the server's `--model` and `--draft` (`draft=()` turns a preset's drafters off);
    `config` is a YAML preset; `overrides` are settings of `EngineConfig`. `show_progress`: bars of loading and
    compiling on standard error; without a terminal they are log lines. A text stands before each stage's name.

    Raises `ConfigError` if a setting is invalid, `ModelLoadError` if a model cannot be loaded.
    """

    def __init__(
        self,
        model: str | LoadedModel | None = None,
        draft: Sequence[str] | str | None = None,
        config: str | None = None,
        *,
        show_progress: bool | str = True,
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
        """Stop the engine. Unfinished requests are aborted."""
        self.engine.shutdown()

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """`SamplingParams` with the defaults that the server would use, those of the model's generation_config.json.

        `changes` win over them. `generate` does not use these defaults by itself. Raises `InvalidRequest`.
        """
        return SamplingParams(**{**self.engine.default_sampling, **changes})

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | None = None,
        *,
        slo: SloFields | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one conversation (a list of messages) or several, formatted by the model's chat template.

        `continue_final_message`: the output continues the last message. `tools`: functions that the answer may call,
        in OpenAI's form; `jaxspec.chat.parser` finds calls in its text. `chat_template_kwargs`: variables of the
        template, such as `enable_thinking`. Raises `ValueError` if the template refuses the messages.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        form = {
            **(chat_template_kwargs or {}), "continue_final_message": continue_final_message,
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        prompts = [render(self.tokenizer, c, tools, form) for c in conversations]
        template, sampling = self.tokenizer.chat_template, params or SamplingParams(temperature=0)
        calls = tool_format(self.tokenizer, self.engine.config.tool_call_parser)
        if tools and special(calls.tags, self.tokenizer):
            sampling = replace(sampling, skip_special_tokens=False)  # the parser reads them
        each = [sampling] * len(prompts)
        if self.engine.config.reasoning_parser != "none":
            each = [replace(sampling, reasoning=reasoning_of(template, t, continue_final_message)) for t in prompts]
        return self.generate([self.tokenizer.encode(p, add_special_tokens=False) for p in prompts], each, slo=slo)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SloFields | Sequence[SloFields | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt, a text or token ids. The outputs have the order of the prompts.

        `params`: one for all prompts, or one per prompt; the default is greedy with 16 tokens. `slo`: latency SLOs
        `{"tpot_ms": …, "ttft_ms": …, "category": …}`, for all prompts or one per prompt; the config's are the default.

        Raises `InvalidRequest`, before anything runs, if a request cannot be served; `RuntimeError` if the engine
        fails; with `slo.admission: strict`, `SloRefused`. On any error all requests of the call are cancelled.
        """
        batch = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else list(prompts)
        sampling = (
            list(params) if isinstance(params, Sequence) else [params or SamplingParams(temperature=0)] * len(batch)
        )
        if len(sampling) != len(batch):
            raise InvalidRequest("params", f"{len(sampling)} params for {len(batch)} prompts")
        slo_fields = list(slo) if isinstance(slo, Sequence) and not isinstance(slo, str) else [slo] * len(batch)
        if len(slo_fields) != len(batch):
            raise InvalidRequest("slo", f"{len(slo_fields)} slo for {len(batch)} prompts")
        slos = [resolve(read(fields), self.engine.config.slo) for fields in slo_fields]
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in batch]  # type: ignore[arg-type]
        for prompt, p, request_slo in zip(ids, sampling, slos, strict=True):
            self.engine.check(prompt, p, request_slo)
        collector = _Collector(sum(p.n for p in sampling))
        outputs = [
            RequestOutput(
                str(i), source if isinstance(source, str) else None, prompt,
                [CompletionOutput(k) for k in range(p.n)], RequestMetrics(0.0),
            )
            for i, (source, prompt, p) in enumerate(zip(batch, ids, sampling, strict=True))
        ]  # fmt: skip
        submitted: list[str] = []
        try:
            for output, p, request_slo in zip(outputs, sampling, slos, strict=True):
                for completion in output.outputs:
                    submitted.append(self._submit(collector, output, completion, p, request_slo))
            collector.wait(self.engine)
        except BaseException:
            for request_id in submitted:
                self.engine.cancel(request_id)
            raise
        return outputs

    def _submit(
        self,
        collector: _Collector,
        output: RequestOutput,
        completion: CompletionOutput,
        params: SamplingParams,
        slo: Slo,
    ) -> str:
        """Submit one request, waiting while the queue is full. Returns its id."""

        def on_delta(delta: OutputDelta) -> None:
            collector.add(output, completion, delta)

        if params.seed is not None and completion.index:
            params = params.with_seed(params.seed + completion.index)
        while True:
            try:
                return self.engine.submit(output.prompt_token_ids, params, on_delta, slo=slo)
            except QueueFull:
                collector.wait_for_progress()


class _Collector:
    """Collects deltas from the engine's thread until `expected` requests have ended."""

    def __init__(self, expected: int):
        self._changed = threading.Condition()
        self._unfinished = expected
        self._errors: list[str] = []

    def add(self, output: RequestOutput, completion: CompletionOutput, delta: OutputDelta) -> None:
        """Append a delta to its output. Called in the engine's thread."""
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if delta.logprobs:
            completion.logprobs = [*(completion.logprobs or []), *delta.logprobs]
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = list(delta.prompt_logprobs)
        if delta.finish_reason is None:
            return
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.metrics is not None:
            output.metrics = delta.metrics
        with self._changed:
            self._unfinished -= 1
            if delta.error:
                self._errors.append(delta.error)
            self._changed.notify_all()

    def wait_for_progress(self) -> None:
        """Until a request ends, at most 0.1 s."""
        with self._changed:
            self._changed.wait(0.1)

    def wait(self, engine: Engine) -> None:
        """Wait until all requests have ended: the engine ends every request, also when it fails or is shut down.

        Raises `RuntimeError` if a request ended with an error or the engine is dead.
        """
        with self._changed:
            while self._unfinished and (self._changed.wait(1.0) or engine.health != "dead"):
                pass
            if self._unfinished:
                raise RuntimeError(engine.failure or "the engine has stopped")
        if self._errors:
            raise RuntimeError(self._errors[0])
