"""`python -m jaxspec.serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxspec.config import ConfigError, EngineConfig, parse_overrides

_PROGRAM = "python -m jaxspec.serve"
#: What a shell reports for a program that Ctrl-C ended.
_INTERRUPTED = 130
#: Settings that have an option of their own, named as in vLLM or SGLang; `--set` takes all of them.
SETTINGS = {
    "served_model_name": "the model's name in the API (default: its own)",
    "dtype": "numbers of weights and KV: float32, bfloat16",
    "max_model_len": "longest prompt and output together, in tokens (default: the model's limit)",
    "max_num_seqs": "requests that run at once",
    "max_num_batched_tokens": "token budget of a step",
    "max_queued_requests": "requests that may wait; more get 429",
    "enable_prefix_caching": "true or false: reuse the KV of equal prompt beginnings",
    "kv_cache_dtype": "auto, int8",
    "swap_space": "GiB of host memory for KV that leaves the device; 0: recompute instead",
    "seed": "seed of requests that name none",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; bad input leaves through `SystemExit` with code 2 and one line that says what is wrong."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "httpcore", "asyncio", "jax", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.root.level))
    try:
        config = EngineConfig.load(args.config, **_overrides(args))
    except ConfigError as e:
        _fail(str(e))
    try:
        return _run(args, config)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


def _run(args: argparse.Namespace, config: EngineConfig) -> int:
    from jaxspec.serve.app import MEGABYTE, ServerOptions
    from jaxspec.serve.run import bind, serve

    try:
        sock = bind(args.host, args.port)
    except OSError as e:
        _fail(f"can't listen on {args.host} port {args.port}: {e.strerror or e}")

    # Imported late: JAX takes a second, and what is wrong with the command line should show at once.
    from jaxspec.engine.engine import Engine
    from jaxspec.models.load import ModelLoadError
    from jaxspec.progress import bar

    try:
        with bar(sys.stderr.isatty()) as progress:
            engine = Engine(config, progress=progress)
    except (ConfigError, ModelLoadError, OSError) as e:
        _fail(f"can't load {config.model}: {e}" if not isinstance(e, ConfigError) else str(e))
    options = ServerOptions(args.api_key, int(args.max_body_mb * MEGABYTE))
    engine.start()
    try:
        return serve(engine, sock, options, args.drain_timeout, args.log_level)
    except OSError as e:
        _fail(f"can't serve on {args.host} port {args.port}: {e.strerror or e}")
    finally:
        engine.shutdown()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage that hides it."""
        _fail(f"{message} (see --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description="Serve a model through an OpenAI-compatible API.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", help="built-in name, Hugging Face directory, .gguf file or hub id (default: smollm2-135m)")
    add(
        "--draft",
        action="append",
        metavar="DRAFTER",
        help="auto (the default: ngram and the trained drafter that comes for the model), ngram, truncated:K (the "
        "model's first K layers), a trained drafter's name or file, or a model with the same tokenizer; repeatable; "
        "none switches a preset's off",
    )
    add("--config", metavar="FILE", help="YAML preset")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting of the preset; repeatable")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8000, help="0 takes a free one (default: %(default)s)")
    add(
        "--api-key",
        type=_key,
        default=os.environ.get("JAXSPEC_API_KEY") or None,
        metavar="KEY",
        help="ask clients for this key (default: $JAXSPEC_API_KEY, none if unset); better in the environment, where "
        "other users of the machine don't see it",
    )
    add("--max-body-mb", type=_positive, default=8.0, metavar="MB", help="largest request body (default: %(default)g)")
    for name, help in SETTINGS.items():
        add("--" + name.replace("_", "-"), metavar="VALUE", help=help)
    add(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM or Ctrl-C; a second one ends at once (default: "
        "%(default)g)",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Settings named on the command line; an option wins over `--set`. Raises `ConfigError`."""
    named = {name: getattr(args, name) for name in ("model", "draft", *SETTINGS)}
    return {**parse_overrides(args.set), **{key: value for key, value in named.items() if value is not None}}


def _key(text: str) -> str:
    if text:
        return text
    raise argparse.ArgumentTypeError("must not be empty")


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) < 2**16:
        return int(text)
    raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, got {text!r}")


def _positive(text: str) -> float:
    if (value := _seconds(text)) > 0:
        return value
    raise argparse.ArgumentTypeError("must be more than 0")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if 0 <= value < 1e9:
        return value
    raise argparse.ArgumentTypeError(f"must be a number, not negative, got {text!r}")


def _fail(message: str) -> NoReturn:
    one_line = " ".join(message.split())
    print(f"{_PROGRAM}: error: {one_line}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main())
