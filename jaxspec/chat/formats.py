"""How models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolFormat:
    """A call is the JSON object `{"name": …, "arguments": …}`; `key` is the key of its arguments.

    begin, end: tags before and after a call. listed: between them is a JSON array of calls. bare: an answer may also
    begin with a call without tags. name_first: a call is `begin`, the name, `separator`, then the arguments.
    """

    name: str
    begin: str
    end: str = ""
    key: str = "arguments"
    listed: bool = False
    bare: bool = False
    name_first: bool = False
    separator: str = ""
    #: Characters of the ids of calls; None: OpenAI's form.
    id_length: int | None = None

    @property
    def tags(self) -> list[str]:
        """Texts that may be special tokens of the model."""
        return [tag for tag in (self.begin, self.end, self.separator) if tag]

    @property
    def names_before(self) -> bool:
        """Whether the name may stand before the object, whichever of its formats the model uses."""
        return self.listed or self.name_first


#: Hermes, Qwen 2.5 and 3, SmolLM.
HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
#: Llama 3.1, 3.2 and 3.3.
LLAMA = ToolFormat("llama3_json", "<|python_tag|>", key="parameters", bare=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", listed=True, id_length=9)
#: Mistral's models since 2025.
MISTRAL_ARGS = ToolFormat("mistral_args", "[TOOL_CALLS]", name_first=True, separator="[ARGS]", id_length=9)
FORMATS = {form.name: form for form in (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS)}


def format_of(template: str | None) -> ToolFormat:
    """The format that a model's chat template shows; Hermes if it shows none."""
    shown = template or ""
    if MISTRAL.begin in shown:
        return MISTRAL_ARGS if MISTRAL_ARGS.separator in shown else MISTRAL
    if HERMES.begin not in shown and (LLAMA.begin in shown or '"parameters": ' in shown):
        return LLAMA
    return HERMES
