"""The i-th request of a seed: route, headers, body, and how it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from jaxspec.bench.fuzz.mutators import dump, mangle, mutate
from jaxspec.bench.fuzz.samples import ROUTES, sample

Headers = tuple[tuple[bytes, bytes], ...]
_JSON: Headers = ((b"content-type", b"application/json"),)


@dataclass(frozen=True)
class Body:
    """A POST request. chunks: the body in the pieces in which it arrives. leaves: whether the client disconnects after
    the body. declared: the Content-Length if it is not the body's. pause: seconds between the pieces, over a socket.
    """

    index: int
    route: str
    headers: Headers
    chunks: tuple[bytes, ...]
    leaves: bool = False
    declared: int | None = None
    pause: float = 0.0

    @property
    def data(self) -> bytes:
        return b"".join(self.chunks)


def body(seed: int, index: int) -> Body:
    """The request; it depends on nothing else."""
    random = Random(f"{seed}:{index}")
    route, content = sample(random)
    way = random.choices(("valid", "json", "bytes", "headers"), (2, 13, 3, 2))[0]
    if way == "json":
        content = mutate(random, content)
    if random.random() < 0.03:
        route = random.choice(list(ROUTES))
    data = dump(content).encode("utf-8", "surrogatepass")
    if way == "bytes":
        data = mangle(random, data)
    headers, declared = _JSON, None
    if way == "headers":
        headers, declared = _headers(random, len(data))
    pause = random.choice((0.0, 0.02, 0.3)) if random.random() < 0.05 else 0.0
    return Body(
        index, route, headers, _pieces(random, data, bool(pause)), leaves=random.random() < 0.02, declared=declared,
        pause=pause,
    )  # fmt: skip


def _pieces(random: Random, data: bytes, slow: bool) -> tuple[bytes, ...]:
    if not slow and random.random() < 0.9:
        return (data,)
    size = max(1, len(data) // random.choice((2, 5, 20)))
    return tuple(data[i : i + size] for i in range(0, len(data), size)) or (b"",)


def _headers(random: Random, length: int) -> tuple[Headers, int | None]:
    """Other headers than a JSON client's, and another Content-Length or None."""
    kinds = (
        b"text/plain", b"application/json; charset=utf-16", b"application/x-www-form-urlencoded",
        b"multipart/form-data",
        b"", b"application/json, text/html", b"\xff\xfe", b"application/vnd.api+json", b"application/octet-stream",
    )  # fmt: skip
    odd = (
        (b"content-encoding", b"gzip"), (b"authorization", b"Bearer \xc3\xa9"), (b"x-request-id", b"\x85" * 200),
        (b"accept", b"text/csv"), (b"origin", b"null"), (b"host", b"evil.example:80"), (b"cookie", b"a=" + b"b" * 3000),
        (b"expect", b"100-continue"), (b"accept-encoding", b"br;q=nan"), (b"content-length", b"-1"),
        (b"content-length", b"\xb2"), (b"content-length", b"1e3"), (b"content-length", b"9" * 5000),
    )  # fmt: skip
    kind = random.choice(kinds) if random.random() < 0.5 else b"application/json"
    declared = random.choice((None, None, 0, length - 1, length + 1, length + 10_000, 2**40))
    return ((b"content-type", kind), random.choice(odd)), declared
