"""Predictors that read prompts. They run in the engine, and report lengths later (`Scheduler.predicted`)."""

from __future__ import annotations

from pydantic import Field

from jaxspec.sched.length.length import Unpredicted
from jaxspec.sched.slots import PREDICTORS, Section


@PREDICTORS.register("auto")
class Auto(Unpredicted):
    """As `proxy` if there is one for the model, else none."""

    reader = "jaxspec.predict.build:auto"


@PREDICTORS.register("proxy")
class Proxy(Unpredicted):
    """A small encoder reads the prompt (SSJF)."""

    reader = "jaxspec.predict.build:proxy"


class RetrievalSettings(Section):
    """`predictor: retrieval`: output lengths of similar prompts (ALISE §3.1, Algorithm 1)."""

    #: Maximum number of similar prompts whose output lengths are averaged, weighted by similarity.
    k: int = Field(default=8, ge=1, le=256)
    #: Minimum cosine similarity of their embeddings. If no prompt reaches it, the proxy predicts. At 0.8 similar
    #: prompts predicted worse than the proxy, at 0.9 about as well or a little better, on the few that had one.
    threshold: float = Field(default=0.9, gt=0, le=1)
    #: Average their lengths with the proxy's prediction, each by its precision, instead of asking the proxy only about
    #: prompts that are like no other. It then reads every prompt.
    blend: bool = False
    #: The pre-trained encoder: all-minilm-l6-v2, or the Hugging Face folder of a BERT encoder.
    encoder: str = Field(default="all-minilm-l6-v2", min_length=1)
    #: Maximum number of lengths stored, about 1.5 KB each. A full index evicts the least recently stored or found.
    capacity: int = Field(default=10_000, ge=1, le=1_000_000)
    #: File that keeps them across restarts. None: one file per model and encoder in the cache folder. "": none.
    path: str | None = None


@PREDICTORS.register("retrieval", RetrievalSettings)
class Retrieval(Unpredicted):
    """Lengths of similar prompts, else the proxy (ALISE)."""

    reader = "jaxspec.predict.build:retrieval"
