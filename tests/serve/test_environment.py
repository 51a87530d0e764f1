"""Options of the server as environment variables."""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest

from jaxspec.config import EngineConfig
from jaxspec.serve import __main__ as command
from jaxspec.serve import environment
from jaxspec.serve.__main__ import main


class Started(Exception):
    """The command line is good; a model would be loaded now."""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`start(argv, **variables)` -> (options, settings) that the server would start with."""

    def stop(args: argparse.Namespace, config: EngineConfig) -> int:
        raise Started(args, config)

    def start(argv: str = "", **variables: str) -> tuple[argparse.Namespace, EngineConfig]:
        for name in [name for name in os.environ if name.startswith("JAXSPEC_")]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(Started) as started:
            main(argv.split())
        return started.value.args

    monkeypatch.setattr(command, "_run", stop)
    return start


def test_options_and_settings(start: Any) -> None:
    args, config = start(
        JAXSPEC_PORT="8001", JAXSPEC_API_KEY="one two", JAXSPEC_ALLOWED_ORIGINS="http://a http://b",
        JAXSPEC_SSE_KEEP_ALIVE="2.5", JAXSPEC_ENABLE_LOG_REQUESTS="1", JAXSPEC_LOG_LEVEL="warning",
        JAXSPEC_MAX_MODEL_LEN="64", JAXSPEC_DRAFT="ngram truncated:6", JAXSPEC_ENABLE_PREFIX_CACHING="false",
        JAXSPEC_SERVED_MODEL_NAME="a b", JAXSPEC_SET="laps_sd.queues=6 aging_ms=30", JAXSPEC_HOST="",
    )  # fmt: skip
    assert (args.port, args.host, args.log_level, args.sse_keep_alive) == (8001, "127.0.0.1", "warning", 2.5)
    assert (args.api_key, args.allowed_origins) == (["one", "two"], ["http://a", "http://b"])
    assert args.enable_log_requests is True
    assert (config.max_model_len, config.draft, config.served_model_name) == (64, ["ngram", "truncated:6"], ["a", "b"])
    assert (config.enable_prefix_caching, config.laps_sd.queues, config.aging_ms) == (False, 6, 30)


def test_the_command_line_wins(start: Any) -> None:
    args, config = start(
        "--port 1 --draft none --no-enable-prefix-caching --set max_num_seqs=5 --set laps_sd.growth=3",
        JAXSPEC_PORT="2", JAXSPEC_DRAFT="ngram", JAXSPEC_ENABLE_PREFIX_CACHING="true", JAXSPEC_MAX_NUM_SEQS="3",
        JAXSPEC_SET="laps_sd.growth=4 laps_sd.queues=6",
    )  # fmt: skip
    assert (args.port, config.draft, config.enable_prefix_caching, config.max_num_seqs) == (1, [], False, 5)
    assert (config.laps_sd.growth, config.laps_sd.queues) == (3, 6)


def test_variables_win_over_the_preset(start: Any, tmp_path: Any) -> None:
    (tmp_path / "preset.yaml").write_text("max_num_seqs: 3\nseed: 4\n")
    _, config = start(JAXSPEC_CONFIG=str(tmp_path / "preset.yaml"), JAXSPEC_MAX_NUM_SEQS="5")
    assert (config.max_num_seqs, config.seed) == (5, 4)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("JAXSPEC_PORT", "x", "must be a port number"),
        ("JAXSPEC_DRAIN_TIMEOUT", "soon", "must be a number"),
        ("JAXSPEC_LOG_LEVEL", "loud", "must be one of debug"),
        ("JAXSPEC_ENABLE_LOG_REQUESTS", "maybe", "must be one of 1, true"),
        ("JAXSPEC_MAX_NUM_SEQS", "many", "max_num_seqs"),
        ("JAXSPEC_DRAFT", "ngram ngram", "named twice"),
        ("JAXSPEC_SET", "laps_sd.queues=x", "laps_sd.queues"),
        ("JAXSPEC_SET", "no_setting=1", "unknown setting"),
        ("JAXSPEC_SET", "word", "key=value"),
        ("JAXSPEC_CONFIG", "/no/such.yaml", "cannot read"),
    ],
)
def test_a_bad_value_gets_one_line(
    name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        main([])
    line = capsys.readouterr().err
    assert (left.value.code, line.count("\n")) == (2, 1)
    assert f"error: {name}: " in line and says in line


def test_an_option_is_not_blamed_on_a_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXSPEC_MAX_NUM_SEQS", "3")
    with pytest.raises(SystemExit):
        main(["--max-num-seqs", "many"])
    assert "JAXSPEC" not in capsys.readouterr().err


def test_unknown_variables_get_a_warning(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    start(JAXSPEC_PROT="1", JAXSPEC_FOOBAR="1", JAXSPEC_CACHE="/c", JAXSPEC_THREADS="1", JAXSPEC_SEED="1")
    (message,) = caplog.messages
    assert message.endswith(": JAXSPEC_FOOBAR, JAXSPEC_PROT (did you mean JAXSPEC_PORT?)")


def test_variables_of_kubernetes_are_not_ours(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It sets them for a service named jaxspec."""
    args, _ = start(
        JAXSPEC_PORT="tcp://10.0.0.1:80", JAXSPEC_SERVICE_HOST="10.0.0.1", JAXSPEC_SERVICE_PORT="80",
        JAXSPEC_SERVICE_PORT_HTTP="80", JAXSPEC_PORT_80_TCP="tcp://10.0.0.1:80", JAXSPEC_PORT_80_TCP_ADDR="10.0.0.1",
    )  # fmt: skip
    assert (args.port, caplog.messages) == (8000, [])


def test_no_option_has_the_name_of_another_variable() -> None:
    variables = {environment.variable(action.dest) for action in command._parser()._actions}
    assert not variables & set(environment._OTHERS)
