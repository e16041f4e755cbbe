"""The bodies of /v1/completions and /v1/chat/completions, as far as they are supported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deployments.openai_parameters import (
    WITHOUT_EFFECT_IN_CHAT,
    WITHOUT_EFFECT_IN_COMPLETIONS,
    without_unsupported,
)
from engine.request import RequestError, SamplingParams

MAX_STOPS = 16
MAX_TOP_K = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(_Strict):
    """`stream_options`: only `include_usage` does anything."""

    include_usage: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_effect(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return without_unsupported(
            given, {"include_usage"}, {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
        )


class ChatMessage(_Strict):
    """One message. Content parts of text are joined by newlines."""

    role: Literal["system", "user", "assistant"]
    content: str

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, given: Any) -> Any:
        """Clients send replies back as they got them, with fields that say that something was absent."""
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if name == "content" or not (value is None or (name in ("tool_calls", "annotations") and value == []))
        }

    @field_validator("content", mode="before")
    @classmethod
    def _text_of_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"parts must be of type 'text', not {kind!r}")
            if set(part) != {"type", "text"} or not isinstance(part["text"], str):
                raise ValueError("parts must have the form {'type': 'text', 'text': string}")
            texts.append(part["text"])
        return "\n".join(texts)


class _Body(_Strict):
    model: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Field(le=MAX_TOP_K)] = 0
    max_tokens: int | None = None
    stop: list[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    n: int = 1
    service_tier: str = "auto"
    speculation: bool = True
    user: str | None = None  # OpenAI's mark of the end user: it changes no output
    ignore_eos: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, stop: Any) -> Any:
        if isinstance(stop, str):
            return [stop]
        if isinstance(stop, list) and len(stop) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, not {len(stop)}")
        return stop

    @field_validator("n")
    @classmethod
    def _only_one(cls, n: int) -> int:
        if n != 1:
            raise ValueError(f"only 1 is supported, not {n}")
        return n

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> _Body:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The field that limits the output, and its value if it is given."""
        return "max_tokens", self.max_tokens

    def sampling(self, max_tokens: int) -> SamplingParams:
        """How to sample.

        Raises:
            RequestError: a value out of range; `param` names it.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=max_tokens,
            stop=tuple(self.stop),
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )


class CompletionBody(_Body):
    """POST /v1/completions. `prompt` is one text or the token ids of one."""

    prompt: str | list[int]

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in prompt):
            return prompt
        if isinstance(prompt, list) and all(isinstance(x, str | list) for x in prompt):
            raise ValueError("batches are not supported: give one string or one list of token ids")
        raise ValueError("must be one string or one list of token ids")


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise RequestError(
                f"max_completion_tokens ({self.max_completion_tokens}) and max_tokens ({self.max_tokens}) "
                "must be equal where both are given",
                "max_completion_tokens",
            )
        return self

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().asked_tokens


AnyBody = TypeVar("AnyBody", bound=_Body)


def completion_body(given: Mapping[str, Any]) -> CompletionBody:
    """The checked body of /v1/completions.

    Raises:
        RequestError: names the first field at fault.
    """
    return _checked(CompletionBody, given, WITHOUT_EFFECT_IN_COMPLETIONS)


def chat_body(given: Mapping[str, Any]) -> ChatBody:
    """The checked body of /v1/chat/completions.

    Raises:
        RequestError: names the first field at fault.
    """
    return _checked(ChatBody, given, WITHOUT_EFFECT_IN_CHAT)


def _checked(model: type[AnyBody], given: Mapping[str, Any], without_effect: Mapping[str, tuple[Any, ...]]) -> AnyBody:
    kept = without_unsupported(given, model.model_fields.keys(), without_effect)
    try:
        body = model.model_validate(kept)
    except ValidationError as error:
        raise _refusal(error) from None
    body.sampling(max_tokens=1)  # refuses ranges before anything is tokenized
    return body


def _refusal(error: ValidationError) -> RequestError:
    """The first complaint, in words that name the field as its sender knows it."""
    first = error.errors(include_url=False, include_input=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        param = _path((*first["loc"], cause.param)) if first["loc"] else cause.param
        return RequestError(str(cause), param)
    param = _path(first["loc"])
    match first["type"]:
        case "missing":
            return RequestError(f"{param} is required", param)
        case "extra_forbidden":
            return RequestError(f"{param} is not supported", param)
        case "value_error":
            return RequestError(f"{param}: {cause}", param)
        case _:
            return RequestError(f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}", param)


def _path(location: Sequence[int | str | None]) -> str:
    """messages, 0, content -> messages[0].content"""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part is not None:
            path += f".{part}" if path else part
    return path
