"""What a sequence commits of the tokens a step gives it, and what it keeps for a drafter that lost its context."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import END, byte_tokenizer

from engine.noise import extend_digest
from engine.request import GenerationRequest, RequestError, SamplingParams, TokenChunk
from engine.sequence import FeatureTail, Sequence
from engine.text import TextStream

ENDS = frozenset({END})


def sequence(prompt: tuple[int, ...] = (5, 6), **params: Any) -> Sequence:
    request = GenerationRequest("r", prompt, SamplingParams(**params))
    return Sequence(request, 0, TextStream(byte_tokenizer(), request.params.stop), None)


def emit(s: Sequence, tokens: list[int]) -> TokenChunk:
    return s.emit(tokens, ENDS, accepted=len(tokens) - 1, rejected=0)


def ids(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False)


def test_an_end_token_before_the_length_limit_ends_as_a_stop() -> None:
    """sglang 31599: accepted [10, 11, END, 20, 21, 22] with 5 tokens left is 3 tokens and "stop"."""
    chunk = emit(sequence(max_tokens=5), [10, 11, END, 20, 21, 22])
    assert chunk.token_ids == (10, 11, END)
    assert chunk.finish_reason == "stop"
    assert (chunk.accepted, chunk.rejected) == (3, 2)


def test_an_end_token_that_is_the_last_one_allowed_is_a_stop() -> None:
    assert emit(sequence(max_tokens=3), [10, 11, END]).finish_reason == "stop"


def test_a_stop_string_that_is_the_last_one_allowed_is_a_stop() -> None:
    chunk = emit(sequence(max_tokens=2, stop=("q",)), ids("pq"))
    assert (chunk.text, chunk.finish_reason) == ("p", "stop")


def test_the_length_limit_cuts_an_accepted_block() -> None:
    s = sequence(max_tokens=4)
    assert emit(s, [10, 11]).finish_reason is None
    chunk = emit(s, [12, 13, 14, 15])
    assert chunk.token_ids == (12, 13) and chunk.finish_reason == "length"
    assert s.tokens == [5, 6, 10, 11, 12, 13] and s.emitted == 4 and s.remaining == 0


def test_token_ids_end_where_the_stop_string_ends() -> None:
    """vllm 47616: nothing behind a stop string that completes inside an accepted block is left over."""
    tokens = ids("ok. STOP and more")
    s = sequence(max_tokens=50, stop=("STOP",))
    chunk = emit(s, tokens)
    assert chunk.text == "ok. " and chunk.finish_reason == "stop"
    assert byte_tokenizer().decode(list(chunk.token_ids)) == "ok. STOP"
    assert s.tokens[2:] == list(chunk.token_ids)


def test_a_stop_string_may_begin_in_one_step_and_end_in_another() -> None:
    s = sequence(max_tokens=50, stop=("STOP",))
    tokens = ids("ok STOP!")
    split = tokens.index(ids("T")[0])
    first = emit(s, tokens[:split])
    assert first.text == "ok " and first.finish_reason is None
    second = emit(s, tokens[split:])
    assert second.text == "" and second.finish_reason == "stop" and second.token_ids == tuple(tokens[split:-1])


def test_what_was_held_back_comes_with_an_end_token_and_with_the_length_limit() -> None:
    assert emit(sequence(max_tokens=50, stop=("STOP",)), [*ids("ST"), END]).text == "ST"
    chunk = emit(sequence(max_tokens=2, stop=("STOP",)), ids("STO"))
    assert (chunk.text, chunk.finish_reason) == ("ST", "length")


def test_with_ignore_eos_only_the_length_ends() -> None:
    chunk = emit(sequence(max_tokens=3, ignore_eos=True), [END, END, END, END])
    assert chunk.token_ids == (END, END, END) and chunk.finish_reason == "length" and chunk.text == ""


def test_the_digest_follows_the_committed_tokens() -> None:
    s = sequence(max_tokens=3)
    assert s.digest == extend_digest(0, [5, 6])
    emit(s, [10])
    emit(s, [11, 12, 13, 14])
    assert s.digest == extend_digest(0, [5, 6, 10, 11, 12]) == extend_digest(0, s.tokens)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("max_tokens", 0),
        ("stop", ("a", "")),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_the_tail_gives_what_a_drafter_lacks_or_a_whole_window() -> None:
    tail = FeatureTail(4, 2)
    rows = np.arange(60, dtype=np.float16).reshape(30, 2)
    for start, count in ((0, 3), (3, 1), (4, 3), (7, 1), (8, 13), (21, 1)):
        tail.append(rows[start : start + count])
        end = start + count
        assert tail.end == end
        for since in range(end + 1):
            first, got = tail.since(since)
            assert np.array_equal(got, rows[first:end])
            assert first in (since, max(0, end - 4))  # what was asked for, or all that a block can see
            assert first == since or end - since > 4
