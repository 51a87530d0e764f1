"""The i-th mutated file of a seed."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from jaxspec.bench.fuzz import hostile
from jaxspec.bench.fuzz.mutators import dump, mutate

#: Kind -> files of the corpus that are mutated, and how often the kind is tried. Of a folder one file is.
KINDS: dict[str, tuple[tuple[str, ...], int]] = {
    "model": (
        ("model.gguf", "model.gguf", "model.gguf", "hf/config.json", "hf/model.safetensors", "hf/model.safetensors",
         "hf/tokenizer.json", "hf/tokenizer.json", "hf/tokenizer_config.json", "hf/generation_config.json",
         "sharded/model.safetensors.index.json", "sharded/model-00001-of-00002.safetensors"), 12,
    ),
    "drafter": (("drafter.safetensors",), 2), "probe": (("probe.safetensors",), 1),
    "predictor": (("predictor.safetensors",), 2), "lengths_index": (("lengths.safetensors",), 1),
    "answers": (("answers.safetensors",), 1), "arrivals": (("arrivals.csv", "arrivals.jsonl"), 2),
    "lengths": (("lengths.csv", "lengths.jsonl"), 1), "prompts": (("prompts.jsonl",), 1),
    "profile": (("profile.json",), 1), "process": (("process.json",), 1), "recording": (("recording.json",), 1),
    "config": (("config.yaml",), 2),
}  # fmt: skip
_SIZES = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_TEMPLATES = (
    "{{ 'a' * 10**10 }}", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{",
    "{% x %}",
    "{% include '/etc/passwd' %}", "{% extends '../x' %}", "{% import 'os' as os %}{{ os.system('id') }}",
    "{{ ''.__class__ }}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{{ messages | tojson(indent=100000000) }}",
    "{% set n = namespace(a='aa') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "{{ '%9999999999d' % 1 }}",
    "{{ raise_exception('no') }}", "{{ messages[0].content.format(a=messages) }}", "{{ [[" * 500,
    "{{ cycler.__init__ }}",
    "{{ messages | map('center', 9999999) | list }}", "{{ lipsum.__globals__ }}", "{{ self.__init__ }}", 5, [],
    {"default": 3},
    [{"name": "default", "template": "{{ 1 }}"}, {"name": "x"}], "{# {{ '" + "a" * 300_000 + "' }} #}",
)  # fmt: skip


def make(seed: int, index: int, corpus: Path, into: Path) -> tuple[str, Path, str]:
    """Write the file, with others of its folder, `into` an empty folder. -> (kind, what to load, what was changed)."""
    random = Random(f"{seed}:file:{index}")
    kind = random.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    name = random.choice(KINDS[kind][0])
    folder, _, file = name.rpartition("/")
    if folder:
        shutil.copytree(corpus / folder, into / folder)
    target = into / name
    how, data = _mutated(random, corpus / name)
    target.write_bytes(data)
    if folder and random.random() < 0.03:
        target.unlink()
        target.symlink_to(random.choice(("/etc/passwd", file, "/dev/null", "../nothing", "/proc/self/mem", ".")))
        how = f"a link to {target.readlink()}"
    return kind, into / folder if folder else target, f"{name}: {how}"


def _mutated(random: Random, path: Path) -> tuple[str, bytes]:
    data = path.read_bytes()
    ways: list[Callable[[], bytes]] = [lambda: bytes_of(random, data)]
    if path.suffix == ".safetensors":
        ways += [lambda: _tensors(random, data)] * 4
    elif path.suffix == ".gguf":
        ways += [lambda: _numbers(random, data, 3000)] * 4
    elif path.suffix in (".json", ".jsonl"):
        ways += [lambda: _json(random, path.name, data)] * 4
    elif path.suffix == ".yaml":
        import yaml

        ways += [lambda: _encoded(dump(mutate(random, yaml.safe_load(data)))), lambda: _text(random, data)]
    else:
        ways += [lambda: _cells(random, data)] * 3
    way = random.randrange(len(ways))
    return f"way {way}", ways[way]()


def bytes_of(random: Random, data: bytes) -> bytes:
    """Cut, flipped, doubled or emptied."""
    at = random.randrange(len(data) + 1)
    near = random.randrange(min(len(data), 400) + 1)
    return random.choice((
        lambda: data[:at], lambda: data[:near], lambda: data[near:], lambda: b"", lambda: data + data[at:],
        lambda: data[:near] + bytes([random.randrange(256)]) + data[near + 1 :],
        lambda: data[:at] + bytes([random.randrange(256)]) + data[at + 1 :],
        lambda: data[:near] + random.randbytes(random.choice((1, 4, 50))) + data[near:],
        lambda: data[:near] + b"\x00" * 64 + data[near + 64 :], lambda: data[:near] + b"\xff" * 8 + data[near + 8 :],
    ))()  # fmt: skip


def _numbers(random: Random, data: bytes, within: int) -> bytes:
    """One to three of the header's numbers of 4 or 8 bytes, replaced by sizes that no file has."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        wide = random.random() < 0.5
        # A number that is in use: small, with zeros above.
        places = [i for i in range(4, min(within, len(out) - 8)) if out[i] and not any(out[i + 1 : i + 4])]
        at = random.choice(places or [8])
        size = random.choice(_SIZES)
        out[at : at + (8 if wide else 4)] = struct.pack("<Q" if wide else "<I", size if wide else size % 2**32)
    return bytes(out)


def _tensors(random: Random, data: bytes) -> bytes:
    """A safetensors file with another header: shapes, types, offsets, metadata, or its length."""
    (size,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    way = random.choice(("length", "entry", "entry", "entry", "json", "metadata", "metadata", "swap"))
    if way == "length":
        return struct.pack("<Q", random.choice(_SIZES)) + data[8:]
    names = [name for name in header if name != "__metadata__"]
    entry = header[random.choice(names)]
    if way == "entry":
        field = random.choice(("shape", "data_offsets", "dtype"))
        numbers = [*_SIZES, -1, -8, 1.5, "x", None]
        entry[field] = random.choice((
            [random.choice(numbers) for _ in range(random.choice((0, 1, 2, 3, 40)))], list(reversed(entry["shape"])),
            random.choice(("F64", "I8", "BF16", "F8_E4M3", "BOOL", "U64", "nothing", 5)), [0, len(rest)], [8, 0],
        ))  # fmt: skip
    elif way == "swap":
        first, second = random.choice(names), random.choice(names)
        header[first], header[second] = header[second], header[first]
    elif way == "metadata":
        about = dict(header.get("__metadata__") or {})
        key = random.choice([*about, "format"])
        inner = about.get(key, "")
        with_json = inner[:1] in ("{", "[")
        about[key] = dump(mutate(random, _object(inner))) if with_json else random.choice(hostile.TEXTS)
        header["__metadata__"] = about
        if "digest" in about and key != "digest":
            return _redigested(header, rest)
    text = dump(mutate(random, header) if way == "json" else header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + rest


def _redigested(header: dict[str, Any], rest: bytes) -> bytes:
    """A predictor's file whose digest is right again, so that its content is looked at."""
    from safetensors.numpy import load

    from jaxspec.predict.predictor_file import _digest

    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + rest
    try:
        tensors = load(whole)
    except Exception:
        return whole
    about = {key: value for key, value in header["__metadata__"].items() if key != "digest"}
    header["__metadata__"]["digest"] = _digest(tensors, about)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    return value if isinstance(value, dict) else {"value": value}


def _json(random: Random, name: str, data: bytes) -> bytes:
    if name.endswith(".jsonl"):
        lines = data.splitlines()
        at = random.randrange(len(lines))
        lines[at] = _encoded(dump(mutate(random, json.loads(lines[at]))))
        return b"\n".join(lines) + b"\n"
    value = json.loads(data)
    if name == "tokenizer_config.json" and random.random() < 0.5:
        field = random.choice(
            ("chat_template", "chat_template", "tokenizer_class", "tokenizer_file", "vocab_file", "auto_map")
        )
        paths = ("../../etc/passwd", "/etc/passwd", "..", {"AutoTokenizer": ["x.Y", None]})
        value[field] = random.choice(_TEMPLATES if field == "chat_template" else paths)
        return json.dumps(value).encode()
    if name.endswith("index.json") and random.random() < 0.6:
        place = random.choice(
            ("/etc/passwd", "../hf/model.safetensors", "..", "", ".", "/dev/zero", "\x00", 5, None, [], {})
        )
        value["weight_map"][random.choice(list(value["weight_map"]))] = place
        return json.dumps(value).encode()
    return _encoded(dump(mutate(random, value)))


def _text(random: Random, data: bytes) -> bytes:
    """YAML that means more than it says."""
    return data + random.choice((
        b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n", b"x: !!python/object/apply:os.system ['id']\n",
        b"? [a]\n: b\n", b"\tx",
        b"order: " + b"[" * 3000, b"port: 0x7fffffffffffffffff\n", b"date: 9999-99-99\n", b"max_num_seqs: .inf\n",
        b"1: 2\n",
        b"max_num_seqs: 1e400\n", b"slo: 5\n", b"slo: {tpot_ms: .nan}\n", b"token_buckets: [0]\n", b"draft: {a: b}\n",
        b"--- a\n",
    ))  # fmt: skip


def _cells(random: Random, data: bytes) -> bytes:
    """A table with another cell, header or separator."""
    rows = [line.split(b",") for line in data.splitlines()]
    row = random.choice(rows)
    cells = (
        b"nan",
        b"inf",
        b"-1",
        b"1e400",
        b"",
        b"x",
        b'"',
        b"9" * 400,
        b"0x10",
        b"\x00",
        b"\xff",
        b"1e30",
        b"-0",
        b"a" * 200_000,
    )
    row[random.randrange(len(row))] = random.choice(cells)
    if random.random() < 0.2:
        row.append(b"7")
    return b"\n".join(random.choice((b",", b",", b",", b";")).join(row) for row in rows) + b"\n"


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
