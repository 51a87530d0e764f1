"""How many connections the process may open."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
from jaxspec.serve.connections import room_for
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(room_for(2000), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "says"),
    [(1024, 4096, "2000 2512 4096"), (256, 1024, "512 1024 1024"), (4000, 4096, "2000 4000 4096")],
)
def test_the_limit_of_open_files_is_raised_if_it_can_be(soft: int, hard: int, says: str) -> None:
    script = SCRIPT.format(soft=soft, hard=hard)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == says
