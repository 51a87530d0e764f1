"""The interface of `predictor`, and the correction of predictions."""

from __future__ import annotations

from math import inf

from jaxspec.sched.request import Request
from jaxspec.sched.slots import PREDICTORS, Policy


class LengthSource(Policy):
    """Predicts a request's output length at its arrival, without its text."""

    #: "module:function" that builds the engine's predictor of this name, which reads prompts: see
    #: `jaxspec.predict.build`. None: the scheduler alone predicts.
    reader: str | None = None

    def predict(self, request: Request) -> float | None:
        """Output tokens of a request that has just arrived; None if unknown."""
        raise NotImplementedError


@PREDICTORS.register("none")
class Unpredicted(LengthSource):
    """Predicts nothing."""

    def predict(self, request: Request) -> float | None:
        return None


def check(predicted: float) -> None:
    """Raises `ValueError` unless the length is positive and finite."""
    if not 0 < predicted < inf:
        raise ValueError(f"a predicted length is a positive number of tokens, not {predicted}")


def corrected(predicted: float, request: Request) -> float:
    """The prediction, `doubled` until it exceeds the output so far; at most the client's max_tokens."""
    return min(doubled(predicted, request.output_len), request.max_tokens)


def doubled(predicted: float, output_len: float) -> float:
    """The prediction, doubled until it exceeds the output so far (ALISE §3.1)."""
    while predicted <= output_len:
        predicted *= 2
    return predicted


def true_len(request: Request) -> int:
    """The request's true output length; if unknown, max_tokens, which is right for requests that ignore EOS."""
    return request.max_tokens if request.true_len is None else request.true_len
