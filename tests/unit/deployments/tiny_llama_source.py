"""A real token source of test size: a random two-layer Llama in this process, over the target's tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.request import GenerationRequest, TokenChunk

BURST = 3  # tokens a step, as if two drafts had been accepted and one refused


class TinyLlamaSource:
    """Continues prompts token by token and yields them in bursts.

    Attributes:
        requests: all that were asked for.
        open: requests being served now.
        cancelled: requests whose generator was closed before its last chunk.
        steps: forward passes so far.
    """

    def __init__(self, tokenizer: Any, *, step_seconds: float = 0.0, first_step_seconds: float = 0.0) -> None:
        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.5,
        )
        self._model = LlamaForCausalLM(config).eval()
        self._tokenizer = tokenizer
        self._step_seconds = step_seconds
        self._first_step_seconds = first_step_seconds
        self.requests: list[GenerationRequest] = []
        self.open = 0
        self.cancelled: list[str] = []
        self.steps = 0

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        self.open += 1
        ended = False
        try:
            await asyncio.sleep(self._first_step_seconds)
            cache: Any = None
            step = torch.tensor([request.prompt])
            ids: list[int] = []
            pending: list[int] = []
            shown = 0
            noise = torch.Generator().manual_seed(request.params.seed or 0)
            while not ended:
                with torch.inference_mode():
                    out = self._model(input_ids=step, cache=cache, use_cache=True)
                self.steps += 1
                cache = out.past_key_values
                token = self._choose(out.logits[0, -1], request, noise)
                step = torch.tensor([[token]])
                ids.append(token)
                pending.append(token)
                text = self._tokenizer.decode(ids)
                finish = None
                if token == self._tokenizer.eos_token_id and not request.params.ignore_eos:
                    finish, text = "stop", self._tokenizer.decode(ids[:-1])
                elif len(ids) == request.params.max_tokens:
                    finish = "length"
                cut, held = _stops(text, request.params.stop)
                if cut is not None:
                    finish, text = "stop", text[:cut]
                elif finish is None:
                    text = text[: len(text) - held]
                    text = text.rstrip("\ufffd")  # perhaps half a letter
                if finish or len(pending) == BURST:
                    new = tuple(pending)
                    pending.clear()
                    chunk = TokenChunk(
                        request.request_id,
                        new,
                        text[shown:],
                        finish,
                        accepted=len(new) - 1,
                        rejected=1 if request.speculation else 0,
                    )
                    shown = len(text)
                    ended = finish is not None
                    yield chunk
                    await asyncio.sleep(self._step_seconds)
        finally:
            self.open -= 1
            if not ended:
                self.cancelled.append(request.request_id)

    @staticmethod
    def _choose(logits: torch.Tensor, request: GenerationRequest, noise: torch.Generator) -> int:
        if request.params.greedy:
            return int(logits.argmax())
        probabilities = (logits / request.params.temperature).softmax(-1)
        return int(torch.multinomial(probabilities, 1, generator=noise))


def _stops(text: str, stops: tuple[str, ...]) -> tuple[int | None, int]:
    """Where the first stop string begins, if one is there; else how many last letters may begin one."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return min(found), 0
    held = 0
    for stop in stops:
        for size in range(1, min(len(stop), len(text) + 1)):
            if text.endswith(stop[:size]):
                held = max(held, size)
    return None, held
