"""Fields of other servers that are refused by name, because an answer without them would not be what was asked for.

Everything else that is unknown passes: it changes nothing about the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.serve.errors import ApiError

_SAMPLER = "this sampler is not supported"
_MEDIA = "only text is supported"

#: Field -> (values that ask for nothing, besides null; what to say otherwise).
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((False,), "beam search is not supported"),
    "length_penalty": ((1,), "beam search is not supported"),
    "prompt_embeds": ((), "prompts are texts or token ids"),
    "input_embeds": ((), "prompts are texts or token ids"),
    "chat_template": ((), "the server's template is used; chat_template_kwargs sets its variables"),
    "best_of": ((1,), "use n"),
    "suffix": (("",), "there is no filling in the middle"),
    "echo": ((False,), "use /v1/completions"),
    "format": ((), "use response_format, or text.format of /v1/responses"),
    # Names of other servers.
    "n_predict": ((-1,), "use max_tokens"),
    "max_new_tokens": ((), "use max_tokens"),
    "min_new_tokens": ((0,), "use min_tokens"),
    "repeat_penalty": ((1,), "use repetition_penalty"),
    "stop_regex": (([],), "use stop"),
    "samplers": ((), _SAMPLER),
    "choice": ((), "use structured_outputs"),
    "json": ((), "use structured_outputs"),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "tools": (([],), "use /v1/chat/completions"),
    "tool_choice": (("none", "auto"), "use /v1/chat/completions"),
    "thinking_token_budget": ((), "use /v1/chat/completions"),
    "logits_processors": (([],), "code of clients does not run in the server"),
    "custom_logit_processor": ((), "code of clients does not run in the server"),
    "vllm_xargs": (({},), "they are not supported"),
    "kv_transfer_params": (({},), "KV is not transferred between servers"),
    "ec_transfer_params": (({},), "KV is not transferred between servers"),
    "cache_salt": ((), "the prefix cache is shared; start the server with --set enable_prefix_caching=false"),
    "lora_path": ((), "adapters are not supported"),
    "lora_request": ((), "adapters are not supported"),
    "guided_whitespace_pattern": ((), "whitespace in JSON is limited to 32 characters in a row"),
    "logprob_token_ids": (([],), "use logprobs"),
    "repetition_detection": ((), "it is not supported"),
    "watermark": ((False,), "it is not supported"),
    "web_search_options": ((), "there is no web search"),
    "audio": ((), _MEDIA),
    "modalities": ((["text"],), _MEDIA),
    "mm_processor_kwargs": (({},), _MEDIA),
    "media_io_kwargs": (({},), _MEDIA),
    "typical_p": ((1,), _SAMPLER),
    "top_a": ((0,), _SAMPLER),
    "tfs_z": ((1,), _SAMPLER),
    "mirostat": ((0,), _SAMPLER),
    "dry_multiplier": ((0,), _SAMPLER),
    "xtc_probability": ((0,), _SAMPLER),
    "dynatemp_range": ((0,), _SAMPLER),
    "top_n_sigma": ((0, -1), _SAMPLER),
}  # fmt: skip


def refuse_unsupported(given: Mapping[str, Any]) -> None:
    """Raises `ApiError` (400) naming a field of `given` that would have to be honoured and is not supported."""
    for name, value in given.items():
        misspelt = name.startswith("guided_") and name != "guided_decoding_backend"
        unknown = ((), "it is not known") if misspelt else ((value,), "")
        neutral, why = _REFUSED.get(name, unknown)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name} is not supported: {why}", param=name, code="unsupported_parameter")
