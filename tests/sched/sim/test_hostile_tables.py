"""Traces, lengths, prompts and fitted models of strangers: refused by an error that names the file and the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench import prompts
from jaxspec.sched.sim import acceptance, arrivals, cost, workload
from jaxspec.sched.sim.recording import Recording

DEEP = "[" * 100_000
BAD: list[tuple[Any, str, bytes]] = [
    *((arrivals.trace, "a.csv", b"arrival_s,input_tokens\n0,1\n" + row) for row in (
        b"nan,1\n", b"inf,1\n", b"-1,1\n", b"1e400,1\n", b"x,1\n", b"1,inf\n", b"1,-2\n", b",1\n", b"\xff,1\n",
        b"9" * 200_000,
    )),
    *((arrivals.trace, "a.jsonl", row.encode()) for row in (
        DEEP, '{"timestamp": 1, "input_length": 1e999, "output_length": 1, "hash_ids": []}', '{"timestamp": []}', "5",
        "\ud800",
    ) if row.isascii()),
    (arrivals.trace, "a.jsonl", b"\xff"),
    *((workload.read_lengths, "l.csv", b"output_tokens\n" + row) for row in (b"nan\n", b"1e20\n", b"\xff\n",
    b"9" * 200_000)),
    (workload.read_lengths, "l.jsonl", b"\xff"), (prompts.load, "p.jsonl", DEEP.encode()), (prompts.load, "p.jsonl",
    b"\xff"),
    (cost.load_profile, "p.json", DEEP.encode()), (cost.load_profile, "p.json", b'{"buckets": [1e999], "step": [1]}'),
    (lambda path: acceptance.load_process(str(path)), "p.json", DEEP.encode()),
    (lambda path: acceptance.load_process(str(path)), "p.json", b'{"mean": "' + b"y" * 9000 + b'"}'),
    (Recording.read, "r.json", DEEP.encode()), (Recording.read, "r.json",
    b'{"steps": [{"scheduled": [[1e999, 0, 0]]}]}'),
]  # fmt: skip


@pytest.mark.parametrize(("read", "name", "content"), BAD, ids=[f"{name}-{i}" for i, (_, name, _) in enumerate(BAD)])
def test_refused(tmp_path: Path, read: Any, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as error:
        read(path)
    assert len(str(error.value)) < 1000
