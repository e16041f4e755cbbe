"""Text of a growing token sequence: incremental decoding and stop strings across token borders."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Decodes tokens as they come and watches for stop strings.

    Text that may be the beginning of a stop string is held back until that is decided; bytes of an unfinished
    character too.

    Args:
        tokenizer: a transformers fast tokenizer.
        stop: strings that end the text; they are not part of it.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._pending: list[int] = []  # tokens whose text has not left the decoder
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that became certain with this token; sets `stopped` if it completed a stop string."""
        self._held += self._decode(token)
        at = min((i for s in self._stop if (i := self._held.find(s)) >= 0), default=-1)
        if at >= 0:
            text, self._held, self.stopped = self._held[:at], "", True
            return text
        keep = max((n for s in self._stop for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def finish(self) -> str:
        """What was held back, when the text ends otherwise than by a stop string."""
        if self.stopped:
            return ""
        text, self._held = self._held + self._decode_pending(), ""
        return text

    def _decode(self, token: int) -> str:
        """New text of one more token; "" while a character is unfinished."""
        self._pending.append(token)
        try:
            new: str = self._stream.step(self._tokenizer._tokenizer, token) or ""
        except Exception:
            # A byte-fallback decoder takes back a character that it has given out when a broken one follows it.
            # What went out stays; the tokens since then are decoded by themselves.
            new = self._decode_pending()
            self._stream = DecodeStream(ids=[token], skip_special_tokens=True)
        if new:
            self._pending.clear()
        return new

    def _decode_pending(self) -> str:
        text: str = self._tokenizer._tokenizer.decode(self._pending, skip_special_tokens=True)
        return text
