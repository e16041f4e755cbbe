"""From the words of a request to the token ids of its prompt, and to how many tokens may follow."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from jinja2 import TemplateError

from deployments.openai_errors import ApiError
from deployments.openai_schema import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody
from engine.request import RequestError

CONTEXT_CODE = "context_length_exceeded"


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any

    def __len__(self) -> int: ...

    def __call__(self, text: str) -> Mapping[str, Any]: ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], **options: Any) -> Any: ...


class PromptEncoder:
    """Makes prompts with one tokenizer.

    All of it happens in one thread of its own: a megabyte of text takes a second, in which streams must go
    on, and a tokenizer is not safe to use from two threads.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "tokenizer")

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def completion(self, body: CompletionBody) -> tuple[int, ...]:
        """The ids of `prompt`, at least one.

        Raises:
            RequestError: empty, or an id that the vocabulary lacks; `param` is "prompt".
        """
        if isinstance(body.prompt, str):
            ids = await self._in_thread(self._text_ids, body.prompt)
        else:
            ids = tuple(body.prompt)
            size = len(self._tokenizer)
            for i, token in enumerate(ids):
                if not 0 <= token < size:
                    raise RequestError(f"prompt[{i}] must be a token id in 0..{size - 1}, not {token}", "prompt")
        if not ids:
            raise RequestError("prompt must have at least one token", "prompt")
        return ids

    async def chat(self, body: ChatBody) -> tuple[int, ...]:
        """The ids of the rendered chat, up to where the assistant's answer begins.

        Raises:
            RequestError: there is no chat template, or it refuses these messages; `param` is "messages".
        """
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template: messages cannot be rendered", "messages")
        return await self._in_thread(self._chat_ids, [message.model_dump() for message in body.messages])

    async def _in_thread(self, function: Any, argument: Any) -> tuple[int, ...]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, argument)

    def _text_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text)["input_ids"])

    def _chat_ids(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        try:
            # Without return_dict=False, transformers 5 returns a BatchEncoding.
            ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            raise RequestError(f"messages do not fit the chat template: {error}", "messages") from None
        return tuple(ids)


def output_limit(body: CompletionBody | ChatBody, prompt_tokens: int, max_context: int) -> int:
    """How many tokens may be generated: what is asked for, else 16 (completions) or what fits (chat).

    Args:
        prompt_tokens, max_context: in tokens.

    Raises:
        ApiError: 400 "context_length_exceeded": the prompt leaves no room, or less than is asked for.
    """
    room = max_context - prompt_tokens
    is_chat = isinstance(body, ChatBody)
    if room < 1:
        raise ApiError(
            400,
            f"the context of this model is {max_context} tokens, but the prompt has {prompt_tokens} tokens "
            "and at least 1 must be generated",
            param="messages" if is_chat else "prompt",
            code=CONTEXT_CODE,
        )
    name, asked = body.asked_tokens
    if asked is None:
        return room if is_chat else min(DEFAULT_COMPLETION_TOKENS, room)
    if asked < 1:
        raise RequestError(f"{name} must be at least 1, not {asked}", name)
    if asked > room:
        raise ApiError(
            400,
            f"the context of this model is {max_context} tokens, but {prompt_tokens} tokens of prompt and "
            f"{name} {asked} make {prompt_tokens + asked}",
            param=name,
            code=CONTEXT_CODE,
        )
    return asked
