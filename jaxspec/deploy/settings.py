"""Settings of a deployment: the arguments of `jaxspec.deploy.app:build` in a Ray Serve config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from jaxspec.config import ConfigError, EngineConfig, http_url, load_settings, merged
from jaxspec.extras import lacking
from jaxspec.sched.routing import HealthSettings

#: The folder of `jaxspec/`, which has `configs/` in a checkout.
_CHECKOUT = Path(__file__).parents[2]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RoutingSettings(_Settings):
    """How an ingress routes requests, and what it does when replicas fail. Times in seconds."""

    #: The policy, one of `sched/routing/`, and the settings of its own that differ from its defaults.
    policy: str = "predicted"
    options: dict[str, Any] = Field(default_factory=dict)
    #: When a replica counts as slow, and for how long it is then left out: see `HealthSettings`.
    health: HealthSettings = Field(default_factory=HealthSettings)
    #: Between two reports of a replica.
    report_every_s: PositiveFloat = 0.25
    #: A replica that has been silent for this long loses its requests to others.
    give_up_after_s: PositiveFloat = 15.0
    #: How long a request waits for a replica while there is none.
    patience_s: NonNegativeFloat = 120.0
    #: Replicas that may be lost with a request, without a new token in between, before it fails.
    max_attempts: PositiveInt = 4
    #: How long a request waits for its length to be predicted; 0: no predictor runs in the ingress.
    predict_within_s: NonNegativeFloat = 0.05


class HttpSettings(_Settings):
    """The HTTP side of an ingress: options of `python -m jaxspec.serve`. API keys come from `JAXSPEC_API_KEY`."""

    max_body_mb: PositiveFloat = 8.0
    allowed_origins: list[str] = Field(default_factory=lambda: ["*"])
    root_path: str = ""
    sse_keep_alive: NonNegativeFloat = 15.0
    enable_log_requests: bool = False
    otlp_traces_endpoint: Annotated[str, AfterValidator(http_url)] | None = None


class DeploySettings(_Settings):
    """config: preset of the engine, a YAML file. engine: its settings that differ. replica, ingress: options of the two
    deployments, named as in Ray Serve. drain_s: seconds that one of them gives its requests when it is to stop."""

    config: str | None = None
    engine: dict[str, Any] = Field(default_factory=dict)
    replica: dict[str, Any] = Field(default_factory=dict)
    ingress: dict[str, Any] = Field(default_factory=dict)
    routing: RoutingSettings = Field(default_factory=RoutingSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    drain_s: NonNegativeFloat = 600.0

    @classmethod
    def load(cls, arguments: dict[str, Any]) -> DeploySettings:
        """Check the arguments of the app builder. Raises `ConfigError` naming every bad key or value."""
        return load_settings(cls, None, merged({}, arguments))

    def engine_config(self) -> EngineConfig:
        """Settings of the engine. Raises `ConfigError`."""
        path = None if self.config is None else Path(self.config)
        if path is not None and not path.exists() and (_CHECKOUT / path).exists():
            path = _CHECKOUT / path  # Ray starts processes in a folder of its own
        return EngineConfig.load(path, **self.engine)

    def check_extras(self) -> None:
        """Raises `ConfigError` if the HTTP side lacks a package, before a model is loaded."""
        if self.http.otlp_traces_endpoint is not None:
            try:
                import jaxspec.serve.tracing  # noqa: F401
            except ModuleNotFoundError as error:
                raise ConfigError(f"http.otlp_traces_endpoint: {lacking(error) or error}") from None
