"""Text of growing token sequences: unfinished characters, and stop strings wherever they begin and end."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from tiny_models import END, byte_tokenizer
from tokenizers import Tokenizer, decoders, models

from engine.text import TextStream


def tokens_of(text: str) -> list[int]:
    """Single bytes, and pairs of common letters."""
    return byte_tokenizer().encode(text, add_special_tokens=False)


def pushed(text: str, *stop: str) -> tuple[list[str], TextStream]:
    """What came out with each token, until the stream stopped."""
    stream, out = TextStream(byte_tokenizer(), stop), []
    for token in tokens_of(text):
        out.append(stream.push(token))
        if stream.stopped:
            break
    return out, stream


def test_characters_come_out_whole() -> None:
    text = "né 日本 😀!"
    out, stream = pushed(text)
    assert len(out) == len(text.encode()) > len(text)
    assert "".join(out) == text and stream.finish() == ""
    assert not any("\ufffd" in part for part in out)
    assert out[-5:] == ["", "", "", "😀", "!"]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    stream = TextStream(byte_tokenizer(), ())
    out = [stream.push(token) for token in tokens_of("a日")[:-1]]
    assert out == ["a", "", ""]
    assert stream.finish() == "\ufffd"


def test_special_tokens_have_no_text() -> None:
    stream = TextStream(byte_tokenizer(), ())
    assert [stream.push(token) for token in (END, *tokens_of("x"), END, *tokens_of("y"))] == ["", "x", "", "y"]
    assert stream.finish() == ""


def test_any_bytes_give_the_text_of_the_whole() -> None:
    rng, tokenizer = random.Random(0), byte_tokenizer()
    for _ in range(200):
        ids = [rng.randrange(3, 259) for _ in range(rng.randrange(1, 30))]
        stream = TextStream(tokenizer, ())
        assert "".join(stream.push(token) for token in ids) + stream.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("stop", ["User:", "\nUser", "r:", ":"])
def test_a_stop_string_across_tokens_ends_the_text_before_it(stop: str) -> None:
    text = "All is well.\nUser: and more"
    out, stream = pushed(text, stop)
    assert stream.stopped and stream.finish() == ""
    assert "".join(out) == text[: text.index(stop)]


def test_text_that_only_began_like_a_stop_string_is_given_out() -> None:
    out, stream = pushed("<b> <br> <b", "<br/>", "<bs>")
    assert "".join(out) == "<b> <br> " and not stream.stopped
    assert stream.finish() == "<b"
    assert "".join(pushed("aaab", "aab")[0]) == "a"  # the beginning that counts is not the first one


def test_the_first_of_several_stop_strings_counts() -> None:
    assert "".join(pushed("one two three", "three", "two", "none")[0]) == "one "


def test_a_stop_string_of_bytes_within_a_character_of_several_tokens() -> None:
    assert "".join(pushed("日本語", "本")[0]) == "日"


def byte_fallback_tokenizer() -> SimpleNamespace:
    """What SentencePiece vocabularies look like: words, and bytes for what they lack."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁word": 256, "▁": 257, "x": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return SimpleNamespace(_tokenizer=tokenizer)


def test_a_broken_character_behind_a_whole_one_does_not_break_the_stream() -> None:
    """Such a decoder takes 日 back once it sees that what follows is no character."""
    stream = TextStream(byte_fallback_tokenizer(), ())
    ids = [*"日".encode(), 0xE6, 258, 256, *"é".encode(), 256, 0xFF]
    assert "".join(stream.push(token) for token in ids) == "日\ufffdx wordé word"
    assert stream.finish() == "\ufffd"


def test_any_tokens_of_a_byte_fallback_vocabulary_can_be_decoded() -> None:
    rng = random.Random(0)
    tokenizer = byte_fallback_tokenizer()
    for _ in range(200):
        ids = [rng.choice((rng.randrange(259), 256, 258, 0xE6, 0x97, 0xA5)) for _ in range(30)]
        stream = TextStream(tokenizer, ())
        text = "".join(stream.push(token) for token in ids) + stream.finish()
        assert text.count("word") == ids.count(256) and text.count("x") >= ids.count(258)
