"""Lengths are predicted again while answers are generated: from the right hidden states, with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import tiny
from helpers.generation import GREEDY, check_clean, tokens_of
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.models.decoder import Decoder, device_weights
from jaxspec.models.drafter import feature_width, target_features
from jaxspec.models.length_probe import ENDS, LengthProbe, median_left
from jaxspec.models.load.probe_file import load_probe, save_probe
from jaxspec.predict import probe as probes
from jaxspec.sched.request import Request

SIZES: dict[str, Any] = dict(
    page_size=16, max_num_seqs=2, token_buckets=[1, 16], kv_cache_tokens=1024, max_num_batched_tokens=16,
    max_model_len=256, compilation_cache_dir="", draft=[], predictor="oracle",
)  # fmt: skip
LONG = replace(GREEDY, max_tokens=40)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "p.safetensors"
    save_probe(LengthProbe(feature_width(tiny.config()), 8, nnx.Rngs(1)), "tiny", path)
    return path


@pytest.mark.parametrize("more", [{}, {"draft": ["ngram"], "tree": "chain"}, {"async_scheduling": True}])
@pytest.mark.parametrize("order", ["srpt", "alise", "gittins"])
def test_predictions_change_and_tokens_do_not(probe: Path, order: str, more: dict[str, Any]) -> None:
    texts = [[i, 7, 2 * i, 9] for i in range(6)]
    with tiny.llm(**SIZES | more, order=order, length_probe=str(probe), length_probe_every=4) as llm:
        got = [tokens_of(o) for o in llm.generate(texts, LONG)]
        assert llm.engine.stats().compilations_after_warmup == 0
        assert got == [tiny.greedy(t, 40) for t in texts]
        assert llm.engine.loop.repredictor is not None and llm.engine.loop.repredictor.made > 0
        assert llm.engine.stats().predicted_again_seconds > 0
        check_clean(llm)


def test_the_probe_reads_the_last_committed_position(probe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plain forward pass over what the request has written so far."""
    target = tiny.model()
    decoder = Decoder(target.config, device_weights(target.config, target.weights, "float32"))
    weights = load_probe(probe, target.config)
    with tiny.llm(**SIZES, order="srpt", length_probe=str(probe), length_probe_every=4) as llm:
        seen: list[tuple[list[int], float]] = []
        repredictor = llm.engine.loop.repredictor
        assert repredictor is not None
        read = repredictor._left_of

        def left_of(requests: Sequence[Request]) -> Sequence[float]:
            found = read(requests)
            seen.extend((list(r.tokens[: r.computed]), left) for r, left in zip(requests, found, strict=True))
            return found

        monkeypatch.setattr(repredictor, "_left_of", left_of)
        llm.generate([[i, 7, 2 * i, 9] for i in range(5)], LONG)
    assert len(seen) > 5
    forward = jax.jit(lambda tokens: target_features(decoder, tokens))
    for tokens, value in seen[:8]:
        padded = np.zeros(64, np.int32)
        padded[: len(tokens)] = tokens
        features = forward(jnp.asarray(padded))[len(tokens) - 1]
        assert value == pytest.approx(float(median_left(weights(features[None]))[0]), rel=1e-3)


def test_nothing_is_predicted_while_nobody_waits(probe: Path) -> None:
    with tiny.llm(**SIZES, order="srpt", length_probe=str(probe), length_probe_every=4) as llm:
        llm.generate([[1, 2], [3, 4]], LONG)
        assert llm.engine.loop.repredictor is not None and llm.engine.loop.repredictor.made == 0


@pytest.mark.slow
def test_auto_takes_the_shipped_probe_where_lengths_are_read(
    probe: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None for models without one; a name of another model's is a warning."""
    sizes = SIZES | {"predictor": "none"}
    with tiny.llm(**sizes, order="srpt", length_probe="auto") as llm:
        assert llm.engine.loop.repredictor is None
    monkeypatch.setattr(probes, "DEFAULT", {tiny.model().name: probe.stem, "other": "smollm2-probe"})
    monkeypatch.setattr(probes, "PROBES", probe.parent)
    for order, predictor, found in (("srpt", "none", True), ("fcfs", "none", False), ("srpt", "oracle", False)):
        more = {"order": order, "predictor": predictor, "memory": "recompute", "length_probe": "auto"}
        with tiny.llm(**SIZES | more) as llm:
            assert (llm.engine.loop.repredictor is not None) is found
    with tiny.llm(**SIZES, order="srpt", length_probe=probe.stem) as llm:
        assert llm.engine.loop.repredictor is not None, "by name"
    monkeypatch.undo()
    config = EngineConfig(order="srpt", length_probe="auto")
    other = replace(tiny.model(), name="smollm2-135m")
    assert probes.build(config, other) is None and "lengths are not predicted again: length probe" in caplog.text


def test_the_shipped_probe_fits_its_model_and_is_small() -> None:
    path = probes.shipped(probes.PROBES)[probes.DEFAULT["smollm2-135m"]]
    assert path.stat().st_size < 0.5e6
    target = replace(tiny.config(), num_layers=30, hidden_size=576)
    logits = load_probe(path, target)(jnp.zeros((2, feature_width(target))))
    assert logits.shape == (2, len(ENDS)) and bool(jnp.isfinite(logits).all())


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="length_probe: cannot read"):
        tiny.llm(**SIZES, order="srpt", length_probe=str(tmp_path / "none"))


def test_a_probe_that_nothing_reads_is_refused(probe: Path) -> None:
    with pytest.raises(ConfigError, match="length_probe: neither order fcfs nor the other policies read lengths"):
        tiny.llm(**SIZES, memory="recompute", length_probe=str(probe))
