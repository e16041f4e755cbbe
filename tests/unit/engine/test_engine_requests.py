"""The step loop with requests of all kinds: how they end, what is refused, and that nothing is left behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tiny_models import (
    END,
    ForcedDrafter,
    TinyDrafter,
    TinyTarget,
    WatchedLink,
    byte_tokenizer,
    continuations,
    greedy_params,
    random_prompts,
    tiny_drafter,
    tiny_engine,
    tiny_llama,
    tiny_target,
)

from engine.engine import Engine
from engine.request import GenerationRequest, RequestError, SamplingParams, TokenChunk
from scheduler.tiers import UnknownTierError

POISON = 399  # the token whose embedding is NaN


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    model = tiny_llama(positions=4096)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
        model.get_output_embeddings().weight[POISON] = 0.0  # nobody else ever chooses it
    return tiny_target(model)


@pytest.fixture(scope="module")
def drafter(target: TinyTarget) -> TinyDrafter:
    return tiny_drafter(target.runner)


def prompts() -> list[list[int]]:
    return random_prompts(6, vocabulary=POISON)


def knowing(target: TinyTarget, drafter: TinyDrafter, texts: Iterable[list[int]], tokens: int) -> WatchedLink:
    """A link to a drafter that proposes the target's own greedy continuation of these prompts."""
    gamma = drafter.config.block_size
    known = continuations(target, texts, tokens, gamma)
    return WatchedLink(ForcedDrafter(drafter.engine(), lambda digest: known.get(digest, [0] * gamma)))


def run(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[str, list[TokenChunk]]:
    for request in requests:
        engine.add(request)
    chunks = defaultdict(list)
    for chunk in engine.run():
        chunks[chunk.request_id].append(chunk)
    return chunks


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def test_pages_and_contexts_return_after_any_workload(target: TinyTarget, drafter: TinyDrafter) -> None:
    """Length, end token, stop string inside an accepted block, NaN logits, cancellation, the context's end."""
    texts = prompts()
    link = knowing(target, drafter, texts, 40)
    engine = tiny_engine(target, drafter, link, verify_length=4, kv_memory_bytes=1 << 20)
    free, drafts = engine.pool.free, link._drafter
    whole = target.greedy(texts[0], 40)
    text = byte_tokenizer().decode(whole, skip_special_tokens=True)
    stop = text[9:12]
    requests = [
        GenerationRequest("length", tuple(texts[0]), greedy_params(40)),
        GenerationRequest("stop", tuple(texts[0]), greedy_params(40, stop=(stop,))),
        GenerationRequest("poison", (5, POISON, 7), greedy_params(40)),
        GenerationRequest("abort-running", tuple(texts[1]), greedy_params(40)),
        GenerationRequest("to-the-end", tuple([9] * 216), greedy_params(40)),
        GenerationRequest("sampled", tuple(texts[2]), SamplingParams(max_tokens=30)),
        GenerationRequest("seeded", tuple(texts[3]), SamplingParams(max_tokens=30, seed=4, top_p=0.8)),
        GenerationRequest("abort-waiting", tuple(texts[4]), greedy_params(200)),
    ]
    for request in requests:
        engine.add(request)
    assert engine.abort("abort-waiting")
    chunks = defaultdict(list)
    while engine.has_work:
        for chunk in engine.step():
            chunks[chunk.request_id].append(chunk)
        if len(chunks["abort-running"]) == 3:
            running = engine.load()["default"][0]
            if engine.abort("abort-running"):
                assert not engine.abort("abort-running")
                assert engine.load()["default"] == (running - 1, 0)
    assert tokens_of(chunks["length"]) == whole and chunks["length"][-1].finish_reason == "length"
    got = tokens_of(chunks["stop"])
    assert got == whole[: len(got)] and chunks["stop"][-1].finish_reason == "stop"
    assert "".join(c.text for c in chunks["stop"]) == text[: text.index(stop)]
    assert chunks["stop"][-1].accepted > 0  # inside an accepted block
    assert [c.finish_reason for c in chunks["poison"]] == ["error"]
    assert [c.finish_reason for c in chunks["abort-running"]] == [None] * 3 and "abort-waiting" not in chunks
    assert len(tokens_of(chunks["to-the-end"])) == 40
    assert engine.pool.free == free == engine.pool.pages
    assert engine.load() == dict.fromkeys(("priority", "default", "flex"), (0, 0))
    assert isinstance(drafts, ForcedDrafter) and drafts.contexts == 0


def test_nan_logits_end_one_request_and_leave_its_neighbours_alone(target: TinyTarget, drafter: TinyDrafter) -> None:
    texts = prompts()
    engine = tiny_engine(target, drafter, verify_length=2, max_running=4, kv_memory_bytes=1 << 20)
    params = [greedy_params(20), SamplingParams(max_tokens=20, seed=1), SamplingParams(max_tokens=20, seed=2, top_k=9)]
    wanted = [GenerationRequest(f"r{i}", tuple(texts[i]), p) for i, p in enumerate(params)]
    alone = {request.request_id: tokens_of(run(engine, [request])[request.request_id]) for request in wanted}
    poisoned = [GenerationRequest(f"p{i}", (POISON,) * n, greedy_params(20)) for i, n in enumerate((1, 40, 100))]
    # Poison first, so that later requests get its pages.
    mixed = [poisoned[0], wanted[0], poisoned[1], wanted[1], poisoned[2], wanted[2]]
    chunks = run(engine, mixed)
    for request in poisoned:
        (chunk,) = chunks[request.request_id]
        assert chunk.finish_reason == "error" and chunk.error == "the target's logits are not finite"
    for request in wanted:
        assert tokens_of(chunks[request.request_id]) == alone[request.request_id]
    assert engine.pool.free == engine.pool.pages


def test_a_wrong_parameter_of_one_request_is_told_by_its_field(target: TinyTarget) -> None:
    engine = tiny_engine(target, kv_memory_bytes=1 << 20, max_context=2048)
    engine.add(GenerationRequest("taken", (5,), greedy_params(3)))

    def refused(prompt: tuple[int, ...], tokens: int, **changes: Any) -> RequestError:
        request = GenerationRequest(
            **{"request_id": "new", "prompt": prompt, "params": greedy_params(tokens), **changes}
        )
        with pytest.raises(RequestError) as caught:
            engine.add(request)
        return caught.value

    assert refused((), 3).param == "prompt"
    assert refused((5, 400), 3).param == "prompt"
    assert refused((-1,), 3).param == "prompt"
    assert refused((5,), 3, request_id="taken").param == "request_id"
    too_long = refused((5,) * 2000, 49)
    assert too_long.param == "max_tokens"
    assert all(number in str(too_long) for number in ("2000", "49", "2048"))
    never_fits = refused((5,) * 1500, 500)
    assert never_fits.param == "max_tokens" and "125 pages" in str(never_fits) and "85 in all" in str(never_fits)
    with pytest.raises(UnknownTierError, match="gold") as caught:
        engine.add(GenerationRequest("new", (5,), greedy_params(3), tier="gold"))
    assert caught.value.param == "service_tier"
    assert engine.load()["default"] == (0, 1)  # nothing of these was taken
    assert len(tokens_of(list(engine.run()))) == 3


def test_a_target_shorter_than_the_settings_limits_the_context() -> None:
    engine = tiny_engine(tiny_target(tiny_llama(positions=64)), max_context=200)
    assert engine.max_context == 64
    with pytest.raises(RequestError, match="context of 64"):
        engine.add(GenerationRequest("r", (5,) * 60, greedy_params(5)))
    engine.add(GenerationRequest("r", (5,) * 59, greedy_params(5)))


def test_tiers_wait_in_their_order_and_nobody_overtakes_within_one(target: TinyTarget) -> None:
    engine = tiny_engine(target, max_running=2)
    tiers = ["flex", "default", "flex", "priority", "default", "priority"]
    for i, tier in enumerate(tiers):
        engine.add(GenerationRequest(f"r{i}", (5 + i,), greedy_params(4), tier))
    assert engine.load() == {"priority": (0, 2), "default": (0, 2), "flex": (0, 2)}
    seen: dict[str, None] = {}
    for chunk in engine.run():
        seen.setdefault(chunk.request_id)
    assert list(seen) == ["r3", "r5", "r1", "r4", "r0", "r2"]


def test_a_long_prompt_does_not_stop_running_requests(target: TinyTarget) -> None:
    texts = prompts()
    engine = tiny_engine(target, prefill_tokens=8)
    expected = target.greedy(texts[0], 30)
    engine.add(GenerationRequest("running", tuple(texts[0]), greedy_params(30)))
    got: list[int] = []
    while not got:
        got += tokens_of(engine.step())
    long = tuple(range(10, 100))
    engine.add(GenerationRequest("long", long, greedy_params(5)))
    for _ in range(90 // 8):
        (chunk,) = engine.step()  # a chunk of the prompt runs beside it
        assert chunk.request_id == "running" and len(chunk.token_ids) == 1
        got += chunk.token_ids
    rest = defaultdict(list)
    for chunk in engine.run():
        rest[chunk.request_id] += chunk.token_ids
    assert got + rest["running"] == expected
    assert rest["long"] == target.greedy(list(long), 5)


def test_end_tokens_of_the_model_end_a_request_unless_it_ignores_them(target: TinyTarget) -> None:
    """Among many prompts there is one whose greedy continuation holds the end token."""
    engine = tiny_engine(target)
    many = [(first, first + 1) for first in range(3, 300)]
    continued = engine.generate(many, greedy_params(12))
    prompt, whole = next((p, tokens) for p, tokens in zip(many, continued, strict=True) if END in tokens[1:])
    chunks = run(engine, [GenerationRequest("r", prompt, greedy_params(12, ignore_eos=False))])["r"]
    assert tokens_of(chunks) == whole[: whole.index(END) + 1] and chunks[-1].finish_reason == "stop"
