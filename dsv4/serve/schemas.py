"""What clients may ask for: OpenAI's and Anthropic's requests, with the names that vLLM, SGLang and
Dynamo added. A name that is not here is refused, so that nothing is left out in silence."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dsv4.serve.bodies import cut

Id = Annotated[str, Field(max_length=128)]
Token = Annotated[int, Field(ge=0, strict=True)]  # true is not one
Tokens = Annotated[int, Field(ge=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
MOST_CHOICES = 16
MOST_BIASES = 4096
T = TypeVar("T")
# one error is enough: a body of 8 MiB has room for millions of wrong items
Many = Annotated[list[T], Field(fail_fast=True)]
Some = Annotated[list[T], Field(fail_fast=True, min_length=1)]


def _kind(given: Any) -> str:
    """Of what may be a text or a list of several kinds, which it is: so what is reported is wrong
    with that kind. (Names of kinds are left out where a field is named.)"""
    if isinstance(given, str):
        return "(text)"
    first = given[0] if isinstance(given, list) and given else None
    if isinstance(first, int):
        return "(ids)"
    return "(lists)" if isinstance(first, list) else "(list)"


def _text_or_list(given: Any) -> str:
    return "(text)" if isinstance(given, str) else "(list)"


A = TypeVar("A")
B = TypeVar("B")
TextOr = Annotated[
    Annotated[A, Tag("(text)")] | Annotated[B, Tag("(list)")], Discriminator(_text_or_list)
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _know_all(cls, given: Any) -> Any:
        """Of names that are not here the first is enough, too."""
        if isinstance(given, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            if any(name not in known for name in given):
                name = next(name for name in given if name not in known)
                raise PydanticCustomError("extra_forbidden", "{name}", {"name": cut(name)})
        return given


class _Loose(BaseModel):
    """Of messages and tools, whose further fields belong to the template."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, frozen=True)


class CacheControl(_Strict):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        return {"5m": 300.0, "1h": 3600.0}[self.ttl]


class AgentHints(_Strict):
    """Dynamo's. Only `priority` has an effect: higher is sooner."""

    priority: int = 0
    strict_priority: int | bool | None = None
    osl: int | None = None
    speculative_prefill: bool | None = None


class NvExt(_Strict):
    agent_hints: AgentHints | None = None
    cache_control: CacheControl | None = None


class CacheFields(_Strict):
    """What reaches the cache (docs/serve.md, "What reaches the cache")."""

    cache_salt: Id | None = None
    prompt_cache_key: str | None = Field(None, max_length=1024)
    session_id: Id | None = None
    priority: int = Field(0, ge=-1000, le=1000, description="vLLM's: lower is sooner")
    cache_control: CacheControl | None = None
    nvext: NvExt | None = None


Temperature = Annotated[float, Field(ge=0, le=100)]
Part = Annotated[float, Field(ge=0, le=1)]
PartAbove0 = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1)]
Penalty = Annotated[float, Field(gt=0, le=100)]


class SamplingFields(CacheFields):
    temperature: Temperature | None = None
    top_p: PartAbove0 | None = None
    top_k: TopK | None = None
    min_p: Part | None = None


class GenerationFile(BaseModel):
    """What is read of a checkpoint's generation_config.json."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, frozen=True, strict=True)

    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_p: PartAbove0 | None = None
    top_k: TopK | None = None
    min_p: Part | None = None
    repetition_penalty: Penalty | None = None
    max_new_tokens: Tokens | None = None
    eos_token_id: Token | Annotated[list[Token], Field(min_length=1)] | None = None


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MOST_BIASES:
        raise PydanticCustomError("too_long", "at most {most}", {"most": MOST_BIASES})
    return given


TokenText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]  # each in one way
Biases = Annotated[dict[TokenText, float], BeforeValidator(_few)]


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(_Strict):
    name: Id | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class OpenAIFields(SamplingFields):
    model: str
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    max_tokens: Tokens | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: TextOr[Stop, Annotated[Many[Stop], Field(max_length=16)]] | None = None
    stop_token_ids: Annotated[Many[Token], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # known, and without effect here
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None


class TextPart(_Loose):
    type: Literal["text"]
    text: str


class ChatMessage(_Loose):
    role: Annotated[str, Field(max_length=32)]
    content: TextOr[str, Many[TextPart]] | None = None


class ChatRequest(OpenAIFields):
    messages: Some[ChatMessage]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Many[_Loose] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # known, and without effect here
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None


class ExplainRequest(_Strict):
    """A prompt, as in a completion or a chat."""

    prompt: TextOr[str, Many[Token]] | None = None
    messages: Some[ChatMessage] | None = None
    tools: Many[_Loose] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Id | None = None

    @model_validator(mode="after")
    def _is_one(self) -> ExplainRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_prompt", "give prompt or messages")
        return self


Bytes = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]


class QuotaRequest(_Strict):
    """Bytes; null: no limit there."""

    device_bytes: Bytes | None = None
    host_bytes: Bytes | None = None
    disk_bytes: Bytes | None = None


class CompletionRequest(OpenAIFields):
    prompt: Annotated[
        Annotated[str, Tag("(text)")]
        | Annotated[Some[str], Field(max_length=MOST_CHOICES), Tag("(list)")]
        | Annotated[Some[Token], Tag("(ids)")]
        | Annotated[Some[Some[Token]], Tag("(lists)")],
        Discriminator(_kind),
    ]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None


class AnthropicBlock(_Loose):
    type: str
    cache_control: CacheControl | None = None


class AnthropicMessage(_Strict):
    role: Literal["user", "assistant"]
    content: TextOr[str, Many[AnthropicBlock]]


class AnthropicTool(_Loose):
    name: Id
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)
    cache_control: CacheControl | None = None


class AnthropicToolChoice(_Strict):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None  # known, and without effect here


class MessagesRequest(SamplingFields):
    model: str
    messages: Some[AnthropicMessage]
    max_tokens: Tokens
    system: TextOr[str, Many[AnthropicBlock]] | None = None
    stop_sequences: Annotated[Many[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    tools: Many[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    # known, and without effect here
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
