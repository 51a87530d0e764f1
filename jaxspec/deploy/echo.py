"""A replica without an engine: it answers at once, to measure what routing and transport take."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from jaxspec.config import EngineConfig
from jaxspec.deploy.load import Load
from jaxspec.deploy.messages import Admitted, Facts, Message, Outputs, Submission
from jaxspec.engine.metrics import EngineStats
from jaxspec.models.load import load_model
from jaxspec.outputs import OutputDelta, RequestMetrics
from jaxspec.sched.routing import ReplicaReport
from jaxspec.sched.routing.report import MOST_PREFIXES


class Echo:
    """Answers with the last token of the prompt. `config`: which model it pretends to be; only its header is read."""

    def __init__(self, config: EngineConfig) -> None:
        model = load_model(config.model, config.revision)
        names, size = config.served_model_name or [model.name], model.config
        self._facts = Facts(names, size.max_position, size.vocab_size, config, {})
        # As large as a report gets.
        prefixes = frozenset(range(MOST_PREFIXES))
        self._report = ReplicaReport(
            0.0, 8, 0, config.max_num_seqs, 0, 1000.0, 1e-4, 0.01, page_size=config.page_size, prefixes=prefixes
        )

    def facts(self) -> Facts:
        return self._facts

    def check_health(self) -> None:
        """An echo is always healthy."""

    async def load(self) -> Load:
        """A constant load: an echo does no work."""
        return Load(self._report, EngineStats())

    async def scaling_stats(self) -> dict[str, float]:
        """None: the number of echoes is fixed."""
        return {}

    async def generate(self, submission: Submission) -> AsyncGenerator[Message, None]:
        yield Admitted()
        metrics = RequestMetrics(0.0, 0.0, 0.0, 0.0, len(submission.prompt), output_tokens=1)
        last = submission.prompt[-1:]
        yield Outputs(0, (OutputDelta(submission.id, "x", last, finish_reason="length", metrics=metrics),))

    def shutdown(self) -> None:
        """There is nothing to stop."""
