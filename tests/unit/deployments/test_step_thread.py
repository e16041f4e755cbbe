"""Sessions that end at awkward moments never disturb the step loop or the others."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from deployments.curve import KeyPair
from deployments.step_thread import StepThread
from deployments.token_link import GatewayAddress, TokenOutbox
from engine.engine import Engine
from engine.request import GenerationRequest, SamplingParams
from engine.settings import EngineSettings
from engine.target import TargetRunner
from scheduler.policy import safe_default
from scheduler.tiers import DEFAULT_TIERS


@pytest.fixture
def steps(target_path: Path) -> Any:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    settings = EngineSettings(kv_memory_bytes=1 << 22, max_context=256)
    target = TargetRunner(LlamaForCausalLM(shape))
    engine = Engine(target, tokenizer, settings, DEFAULT_TIERS, safe_default(DEFAULT_TIERS, 1))
    thread = StepThread(engine, TokenOutbox(KeyPair.generate()))
    yield thread
    thread.stop()


def test_cancelled_waits_at_any_moment_leave_the_loop_running(steps: StepThread) -> None:
    gateway = GatewayAddress("tcp://127.0.0.1:9", KeyPair.generate().public)  # nobody listens: messages queue up
    rng = random.Random(1)

    def begin(name: str, tokens: int) -> Future[Any]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return steps.begin(GenerationRequest(name, (1, 2, 3), params), gateway)

    kept = begin("kept", 200)
    for i in range(60):
        begun = begin(f"dropped-{i}", 5)
        moment = rng.randrange(4)
        if moment == 0:
            begun.cancel()
        else:
            done = begun.result(timeout=30)
            if moment == 1:
                done.cancel()
            elif moment == 2:
                time.sleep(0.002)
                done.cancel()
            else:
                done.result(timeout=30)
        steps.abort(f"dropped-{i}")
    assert kept.result(timeout=30).result(timeout=60).finish_reason == "length"
    state = steps.call(lambda engine: (engine.load(), engine.pool.free, engine.pool.pages)).result(timeout=30)
    assert steps.error is None
    assert all(counts == (0, 0) for counts in state[0].values())
    assert state[1] == state[2]
