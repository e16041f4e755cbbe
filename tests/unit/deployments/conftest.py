"""The tokenizer, the source and an in-process client that the gateway's tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from serving import app_of
from tiny_llama_source import TinyLlamaSource
from transformers import AutoTokenizer


@pytest.fixture(scope="session")
def tokenizer(target_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(target_path)


@pytest.fixture
def source(tokenizer: Any) -> TinyLlamaSource:
    torch.set_num_threads(1)
    return TinyLlamaSource(tokenizer)


@pytest.fixture
async def client(tokenizer: Any, source: TinyLlamaSource) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app_of(tokenizer, source))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
