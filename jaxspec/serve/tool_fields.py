"""Request fields for tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxspec.chat.tools import Tool, ToolUse
from jaxspec.serve.errors import ApiError
from jaxspec.serve.fields import ApiModel, StrictModel, single_error

#: As in OpenAI's API, with dots, which other servers allow.
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
#: Most tools of a request, as in OpenAI's API.
MAX_TOOLS = 128


class FunctionField(StrictModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ToolField(StrictModel):
    type: Literal["function"] = "function"
    function: FunctionField


class _Name(ApiModel):
    name: str


class NamedChoice(ApiModel):
    """The function that must be called."""

    type: Literal["function"]
    function: _Name


class _AllowedTool(ApiModel):
    type: Literal["function"] = "function"
    function: _Name


class _Allowed(ApiModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_AllowedTool], Field(min_length=1)]


class AllowedTools(ApiModel):
    """The functions that may be called, of those in `tools`."""

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


Choice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice | AllowedTools | None,
    single_error("must be none, auto, required, a function by name, or allowed_tools"),
]


class ToolFields(ApiModel):
    """Which functions the answer may or must call."""

    tools: Annotated[list[ToolField], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ApiError(400, f"tools has two functions called {twice!r}", param="tools", code="invalid_value")
        wanted = self._wanted()
        if wanted is not None or self.tool_choice == "required":
            if not names:
                raise ApiError(400, "tool_choice needs tools", param="tool_choice", code="invalid_value")
            if unknown := next((name for name in wanted or () if name not in names), None):
                message = f"tool_choice: there is no function {unknown!r} in tools"
                raise ApiError(400, message, param="tool_choice", code="invalid_value")
        return self

    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None: it may not call any."""
        if not self.tools or self.tool_choice == "none":
            return None
        choice, wanted = self.tool_choice, self._wanted()
        named = isinstance(choice, NamedChoice)
        allowed = isinstance(choice, AllowedTools) and choice.allowed_tools.mode == "required"
        fields = [tool.function for tool in self.tools if wanted is None or tool.function.name in wanted]
        tools = [
            Tool(f.name, strict=bool(f.strict), **({} if f.parameters is None else {"parameters": f.parameters}))
            for f in fields
        ]
        parallel = not named and self.parallel_tool_calls is not False
        # Without a grammar, an answer might call a function that is not allowed.
        if isinstance(choice, AllowedTools):
            tools = [Tool(tool.name, tool.parameters, strict=True) for tool in tools]
        return ToolUse(tuple(tools), choice == "required" or named or allowed, parallel, named)

    def template_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them: as the client wrote them."""
        shown = self.tools if self.tool_choice != "none" else None
        return [tool.model_dump(exclude_unset=True) | {"type": "function"} for tool in shown or ()]

    def _wanted(self) -> list[str] | None:
        """Names of the functions that the choice has; None: it has none."""
        if isinstance(self.tool_choice, NamedChoice):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedTools):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return None
