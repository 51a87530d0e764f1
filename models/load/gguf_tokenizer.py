"""Builds a tokenizer from a GGUF header: vocabularies gpt2 (byte-level BPE) and llama (SentencePiece)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxspec.errors import ModelLoadError
from jaxspec.models.load.tokenizer import Tokenizer, end_token_ids

_KEY = "tokenizer.ggml."

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: Llama 3's pattern. Qwen 2's differs only in the number of digits per match.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_DIGITS, _QWEN2 = _LLAMA3.replace("DIGITS", "1,3"), _LLAMA3.replace("DIGITS", "1")
#: `tokenizer.ggml.pre` -> patterns that split the text, one after another, before merging.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jina-v2-code", "roberta-bpe"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (_LLAMA3_DIGITS,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    # llama.cpp's default.
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
#: Pre-tokenizers for which a word in the vocabulary becomes one token, whatever the merges.
_IGNORE_MERGES = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"))
#: Pre-tokenizers that add the start token unless the file says otherwise.
_BOS_BY_DEFAULT = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"))


def gguf_tokenizer(fields: Mapping[str, Any], where: str) -> Tokenizer:
    """Build a tokenizer from GGUF metadata; `where` names the file in errors.

    Raises `ModelLoadError` if the vocabulary kind or pre-tokenizer is unknown, or the metadata is inconsistent.
    """
    try:
        return _build(fields, where)
    except ModelLoadError:
        raise
    except Exception as e:  # the Rust library raises a bare Exception; inconsistent headers raise various types
        raise ModelLoadError(f"{where}: the vocabulary is not consistent ({e})") from e


def _build(fields: Mapping[str, Any], where: str) -> Tokenizer:
    def get(key: str, default: Any = None) -> Any:
        return fields.get(_KEY + key, default)

    kind, tokens = get("model"), get("tokens")
    if not tokens:
        raise ModelLoadError(f"{where}: the file has no vocabulary ({_KEY}tokens)")
    types: Sequence[int] = get("token_type") or [TokenType.NORMAL] * len(tokens)
    pre = get("pre") or "default"
    if kind == "gpt2":
        backend = _byte_level_bpe(tokens, get("merges") or [], pre, where)
    elif kind == "llama":
        scores = get("scores") or [0.0] * len(tokens)
        backend = _sentencepiece(tokens, scores, types, get("unknown_token_id", 0), get("add_space_prefix", True))
    else:
        raise ModelLoadError(f"{where}: vocabulary kind {kind!r} is not supported; gpt2 (BPE) and llama (SPM) are")

    # One call, in id order. Tokens that are in the vocabulary keep their ids.
    backend.add_tokens(
        [
            AddedToken(text, special=kind_of != TokenType.USER_DEFINED, normalized=False)
            for text, kind_of in zip(tokens, types, strict=True)
            if kind_of in (TokenType.CONTROL, TokenType.USER_DEFINED)
        ]
    )
    bos, eos = get("bos_token_id"), get("eos_token_id")
    add_bos = get("add_bos_token", kind == "llama" or pre in _BOS_BY_DEFAULT)
    add_eos = get("add_eos_token", False)
    _add_bos_eos(backend, tokens, bos if add_bos else None, eos if add_eos else None)
    named = {"bos": bos, "eos": eos, "unk": get("unknown_token_id"), "pad": get("padding_token_id")}
    return Tokenizer(
        backend=backend,
        eos_token_ids=end_token_ids(backend, (eos, get("eot_token_id"), get("eom_token_id"))),
        bos_token_id=bos,
        chat_template=fields.get("tokenizer.chat_template"),
        tool_template=fields.get("tokenizer.chat_template.tool_use"),
        template_tokens={f"{name}_token": tokens[i] for name, i in named.items() if i is not None and i < len(tokens)},
    )


def _byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], pre: str, where: str) -> Backend:
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelLoadError(f"{where}: pre-tokenizer {pre!r} ({_KEY}pre) is not known; known are {known}")
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
    backend = Backend(models.BPE(vocab=_ids(tokens), merges=pairs, ignore_merges=pre in _IGNORE_MERGES))
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE_TOKENIZERS[pre]
    ]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], unknown: int, space_prefix: bool
) -> Backend:
    """SentencePiece BPE. It merges the pair with the best-scored union first, so the merges are all pairs by score."""
    ids = _ids(tokens)
    pieces = {t: scores[i] for t, i in ids.items() if types[i] == TokenType.NORMAL}
    ranked = [
        (-score, ids[piece], -cut, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    has_bytes = "<0x00>" in ids
    backend = Backend(
        models.BPE(vocab=ids, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=has_bytes)
    )
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if space_prefix else spaces
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    """Text -> id; the first id for duplicate texts."""
    return {text: i for i, text in reversed(list(enumerate(tokens)))}


def _add_bos_eos(backend: Backend, tokens: Sequence[str], bos: int | None, eos: int | None) -> None:
    ends = [(tokens[i], i) for i in (bos, eos) if i is not None]
    if ends:
        start = [] if bos is None else [tokens[bos]]
        end = [] if eos is None else [tokens[eos]]
        single = [*start, "$A", *end]
        pair = [*start, "$A", *end, *(f"{t}:1" for t in start), "$B:1", *(f"{t}:1" for t in end)]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
