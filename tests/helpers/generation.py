"""Random requests for the tiny engine, and checks of its state afterwards."""

from __future__ import annotations

import time

from hypothesis import strategies as st

from helpers.patience import PATIENCE
from jaxspec import LLM, SamplingParams
from jaxspec.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def check_clean(llm: LLM) -> None:
    """Check that no request runs or waits and that nothing is kept. A request's last output comes shortly before."""

    def left() -> tuple[object, ...]:
        stats, loop = llm.engine.stats(), llm.engine.loop
        rows = llm.engine.config.max_num_seqs - loop.penalties.free
        drafts = len(loop.speculator.drafted)
        return stats.running, stats.waiting, stats.kv_usage, rows, len(llm.engine._states), drafts

    deadline = time.monotonic() + PATIENCE
    while any(left()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left() == (0, 0, 0, 0, 0, 0)
    llm.engine._pool.check([])


def tokens_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


prompts = st.lists(st.integers(0, 255), min_size=1, max_size=40)


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {7: 4.0, 200: -50.0}]),
    seed=st.integers(0, 2**40),
    max_tokens=st.integers(1, 24),
    ignore_eos=st.just(True),
)
