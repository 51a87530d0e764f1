"""The optional dependencies: packages of each extra, and how to install them."""

from __future__ import annotations

#: Extra in pyproject.toml -> its packages; a test keeps the two equal.
PACKAGES = {
    "bench": ("matplotlib",),
    "otel": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    "ray": ("ray[serve]",),
    "retrieval": ("faiss-cpu",),
    "sentencepiece": ("sentencepiece", "protobuf"),
    "train": ("optax", "orbax-checkpoint"),
    "zig": ("ziglang",),
}


def install_hint(extra: str) -> str:
    """How to install an extra, for the end of an error message.

    Never by a bare `jaxspec` and its extras in brackets: on PyPI, that is another project.
    """
    packages = " ".join(PACKAGES[extra])
    return f'run .venv/bin/pip install -e ".[{extra}]" in the jaxspec checkout (elsewhere: pip install {packages})'


def lacking(error: ModuleNotFoundError) -> str | None:
    """The message about a package that is missing because its extra is not installed; None if it is in no extra."""
    module = (error.name or "").partition(".")[0]
    extra = {
        "faiss": "retrieval", "matplotlib": "bench", "opentelemetry": "otel", "optax": "train", "orbax": "train",
        "ray": "ray",
    }.get(module)  # fmt: skip
    return None if extra is None else f"{module} is missing, which this command needs: {install_hint(extra)}"
