"""Fetches models from the Hugging Face hub: folders of safetensors, or one .gguf file, chosen by quantisation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from jaxspec.errors import ModelLoadError

#: What a model folder needs: see `hf.load_folder`.
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "model.safetensors.index.json",
    "model*.safetensors",
)
#: llama.cpp's default for repositories of .gguf files.
DEFAULT_TAG = "Q4_K_M"
_TAG = re.compile(r"(UD-)?(I?Q|TQ|BF|F|FP|MXFP)\d\w*\Z", re.IGNORECASE)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\Z")
#: .gguf files next to a model that are not one: a vision projector, an importance matrix.
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)


def fetch_model(repo: str, tag: str | None = None, revision: str | None = None) -> Path:
    """Path of the local copy of `owner/name`, downloaded if needed: a model folder or a .gguf file.

    `tag` is the quantisation of a .gguf file, as in `owner/name:Q4_K_M`. Without it, a repository that has no
    safetensors but .gguf files gives its Q4_K_M. `revision`: a branch, tag or commit. Without a network the copy in the
    hub's cache is used. Raises `ModelLoadError`.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    with _explained(repo, revision):
        files = _list_files(repo, revision)
        ggufs = [name for name in files if name.endswith(".gguf") and not _NO_MODEL.search(name)]
        if tag is None and (not ggufs or any(name.endswith(".safetensors") for name in files)):
            return Path(snapshot_download(repo, revision=revision, allow_patterns=list(_FILES)))
        return Path(hf_hub_download(repo, _choose(repo, ggufs, tag or DEFAULT_TAG), revision=revision))


def _list_files(repo: str, revision: str | None) -> list[str]:
    """Paths in the repository; if the hub does not tell them, in the local copy, which may be a part."""
    from huggingface_hub import model_info, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        # Not `list_repo_files`, which retries for half a minute where there is no network.
        return [file.rfilename for file in model_info(repo, revision=revision).siblings or ()]
    except Exception as error:  # the HTTP client's errors differ between versions
        try:  # without patterns: it would refuse a copy that lacks one of their files
            copy = Path(snapshot_download(repo, revision=revision, allow_patterns=[], local_files_only=True))
        except LocalEntryNotFoundError as absent:
            raise (error if isinstance(error, HfHubHTTPError) else absent) from None
        return [path.relative_to(copy).as_posix() for path in copy.rglob("*")]


def _choose(repo: str, ggufs: Sequence[str], tag: str) -> str:
    """The .gguf file that is quantised as `tag` says, in any case of letters. Raises `ModelLoadError`."""
    if not ggufs:
        raise ModelLoadError(f"hub model {repo!r} has no .gguf files, so {repo}:{tag} names none")
    of_tag = re.compile(rf"(^|[-.]){re.escape(tag)}\Z", re.IGNORECASE)
    found = [name for name in ggufs if of_tag.search(_SHARD.sub("", PurePosixPath(name).stem))]
    if not found:
        tags = ", ".join(sorted({_tag_of(name) for name in ggufs}))
        raise ModelLoadError(f"hub model {repo!r} has no .gguf file for {tag}; write {repo}:TAG with one of {tags}")
    if any(_SHARD.search(PurePosixPath(name).stem) for name in found):
        raise ModelLoadError(
            f"hub model {repo!r}: {tag} is split into several files ({found[0]}, …), which is not supported; join them "
            "with llama.cpp's llama-gguf-split and pass the file"
        )
    if len(found) > 1:
        raise ModelLoadError(f"hub model {repo!r}: several files are {tag} ({', '.join(found)}); download one of them")
    return found[0]


def _tag_of(name: str) -> str:
    """The quantisation in a file's name; the name if there is none."""
    stem = _SHARD.sub("", PurePosixPath(name).stem)
    for cut in re.finditer(r"^|[-.]", stem):
        if _TAG.match(stem, cut.end()):
            return stem[cut.end() :].upper()
    return name


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turn the hub's errors into `ModelLoadError` with what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except ModelLoadError:
        raise
    except GatedRepoError as e:
        hint = "its owner must grant access: ask on its page, then run `hf auth login`"
        raise ModelLoadError(f"hub model {repo!r}: {hint}") from e
    except RepositoryNotFoundError as e:
        hint = "there is no such model, or it is private and needs `hf auth login`"
        raise ModelLoadError(f"hub model {repo!r}: {hint} (for a local folder, pass its path)") from e
    except RevisionNotFoundError as e:
        raise ModelLoadError(f"hub model {repo!r} has no revision {revision!r}: no such branch, tag or commit") from e
    except LocalEntryNotFoundError as e:
        reason = "the hub can't be reached and there is no complete local copy"
        of_revision = "" if revision is None else f" --revision {revision}"
        command = f"hf download {repo}{of_revision}"
        raise ModelLoadError(f"hub model {repo!r}: {reason}; run `{command}` where there is a network") from e
    except Exception as e:  # the HTTP client's errors differ between versions
        raise ModelLoadError(f"hub model {repo!r}: the download failed ({type(e).__name__}: {e})") from e
