"""Parameters that clients of OpenAI and of vLLM send and that are not supported here.

Each is refused by name, unless it carries a value that changes nothing: many clients send every parameter
with its default. What has no name here is refused as unknown. Nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.request import RequestError

# Name -> the values, besides null, that ask for what is done anyway.
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),  # which of no functions to call
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "metadata": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # of no tools
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "safety_identifier": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),  # which of no tools to call
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

# The same name, another meaning: 0 logprobs of a completion asks for that of the token itself.
WITHOUT_EFFECT_IN_CHAT: Mapping[str, tuple[Any, ...]] = {
    **WITHOUT_EFFECT,
    "logprobs": (False,),
    "add_special_tokens": (False,),
}
WITHOUT_EFFECT_IN_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    **WITHOUT_EFFECT,
    "logprobs": (),
    "add_special_tokens": (True,),
}


def without_unsupported(
    body: Mapping[str, Any], supported: Collection[str], without_effect: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """`body` with only supported parameters that have a value; null means "not given", as in OpenAI's API.

    Args:
        without_effect: unsupported names, and the values of them that ask for what is done anyway.

    Raises:
        RequestError: an unknown parameter, or an unsupported one that asks for something; `param` names it.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in supported:
            kept[name] = value
            continue
        allowed = without_effect.get(name)
        if allowed is None:
            raise RequestError(f"{name} is not a known parameter", name)
        if not any(_same(value, other) for other in allowed):
            only = "".join(f" or {other!r}" for other in allowed)
            raise RequestError(f"{name} is not supported: leave it out (null{only} is accepted)", name)
    return kept


def _same(value: Any, other: Any) -> bool:
    """Equality as JSON has it: 0 is 0.0, but it is not false."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
