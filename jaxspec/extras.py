"""The optional dependencies: which packages an extra brings, and the command that installs them."""

from __future__ import annotations

#: Extra of pyproject.toml -> its packages (a test compares the two).
PACKAGES = {
    "bench": ("matplotlib",),
    "retrieval": ("faiss-cpu",),
    "sentencepiece": ("sentencepiece", "protobuf"),
    "train": ("optax", "orbax-checkpoint"),
    "zig": ("ziglang",),
}


def install_hint(extra: str) -> str:
    """How to install an extra, as the end of an error message.

    It never installs by the name `jaxspec`: on PyPI that is another project.
    """
    packages = " ".join(PACKAGES[extra])
    return f'run .venv/bin/pip install -e ".[{extra}]" in the jaxspec checkout (elsewhere: pip install {packages})'
