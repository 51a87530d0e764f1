"""`python -m jaxspec.serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxspec.config import ConfigError, EngineConfig, http_url, merged, parse_overrides, settings_like
from jaxspec.errors import out_of_memory
from jaxspec.extras import lacking
from jaxspec.serve import environment

log = logging.getLogger("jaxspec.serve")  # `__name__` is "__main__" here

_PROGRAM = "python -m jaxspec.serve"
#: Exit code that shells use for a program ended by Ctrl-C (128 + SIGINT).
_INTERRUPTED = 130
#: Settings with an option of their own, named as in vLLM or SGLang. `--set` accepts every setting.
SETTINGS = {
    "revision": "branch, tag or commit of a model from the hub (default: its main branch)",
    "generation_config": "sampling parameters of requests that do not set them: auto (those of the model's "
    "generation_config.json, default) or none",
    "served_model_name": "model names in the API (default: the name of the loaded model)",
    "dtype": "data type of weights and KV cache: float32, bfloat16, float16 or auto (bfloat16 on a GPU, "
    "float32 elsewhere; default)",
    "max_model_len": "maximum length of prompt plus output, in tokens (default: the model's limit)",
    "max_num_seqs": "maximum number of requests that run at once",
    "max_num_batched_tokens": "maximum number of tokens in one step (token budget)",
    "max_queued_requests": "maximum number of waiting requests; further requests get HTTP 429",
    "enable_prefix_caching": "reuse the KV of prompt prefixes that are already cached (default: yes)",
    "kv_cache_dtype": "data type of the KV cache: auto (same as --dtype), bfloat16 (on a CPU) or int8",
    "gpu_memory_utilization": "share of a GPU's memory to use; the KV cache gets what weights and programs leave of it",
    "swap_space": "host memory for the KV of preempted requests, in GiB; 0: no swapping, KV is recomputed",
    "tool_call_parser": "how the model writes tool calls: hermes, llama3_json, mistral, mistral_args or auto (as its "
    "chat template shows; default)",
    "reasoning_parser": "auto (default): reasoning has a field of its own if the chat template has tags for it; none: "
    "it stays in the text",
    "seed": "sampling seed of requests that do not set one",
}
#: Options that set settings; the others are the server's own.
_OF_CONFIG = ("model", "draft", "set", *SETTINGS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server. Returns the exit code.

    Raises `SystemExit` with code 2 for bad input, after one line on standard error that names the problem.
    """
    parser = _parser()
    try:
        given = environment.read(parser, os.environ)
    except ValueError as e:
        _fail(str(e))
    parser.set_defaults(**{dest: value for dest, value in given.items() if dest not in _OF_CONFIG})
    args = parser.parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    for verbose in ("httpx", "httpcore", "asyncio", "jax", "uvicorn.error"):
        logging.getLogger(verbose).setLevel(max(logging.WARNING, logging.root.level))
    if unknown := environment.unknown(parser, os.environ):
        log.warning("unknown environment variables, which have no effect: %s", ", ".join(unknown))
    try:
        return _run(args, EngineConfig.load(args.config, **_overrides(given, vars(args))))
    except ConfigError as e:
        of_environment = {dest: value for dest, value in given.items() if getattr(args, dest) in (None, [], value)}
        _fail(environment.blamed(str(e), of_environment))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except Exception as e:
        if not out_of_memory(e):
            raise
        why = next(iter(str(e).removeprefix("RESOURCE_EXHAUSTED: ").splitlines()), "").rstrip(".") or "no reason given"
        _fail(
            f"not enough memory ({why}): lower kv_cache_tokens, max_num_seqs or max_num_batched_tokens, on a GPU "
            "gpu_memory_utilization, or take a smaller model"
        )


def _run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Load the model and serve it. Raises `ConfigError` if the model and the settings do not fit."""
    gc.disable()  # imports and tracing create much and free little
    from jaxspec.serve.app import MEGABYTE, ServerOptions
    from jaxspec.serve.run import bind, serve

    if (args.ssl_keyfile is None) != (args.ssl_certfile is None):
        _fail("--ssl-keyfile and --ssl-certfile belong together")
    if args.otlp_traces_endpoint is not None:
        try:  # before the model is loaded
            import jaxspec.serve.tracing  # noqa: F401
        except ModuleNotFoundError as e:
            _fail(f"--otlp-traces-endpoint: {lacking(e) or e}")
    try:
        sock = bind(args.host, args.port)
    except OSError as e:
        _fail(f"cannot listen on {args.host} port {args.port}: {e.strerror or e}")

    # Imported late: JAX takes a second to import, and errors in the command line should show at once.
    from jaxspec.engine.engine import Engine
    from jaxspec.models.load import ModelLoadError
    from jaxspec.progress import bar

    with sock:
        try:
            with bar() as progress:
                engine = Engine(config, progress=progress)
        except (ModelLoadError, OSError) as e:
            _fail(f"cannot load {config.model}: {e}")
        options = ServerOptions(
            tuple(args.api_key or ()), int(args.max_body_mb * MEGABYTE), args.body_timeout, args.max_connections,
            tuple(args.allowed_origins), args.root_path,
            args.ssl_keyfile, args.ssl_certfile, args.sse_keep_alive, args.enable_log_requests, args.ui,
            args.config and Path(args.config).stem, args.otlp_traces_endpoint,
        )  # fmt: skip
        if defaults := engine.default_sampling:
            shown = ", ".join(f"{name}={value}" for name, value in defaults.items())
            log.info("default sampling parameters of the model: %s (--generation-config none: the API's)", shown)
        gc.enable()
        gc.collect()
        gc.freeze()  # what is left stays: later collections need not look at it
        engine.start()
        try:
            return serve(engine, sock, options, args.drain_timeout, args.log_level, args.config)
        except OSError as e:
            _fail(f"cannot serve on {args.host} port {args.port}: {e.strerror or e}")
        finally:
            engine.shutdown()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one line; argparse's usage text would hide the message. Unknown options get a hint."""
        if option := re.match(r"unrecognized arguments: --([\w-]+)", message):
            if similar := settings_like(option[1].replace("-", "_")):
                hints = (self._spelling(name) for name in similar)
                _fail(f"unknown option --{option[1]}; use {' or '.join(hints)}")
        elif message.startswith("unrecognized arguments: "):
            message += "; the model is an option, --model"
        _fail(f"{message} (see --help)")

    def _spelling(self, name: str) -> str:
        """How to give a setting on the command line."""
        option = "--" + name.replace("_", "-")
        return option if option in self._option_string_actions else f"--set {name}=VALUE"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description="Serve a model through an OpenAI-compatible API.",
        epilog="Every option is also an environment variable: JAXSPEC_PORT, JAXSPEC_MAX_MODEL_LEN, …; several values "
        "are separated by spaces. The command line takes precedence over variables, and variables over the preset.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model",
        help="model to serve: built-in name, Hugging Face directory, .gguf file, or hub id, owner/name or "
        "owner/name:Q4_K_M for a .gguf file (default: smollm2-135m)",
    )
    add(
        "--draft",
        action="append",
        metavar="DRAFTER",
        help="drafter for speculative decoding; repeatable. auto (default): grammar, suffix, and the trained drafter "
        "that is included for the model, if any; grammar: what structured output leaves no choice about; suffix: "
        "what followed the last tokens in the text and in earlier answers; "
        "ngram: in the text only; truncated:K: the first K layers of the model; the name "
        "or file of a trained drafter; another model; none: no speculative decoding",
    )
    add("--config", metavar="FILE", help="YAML preset, such as configs/default.yaml")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting of docs/configuration.md, overrides the preset; repeatable",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8000, help="port to listen on; 0: any free port (default: %(default)s)")
    add(
        "--api-key",
        type=_key,
        nargs="+",
        action="extend",
        metavar="KEY",
        help="require one of these API keys from clients (default: those in $JAXSPEC_API_KEY, separated by spaces; no "
        "key if unset). Prefer the environment variable: other users of the machine can read command lines",
    )
    add(
        "--allowed-origins",
        nargs="+",
        default=["*"],
        metavar="ORIGIN",
        help="origins of web pages that may use the server, such as http://localhost:3000 (default: all)",
    )
    add("--root-path", default="", metavar="PATH", help="path of the server behind a proxy that strips it")
    add("--ssl-keyfile", metavar="FILE", help="PEM file of the TLS key; with --ssl-certfile the server speaks HTTPS")
    add("--ssl-certfile", metavar="FILE", help="PEM file of the TLS certificate")
    add(
        "--max-body-mb",
        type=_positive,
        default=8.0,
        metavar="MB",
        help="maximum size of a request body, in MiB (default: %(default)g)",
    )
    add(
        "--body-timeout",
        type=_positive,
        default=30.0,
        metavar="SECONDS",
        help="a request of whose body nothing comes for this long gets HTTP 408 (default: %(default)g)",
    )
    add(
        "--max-connections",
        type=_count,
        default=2048,
        metavar="N",
        help="open connections; further ones are closed (default: %(default)s)",
    )
    for name, help in SETTINGS.items():
        option = "--" + name.replace("_", "-")
        if EngineConfig.model_fields[name].annotation is bool:
            add(option, action=argparse.BooleanOptionalAction, help=help)
        elif name == "served_model_name":
            add(option, nargs="+", metavar="NAME", help=help)
        else:
            add(option, metavar="VALUE", help=help)
    add(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="time for running requests to finish after SIGTERM or Ctrl-C; a second signal stops at once (default: "
        "%(default)g)",
    )
    add(
        "--sse-keep-alive",
        type=_seconds,
        default=15.0,
        metavar="SECONDS",
        help="a stream with nothing to send for this long sends a comment; 0: never (default: %(default)g)",
    )
    add(
        "--enable-auto-tool-choice",
        action="store_true",
        help="for command lines of vLLM: tool_choice auto always works",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="debug also logs every HTTP request (default: %(default)s)",
    )
    add(
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="log the begin and the end of every request: its lengths and times, not its text (default: no)",
    )
    add(
        "--otlp-traces-endpoint",
        type=_url,
        metavar="URL",
        help="send OpenTelemetry traces to this collector over OTLP/HTTP, such as http://localhost:4318/v1/traces "
        "(needs the extra otel; default: no traces)",
    )
    add(
        "--ui",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve the page at / for chatting and watching, and its route /live (default: yes)",
    )
    return parser


def _overrides(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Settings given by options, by destination; later levels take precedence, and in each an option of its own takes
    precedence over `--set`. Raises `ConfigError`."""
    out: dict[str, Any] = {}
    for given in levels:
        own = {name: given.get(name) for name in ("model", "draft", *SETTINGS)}
        out = merged(out, parse_overrides(given.get("set") or ()))
        out |= {name: value for name, value in own.items() if value is not None}
    return out


def _key(text: str) -> str:
    if text:
        return text
    raise argparse.ArgumentTypeError("must not be empty")


def _url(text: str) -> str:
    try:
        return http_url(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) < 2**16:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a port number from 0 to 65535, got {text!r}")


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")


def _positive(text: str) -> float:
    if (value := _seconds(text)) > 0:
        return value
    raise argparse.ArgumentTypeError("must be greater than 0")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if 0 <= value < 1e9:
        return value
    raise argparse.ArgumentTypeError(f"must be a number from 0 to 1e9, got {text!r}")


def _fail(message: str) -> NoReturn:
    one_line = " ".join(message.split())
    print(f"{_PROGRAM}: error: {one_line}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main())
