"""The FastAPI application and its routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

import orjson
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.answer import AnswerForm, CompletionAnswer
from jaxspec.serve.chat import plan_chat
from jaxspec.serve.chat_answer import ChatAnswer
from jaxspec.serve.connections import MAX_CONNECTIONS
from jaxspec.serve.errors import ApiError, bad_request, install_handlers
from jaxspec.serve.fields import check_depth
from jaxspec.serve.guard import BearerAuth, BodyLimit, RequestId, hostname, is_local_name
from jaxspec.serve.live import LiveFeed, LiveReply
from jaxspec.serve.log import ThroughputLog
from jaxspec.serve.metrics import ServerMetrics
from jaxspec.serve.page import page_routes
from jaxspec.serve.prompts import (
    check_text,
    encode,
    encode_chat,
    encode_prompts,
    most_tokens,
    resolve_max_tokens,
    truncate,
)  # fmt: skip
from jaxspec.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, GenerationRequest, TokenizeRequest
from jaxspec.serve.reply import Reply
from jaxspec.serve.responses_answer import ResponsesAnswer
from jaxspec.serve.responses_fields import ResponsesRequest, naming_own_fields
from jaxspec.serve.stream import Generation, HubOptions, OutputHub
from jaxspec.version import __version__

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

MEGABYTE = 2**20
#: Most tokens of a text for `/tokenize`, of models with a smaller context.
_TOKENIZED = 2**17


@dataclass(frozen=True)
class ServerOptions:
    """api_keys: any of them is accepted; none disables authentication. max_body: limit on request bodies, in bytes.
    body_seconds: most seconds in which nothing of a body comes. max_connections: open at a time.
    allowed_origins: web pages that browsers let use the server, "*" for all. root_path: of the server behind a proxy.
    tls_key, tls_certificate: PEM files; without them the server speaks plain HTTP. keep_alive: seconds after which a
    silent stream sends a comment, 0: never. log_requests: log the begin and the end of every request. ui: serve the
    page and `/live`. preset: name of the preset, for the page. traces_endpoint: URL of the collector that gets a span
    for each output; this needs the extra `otel`.
    """

    api_keys: tuple[str, ...] = ()
    max_body: int = 8 * MEGABYTE
    body_seconds: float = 30.0
    max_connections: int = MAX_CONNECTIONS
    allowed_origins: tuple[str, ...] = ("*",)
    root_path: str = ""
    tls_key: str | None = None
    tls_certificate: str | None = None
    keep_alive: float = 15.0
    log_requests: bool = False
    ui: bool = True
    preset: str | None = None
    traces_endpoint: str | None = None


def create_app(engine: Engine, options: ServerOptions | None = None, collectors: Sequence[Collector] = ()) -> FastAPI:
    """The ASGI application that serves a started engine. `collectors`: of further metrics."""
    options = options or ServerOptions()
    metrics, traces = ServerMetrics(engine, engine.model_name, collectors), None
    if options.traces_endpoint is not None:
        from jaxspec.serve.tracing import Traces  # the optional extra `otel`

        traces = Traces(options.traces_endpoint, engine.model_name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        own = HubOptions(metrics, options.log_requests, options.keep_alive, traces)
        hub = OutputHub(asyncio.get_running_loop(), own)
        app.state.serving = serving = Serving(engine, metrics, hub)
        app.state.live = LiveFeed(engine, asyncio.get_running_loop(), partial(serving.facts, options.preset))
        throughput = asyncio.create_task(ThroughputLog(engine).run())
        try:
            yield
        finally:
            throughput.cancel()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    app = FastAPI(
        title="jaxspec", version=__version__, lifespan=lifespan, redirect_slashes=False, root_path=options.root_path
    )
    app.include_router(_routes)
    if options.ui:
        app.state.allowed_hosts = {urlsplit(origin).hostname for origin in options.allowed_origins}
        app.include_router(_live_routes)
        app.router.routes += page_routes()
    install_handlers(app)
    app.add_middleware(BodyLimit, limit=options.max_body, seconds=options.body_seconds)
    if options.api_keys:
        app.add_middleware(BearerAuth, keys=options.api_keys)  # the middleware added last runs first
    app.add_middleware(
        CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )  # fmt: skip
    app.add_middleware(RequestId)
    return app


class Serving:
    """State shared by the routes: one per app, used in its event loop."""

    def __init__(self, engine: Engine, metrics: ServerMetrics, hub: OutputHub) -> None:
        self.engine = engine
        self.metrics = metrics
        self.hub = hub
        self.started = int(time.time())
        self.drafting = bool(engine.config.draft)

    def card(self, name: str) -> dict[str, Any]:
        """The model's entry in `/v1/models` under one of its names."""
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "jaxspec",
            "max_model_len": self.engine.max_model_len,
            "dtype": self.engine.config.dtype,
        }

    def facts(self, preset: str | None) -> dict[str, Any]:
        """What the live view shows of the server. preset: name of the configuration's preset."""
        attainment = self.metrics.attainment
        slo = {"met": attainment.met, "missed": attainment.missed}
        return {"model": self.engine.model_name, "preset": preset, "slo": slo}

    def check_model(self, name: str | None) -> str:
        """The name that the answer has. Raises `ApiError` (404) if the request names another model."""
        if name is not None and name not in self.engine.model_names:
            names = ", ".join(map(repr, self.engine.model_names))
            message = f"the model {name!r} does not exist; this server serves {names}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.engine.model_name

    def form_of(self, body: GenerationRequest) -> AnswerForm:
        """What the response has besides its text."""
        return AnswerForm(
            body.n or 1, body.include_usage, body.running_usage, self.drafting, bool(body.return_predicted_tokens),
            bool(body.return_token_ids), bool(body.return_tokens_as_token_ids), body.prompt_logprobs is not None,
            bool(body.return_accepted_drafts),
        )  # fmt: skip

    def check_health(self) -> None:
        """Raises `ApiError` (503) if the engine takes no requests."""
        if self.engine.health == "draining":
            raise ApiError(503, "the server is shutting down", code="draining")
        self.check_alive()

    def check_alive(self) -> None:
        """Raises `ApiError` (503) if the engine has ended; it may be draining."""
        if self.engine.health == "dead":
            raise ApiError(503, f"the engine has failed: {self.engine.failure}", code="engine_dead")

    def params_of(
        self, params: SamplingParams, prompts: list[list[int]], field: str, length_field: str
    ) -> list[SamplingParams]:
        """Sampling parameters of each output: `n` per prompt, in the prompts' order.

        `field` and `length_field` are the request fields that the prompts and `max_tokens` came from. Raises `ApiError`
        (400) for values out of range.
        """
        default_length = self.engine.default_sampling.get("max_tokens")
        limit = self.engine.config.max_queued_requests
        if len(prompts) * params.n > limit:
            param = field if params.n == 1 else "n"
            message = f"a request may have at most {limit} outputs (prompts × n)"
            raise ApiError(400, message, param=param, code="invalid_value")
        out = []
        for prompt in prompts:
            length = resolve_max_tokens(
                prompt, params.max_tokens, self.engine.max_model_len, field, length_field, default_length
            )
            with bad_request():  # min_tokens, if the request does not set the length
                each = replace(params, max_tokens=length)
            out += [each if each.seed is None else each.with_seed(each.seed + i) for i in range(each.n)]
        return out

    async def submit(
        self, id: str, body: GenerationRequest, prompts: list[list[int]], params: list[SamplingParams], request: Request
    ) -> Generation:
        """Submit sequence i of the HTTP `request` with `prompts[i]` and `params[i]`. Raises `ApiError`."""
        if params:
            with bad_request():
                await self.engine.constraints.compile_aside(params[0])
        generation = Generation(self.engine, self.hub, id, request.headers)
        predict = bool(body.return_predicted_tokens)
        generation.submit(prompts, params, body.priority or 0, body.slo, predict, _tenant(request))
        return generation


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Parse the body with orjson, which rejects NaN, infinities and invalid UTF-8."""
        value = orjson.loads(await self.body())
        check_depth(value)
        return value


class _JsonRoute(APIRoute):
    def get_route_handler(self) -> Any:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


_routes = APIRouter(route_class=_JsonRoute)
_live_routes = APIRouter()


def _serving(request: Request) -> Serving:
    return request.app.state.serving


def _tenant(request: Request) -> str:
    """Whose request it is: the number of its API key; empty without keys."""
    return request.scope.get("tenant", "")


@_routes.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    serving = _serving(request)
    name = serving.check_model(body.model)
    serving.check_health()
    tokenizer, longest = serving.engine.tokenizer, serving.engine.max_model_len
    most = most_tokens(body, longest)
    prompts = await encode_prompts(tokenizer, body.prompts, body.add_special_tokens is not False, most)
    prompts = [truncate(p, body, longest) for p in prompts]
    params = serving.params_of(body.sampling(serving.engine.default_sampling), prompts, "prompt", body.length_field)
    n = body.n or 1
    echo = None
    if body.echo:
        skip = body.skip_special_tokens is not False
        whole = body.truncate_prompt_tokens is None
        given = body.prompts if whole else prompts
        texts = [p if isinstance(p, str) else tokenizer.decode(p, skip) for p in given]
        echo = [text for text in texts for _ in range(n)]
    each = [p for p in prompts for _ in range(n)]
    id = f"cmpl-{uuid4().hex}"
    answer = CompletionAnswer(
        id, name, tokenizer, each, serving.form_of(body), echo=echo, only_echo=body.only_scores
    )  # fmt: skip
    return Reply(await serving.submit(id, body, each, params, request), answer, bool(body.stream))


@_routes.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request) -> Response:
    serving = _serving(request)
    name = serving.check_model(body.model)
    serving.check_health()
    plan = await plan_chat(body, serving.engine)
    prompt = truncate(plan.prompt, body, serving.engine.max_model_len)
    params = serving.params_of(plan.params, [prompt], "messages", body.length_field)
    each = [prompt] * (body.n or 1)
    id = f"chatcmpl-{uuid4().hex}"
    answer = ChatAnswer(id, name, serving.engine.tokenizer, each, serving.form_of(body), chat=plan.form)
    return Reply(await serving.submit(id, body, each, params, request), answer, bool(body.stream))


@_routes.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request) -> Response:
    serving = _serving(request)
    name = serving.check_model(body.model)
    serving.check_health()
    id = f"resp_{uuid4().hex}"
    with naming_own_fields():
        chat = body.as_chat()
        plan = await plan_chat(chat, serving.engine)
        prompt = truncate(plan.prompt, chat, serving.engine.max_model_len)
        length_field = "max_completion_tokens" if body.max_output_tokens is not None else chat.length_field
        params = serving.params_of(plan.params, [prompt], "input", length_field)
        generation = await serving.submit(id, chat, [prompt], params, request)
    answer = ResponsesAnswer(
        id, name, serving.engine.tokenizer, [prompt], serving.form_of(chat), chat=plan.form, body=body
    )
    return Reply(generation, answer, bool(body.stream))


@_routes.get("/v1/responses/{id}")
@_routes.delete("/v1/responses/{id}")
@_routes.post("/v1/responses/{id}/cancel")
async def stored_response(id: str) -> Response:
    raise ApiError(404, f"there is no response {id!r}: this server stores none", code="not_found")


@_routes.get("/v1/models")
async def models(request: Request) -> Response:
    serving = _serving(request)
    return JSONResponse({"object": "list", "data": [serving.card(name) for name in serving.engine.model_names]})


@_routes.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    serving = _serving(request)
    return JSONResponse(serving.card(serving.check_model(name)))


@_routes.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    serving = _serving(request)
    serving.check_model(body.model)
    tokenizer, most = serving.engine.tokenizer, max(_TOKENIZED, serving.engine.max_model_len)
    if body.messages is not None:
        _, ids = await encode_chat(tokenizer, body.messages, body, body.template_tools(), False, most)
    else:
        check_text(tokenizer, body.prompt or "", most, "prompt")
        ids = await encode(tokenizer, body.prompt or "", body.add_special_tokens)
    texts = {"token_strs": [tokenizer.token_text(id) for id in ids]} if body.return_token_strs else {}
    return JSONResponse({"count": len(ids), "max_model_len": serving.engine.max_model_len, "tokens": ids, **texts})


@_routes.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    serving = _serving(request)
    serving.check_model(body.model)
    tokenizer = serving.engine.tokenizer
    if any(id >= tokenizer.vocab_size for id in body.tokens):
        message = f"tokens must be below the vocabulary size, {tokenizer.vocab_size}"
        raise ApiError(400, message, param="tokens", code="invalid_value")
    return JSONResponse({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})


@_routes.get("/version")
async def version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


@_routes.get("/ping")
@_routes.post("/ping")
@_routes.get("/health")
async def health(request: Request) -> Response:
    serving = _serving(request)
    serving.check_health()
    stats = serving.engine.stats()
    programs = {"ready": stats.programs_ready, "total": stats.programs_total, "measured": stats.programs_measured}
    return JSONResponse({"status": "ok", "programs": programs})


def _check_live(request: Request) -> None:
    """Raises `ApiError` (403) for web pages of other sites, unless they bring an API key: without keys, any page that a
    user opens could read everyone's tokens here. Browsers name the site, other clients do not.

    A page whose name has been made to lead here (DNS rebinding) counts as another site: so the server must be asked
    for by its address, by a name without a dot, or by a name in `allowed_origins`.
    """
    if "tenant" in request.scope:  # a key that is known
        return
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is not None and urlsplit(origin).netloc != host:
        raise ApiError(403, f"the live view is not for pages of {origin:.200}", code="foreign_origin")
    allowed = request.app.state.allowed_hosts
    if not (is_local_name(host) or hostname(host) in allowed):
        message = f"the live view is not for the name {host:.200}: give it as --allowed-origins, or set an API key"
        raise ApiError(403, message, code="foreign_host")


@_live_routes.get("/live")
async def live(request: Request) -> Response:
    serving = _serving(request)
    serving.check_alive()
    _check_live(request)
    return LiveReply(request.app.state.live, _tenant(request), serving.hub.options.keep_alive)


@_routes.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(_serving(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)
