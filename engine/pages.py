"""The key/value memory of a verifier: a fixed pool of pages, and who holds which."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE = 16  # positions in a page


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than were asked for."""


@dataclass(frozen=True)
class KVShape:
    """What the pool must hold for a token: layers x 2 x key heads x head size numbers."""

    layers: int
    key_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return 2 * self.layers * self.key_heads * self.head_dim * PAGE * self.dtype.itemsize


class PagePool:
    """Pages of keys [pages, Hk, D, PAGE] and values [pages, Hk, PAGE, D] for every layer, with a free list."""

    def __init__(self, shape: KVShape, pages: int, device: str = "cpu") -> None:
        if pages < 1:
            raise ValueError(f"a pool needs at least one page, not {pages}")
        h, d = shape.key_heads, shape.head_dim
        self.shape = shape
        self.pages = pages
        self.keys = [torch.zeros(pages, h, d, PAGE, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        self.values = [torch.zeros(pages, h, PAGE, d, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @staticmethod
    def pages_for(tokens: int) -> int:
        """Pages that hold `tokens` positions."""
        return -(-tokens // PAGE)

    def take(self, count: int) -> list[int]:
        """`count` free pages, now the caller's.

        Raises:
            OutOfPages: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.pages} free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Return pages to the pool; the caller must not use them again."""
        self._free.extend(pages)
        assert len(self._free) <= self.pages, "a page was given back twice"
