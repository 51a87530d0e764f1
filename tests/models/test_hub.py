"""Models of the hub: which file, revision and copy are taken, and what is said when there is none. No network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects

from helpers.checkpoints import config, gguf_tensors, hf_tensors, write_gguf, write_hf
from jaxspec.errors import ModelLoadError
from jaxspec.models.load import load_model
from jaxspec.models.load.hub import fetch_model

REPO = "owner/tiny"


class FakeHub:
    """One repository, in a folder. `online` can be switched off: then `cached` files are all there are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.revisions: tuple[str | None, ...] = (None, "v1")
        self.online = self.exists = True
        self.cached: set[str] = set()

    def names(self) -> list[str]:
        return [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()]

    def check(self, revision: str | None, local: bool = False) -> None:
        if not (self.online or local):
            raise ConnectionError("no route")
        response: Any = SimpleNamespace(headers={}, request=None)
        if not (self.exists or local):
            raise RepositoryNotFoundError("401", response=response)
        if revision not in self.revisions:
            raise RevisionNotFoundError("404", response=response)

    def model_info(self, repo: str, *, revision: str | None) -> SimpleNamespace:
        assert repo == REPO
        self.check(revision)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.names()])

    def hf_hub_download(self, repo: str, name: str, *, revision: str | None) -> str:
        self.check(revision, local=name in self.cached)
        return str(self.folder / name)

    def snapshot_download(
        self, repo: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool = False
    ) -> str:
        wanted = set(filter_repo_objects(self.names(), allow_patterns=allow_patterns))
        if self.online and not local_files_only:
            self.check(revision)
            self.cached |= wanted
        elif revision not in self.revisions or not self.cached or wanted - self.cached:
            raise LocalEntryNotFoundError("absent")
        copy = self.folder.with_name("copy")
        for name in self.cached:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((self.folder / name).read_bytes())
        return str(copy)


Write = Callable[..., FakeHub]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Fills the repository with empty files of these names."""

    def fill(*names: str) -> FakeHub:
        fake = FakeHub(tmp_path / "repo")
        for name in names:
            (fake.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (fake.folder / name).touch()
        for name in ("model_info", "hf_hub_download", "snapshot_download"):
            monkeypatch.setattr(huggingface_hub, name, getattr(fake, name))
        return fake

    return fill


GGUFS = ("tiny-Q4_K_M.gguf", "tiny.q8_0.gguf", "tiny-UD-IQ2_XXS.gguf", "sub/tiny-BF16.gguf", "mmproj-F16.gguf")


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        (None, GGUFS[0]),
        ("Q4_K_M", GGUFS[0]),
        ("q4_k_m", GGUFS[0]),
        ("Q8_0", GGUFS[1]),
        ("IQ2_XXS", GGUFS[2]),
        ("UD-IQ2_XXS", GGUFS[2]),
        ("BF16", GGUFS[3]),
    ],
)
def test_a_file_is_chosen_by_its_quantisation(write: Write, tag: str | None, name: str) -> None:
    fake = write(*GGUFS, "README.md", "config.json")
    assert fetch_model(REPO, tag) == fake.folder / name


@pytest.mark.parametrize(
    ("names", "tag", "message"),
    [
        (GGUFS, "Q5_0", r"no .gguf file for Q5_0; write owner/tiny:TAG with one of BF16, Q4_K_M, Q8_0, UD-IQ2_XXS\Z"),
        (GGUFS, "M", "no .gguf file for M;"),
        (GGUFS, "F16", "no .gguf file for F16;"),  # BF16 is another one, and the projector is no model
        (["tiny-Q8_0.gguf"], None, "no .gguf file for Q4_K_M; write owner/tiny:TAG with one of Q8_0"),
        (["tiny.gguf"], "Q8_0", "one of tiny.gguf"),
        (["tiny-Q8_0-00001-of-00002.gguf", "tiny-Q8_0-00002-of-00002.gguf"], "Q8_0", "split into several files"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "several files are Q8_0"),
        (["model.safetensors"], "Q8_0", "has no .gguf files"),
    ],
)
def test_what_cannot_be_chosen(write: Write, names: list[str], tag: str | None, message: str) -> None:
    write(*names)
    with pytest.raises(ModelLoadError, match=f"hub model 'owner/tiny'.*{message}"):
        fetch_model(REPO, tag)


def test_safetensors_come_first(write: Write) -> None:
    """Only what loading needs is downloaded, templates in their folder and vocabularies without tokenizer.json too."""
    needed = {
        "config.json", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json",
        "additional_chat_templates/tool_use.jinja", "model-00001-of-00001.safetensors",
    }  # fmt: skip
    fake = write(*needed, *GGUFS, "pytorch_model.bin", "original/model.safetensors")
    assert fetch_model(REPO) == fake.folder.with_name("copy")
    assert fake.cached == needed


def test_revisions(write: Write) -> None:
    fake = write(*GGUFS)
    assert fetch_model(REPO, "Q8_0", "v1") == fake.folder / GGUFS[1]
    with pytest.raises(ModelLoadError, match="has no revision 'v2': no such branch, tag or commit"):
        fetch_model(REPO, "Q8_0", "v2")
    with pytest.raises(
        ModelLoadError, match=r"revision 'v1' needs a hub id \(owner/name\), which 'smollm2-135m' is not"
    ):
        load_model("smollm2-135m", "v1")


def test_without_a_network_the_copy_counts(write: Write) -> None:
    fake = write(*GGUFS)
    fake.online = False
    with pytest.raises(ModelLoadError, match=r"no complete local copy; run `hf download owner/tiny --revision v1`"):
        fetch_model(REPO, "Q8_0", "v1")
    fake.cached = {GGUFS[1]}
    assert fetch_model(REPO, "Q8_0") == fake.folder / GGUFS[1]
    fake.online, fake.exists = True, False  # it has been deleted, or access to it ended
    assert fetch_model(REPO, "Q8_0") == fake.folder / GGUFS[1]
    with pytest.raises(ModelLoadError, match=r"no .gguf file for Q4_K_M; .* one of Q8_0\Z"):
        fetch_model(REPO)


def test_what_is_not_there(write: Write) -> None:
    fake = write(*GGUFS)
    fake.exists = False
    with pytest.raises(ModelLoadError, match="there is no such model, or it is private and needs `hf auth login`"):
        fetch_model(REPO, "Q8_0")


def test_models_load(write: Write) -> None:
    """By the id as the name, which also has the quantisation."""
    c, fake = config(), write("README.md")
    write_gguf(fake.folder / "tiny-F32.gguf", c, gguf_tensors(c))
    model = load_model(f"{REPO}:f32")
    assert (model.name, model.config.vocab_size, model.tokenizer.vocab_size) == (f"{REPO}:f32", 320, 320)
    write_hf(fake.folder, c, [hf_tensors(c)])
    assert load_model(REPO, "v1").name == REPO


def test_drafters_come_from_the_hub_too(write: Write) -> None:
    from helpers import tiny
    from jaxspec.config import ConfigError
    from jaxspec.draft.registry import load

    fake = write("README.md")
    write_gguf(fake.folder / "tiny-Q4_0.gguf", config(), gguf_tensors(config()))
    drafter, weights = load(f"{REPO}:Q4_0", tiny.model())
    assert drafter.vocab_size == tiny.model().config.vocab_size < config().vocab_size  # another tokenizer
    assert len(weights["vocab"]) == 257
    with pytest.raises(ConfigError, match=r"no .gguf file for Q8_0; write owner/tiny:TAG with one of Q4_0"):
        load(f"{REPO}:Q8_0", tiny.model())
