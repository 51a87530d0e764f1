"""Fetching a model folder from the Hugging Face hub: its data files only, never code or pickles."""

from __future__ import annotations

from pathlib import Path

from jaxspec.models.load.errors import ModelLoadError

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
    "model.safetensors.index.json",
    "model*.safetensors",
)


def download(repo: str) -> Path:
    """The local copy of `owner/name`, fetched if needed. Raises `ModelLoadError` when it can't be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=list(_FILES)))
    except GatedRepoError as e:
        hint = "its owner must grant access: ask on its page, then run `hf auth login`"
        raise ModelLoadError(f"hub model {repo!r}: {hint}") from e
    except RepositoryNotFoundError as e:
        hint = "there is no such model, or it is private and needs `hf auth login`"
        raise ModelLoadError(f"hub model {repo!r}: {hint} (a local folder must exist and be given by its path)") from e
    except LocalEntryNotFoundError as e:
        reason = "the hub can't be reached and there is no local copy"
        raise ModelLoadError(f"hub model {repo!r}: {reason}; run `hf download {repo}` where there is a network") from e
    except Exception as e:  # the HTTP client's own errors differ from version to version
        raise ModelLoadError(f"hub model {repo!r}: the download failed ({type(e).__name__}: {e})") from e
