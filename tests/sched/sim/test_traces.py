"""Traces as they are published: Azure's, BurstGPT's and the project's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.arrivals import Arrival

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799609,110,27
"""
#: Clocks that go back in the night must not matter.
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-10-27 00:59:59.500000+00:00,2162,5
2024-10-27 01:00:00+00:00,2399,6
2024-10-27 03:00:00.25+02:00,30,7
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""


def read(folder: Path, text: str, count: int | None = None, rate: float | None = None) -> list[Arrival]:
    (folder / "trace.csv").write_text(text, encoding="utf-8")
    return arrivals.trace(folder / "trace.csv", count, rate)


@pytest.mark.parametrize(
    ("text", "times", "lengths"),
    [
        (AZURE_2023, [0, 0.052, 60], [(4808, 10), (3180, 8), (110, 27)]),
        (AZURE_2024, [0, 0.5, 0.75], [(2162, 5), (2399, 6), (30, 7)]),
        (BURSTGPT, [0, 113.5], [(472, 18), (417, 276)]),  # a request without an answer failed
        ("\ufeffarrival_s,more\n3,x\n4.5,y\n", [0, 1.5], [(None, None)] * 2),  # as spreadsheets save it
    ],
)
def test_formats(tmp_path: Path, text: str, times: list[float], lengths: list[tuple[int, int]]) -> None:
    found = read(tmp_path, text)
    assert [a.time for a in found] == pytest.approx(times, abs=2e-6)
    assert [(a.input_tokens, a.output_tokens) for a in found] == lengths


def test_the_count_is_of_requests_that_are_kept(tmp_path: Path) -> None:
    assert [a.output_tokens for a in read(tmp_path, BURSTGPT, 2, rate=0.5)] == [18, 276]
    assert [a.time for a in read(tmp_path, BURSTGPT, 2, rate=0.5)] == [0, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,5\n",
            "columns TIMESTAMP, ContextTokens; accepted are arrival_s",
        ),
        ("when,tokens\n1,2\n", r"when, tokens; .*ContextTokens, GeneratedTokens \(Azure\).*BurstGPT.*Mooncake"),
        ("", "columns of an empty file"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", "line 2: Invalid isoformat"),
        ("Timestamp,Request tokens,Response tokens\n1,5,5\n2,many,5\n", "line 3: could not convert"),
        ("arrival_s,input_tokens\n1,inf\n", "line 2: input_tokens must be a number"),
    ],
)
def test_errors_name_the_line_or_the_accepted_columns(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(tmp_path, text)
