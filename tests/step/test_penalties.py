"""The penalty table holds the known tokens of running requests, and nothing else."""

from __future__ import annotations

import numpy as np

from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.request import Request
from jaxspec.step.penalties import UPDATE, Penalties
from jaxspec.step.warmup import WarmUp

VOCAB = 300


def penalties(max_num_seqs: int) -> Penalties:
    made = Penalties(max_num_seqs, VOCAB)
    WarmUp().compile_now("", [made.job()])
    return made


def request(name: str, prompt: list[int]) -> Request:
    return Request(name, len(prompt), list(prompt), 100, 0.0)


def check(made: Penalties, row: int, known: Request, bias: dict[int, float]) -> None:
    prompt, output = known.tokens[: known.prompt_len], known.tokens[known.prompt_len :]
    np.testing.assert_array_equal(made.table.generated[row], np.bincount(output, minlength=VOCAB))
    np.testing.assert_array_equal(made.table.prompt[row], np.isin(np.arange(VOCAB), prompt))
    np.testing.assert_array_equal(made.table.bias[row], [bias.get(token, 0.0) for token in range(VOCAB)])


def test_rows_follow_their_requests() -> None:
    """Long prompts and biases take several updates; a row given to another request has nothing of the first."""
    made, rng = penalties(2), np.random.default_rng(0)
    bias = {token: float(token % 7 - 3) for token in range(UPDATE + 20)}
    each = {
        request("long", rng.integers(VOCAB, size=2 * UPDATE + 3).tolist()): SamplingParams(logit_bias=bias),
        request("short", [1, 1, 2]): SamplingParams(presence_penalty=1.0),
    }
    long, short = each
    for new in ([], [5, 5, 9], [9]):
        for known in each:
            known.tokens += new
        rows = made.update(each)
        assert sorted(rows.values()) == [1, 2] and made.free == 0
        check(made, rows["long"], long, bias)
        check(made, rows["short"], short, {})
    made.release(long)
    made.release(long)  # it has no row: nothing to free
    assert made.free == 1
    other = request("other", [4])
    assert made.update({short: each[short], other: SamplingParams(frequency_penalty=0.5)}) == {
        "short": rows["short"],
        "other": rows["long"],
    }
    check(made, rows["long"], other, {})
    made.release(short)
    made.release(other)
    assert made.update({long: each[long]}).keys() == {"long"} and made.free == 1
    assert not any(np.asarray(part[0]).any() for part in made.table), "row 0 is for requests without penalties"


def test_a_request_that_runs_again_is_counted_as_a_whole() -> None:
    made, params = penalties(1), SamplingParams(repetition_penalty=1.5)
    known = request("r", [3, 4])
    for new in (7, 8, 7):
        known.tokens.append(new)
        row = made.update({known: params})["r"]
        check(made, row, known, {})
        made.release(known)
