"""What transformers' own `generate` does with the same prompts on the same machine, in this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from benchmarks.recording import Ids, Recorded
from benchmarks.runs import GENERATE, Answer, Run, run_of
from engine.settings import usable_cores
from loadtest.stream import StreamTimes

WARM_UP_TOKENS = 4


class TokenClock(StoppingCriteria):
    """Notes when each token of a batch is there; never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class GenerateReference:
    """The target in float32 on all cores, decoding greedily past end tokens. Close it to free its memory.

    Args:
        target: folder of the model.
        padding: id that fills batches on the left; it is masked.
    """

    def __init__(self, target: Path, padding: int) -> None:
        torch.set_num_threads(usable_cores())
        logging.disable_progress_bar()  # of loading: a bar of its own is being drawn
        self._model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        # As `ignore_eos` of a served request: an end token is a token like others.
        self._model.generation_config.eos_token_id = None
        self._padding = padding

    def close(self) -> None:
        """Free the model."""
        self._model = None
        gc.collect()

    def warm_up(self, prompts: Sequence[Ids]) -> None:
        """A few tokens that nobody counts."""
        self._batch(prompts, WARM_UP_TOKENS)

    def measure(self, prompts: Sequence[Ids], streams: int, tokens: int) -> tuple[Run, list[Recorded]]:
        """Continue all prompts by `tokens` tokens, `streams` at once, one batch after another."""
        answers: list[Answer] = []
        recorded: list[Recorded] = []
        for first in range(0, len(prompts), streams):
            batch = prompts[first : first + streams]
            start = time.perf_counter()
            continuations, times = self._batch(batch, tokens)
            stream = StreamTimes(start, times[0], times[-1], tokens)
            answers += [Answer(stream, times[-1], "")] * len(batch)
            recorded += [Recorded(p, c) for p, c in zip(batch, continuations, strict=True)]
        return run_of(answers, system=GENERATE, streams=streams), recorded

    @torch.inference_mode()
    def _batch(self, prompts: Sequence[Ids], tokens: int) -> tuple[list[Ids], list[float]]:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), longest), self._padding)
        mask = torch.zeros((len(prompts), longest), dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        clock = TokenClock()
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=tokens,
            pad_token_id=self._padding,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return [tuple(row) for row in output[:, longest:].tolist()], clock.times
