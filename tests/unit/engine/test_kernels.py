"""The compiled kernels against plain torch, and their promise that a token's result never depends on its batch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.attention import RaggedPlaces, write_and_attend
from engine.kernels.build import CompiledKernels, load_kernels
from engine.kernels.linear import PackedLinear, pack_linears
from engine.pages import PAGE

POOL = 48  # pages


@pytest.fixture(scope="module")
def kernels() -> CompiledKernels:
    compiled = load_kernels()
    assert compiled is not None, "these tests need a C++ compiler"
    return compiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (33, 64), (97, 31), (128, 96)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_linear_is_the_linear_bit_for_bit_in_any_batch(
    kernels: CompiledKernels, dtype: torch.dtype, outputs: int, inputs: int, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator) if with_bias else None
    layer = PackedLinear(kernels, weight, bias)
    assert layer.packed.dtype == dtype
    x = torch.randn(40, inputs, generator=generator)
    whole = layer(x)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), exact, atol=1e-4, rtol=1e-5)
    for count in range(1, 41):
        assert torch.equal(layer(x[:count]), whole[:count])
    for row in range(40):
        assert torch.equal(layer(x[row : row + 1]), whole[row : row + 1])
    order = torch.randperm(40, generator=generator)
    assert torch.equal(layer(x[order].reshape(5, 8, inputs)).reshape(40, outputs), whole[order])


def test_rows_beyond_one_tile_and_float32_weights_that_bfloat16_holds(kernels: CompiledKernels) -> None:
    weight = torch.randn(50, 32).bfloat16().float()
    layer = PackedLinear(kernels, weight)
    assert layer.packed.dtype == torch.bfloat16  # the same numbers, half the bytes
    x = torch.randn(230, 32)
    torch.testing.assert_close(layer(x), F.linear(x, weight), atol=1e-4, rtol=1e-5)
    assert torch.equal(layer(x)[[0, 95, 96, 229]], torch.cat([layer(x[i : i + 1]) for i in (0, 95, 96, 229)]))
    assert layer(x[:0]).shape == (0, 50)


def test_all_linears_below_a_model_are_packed_and_others_left() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(4, 3)))
    x = torch.randn(5, 8)
    with torch.inference_mode():
        before = model(x)
        assert pack_linears(model) == 2
        torch.testing.assert_close(model(x), before)


@dataclass(frozen=True)
class Ragged:
    """Sequences of `context` written positions that run `counts` more in this step."""

    q: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    places: RaggedPlaces
    context: tuple[int, ...]
    counts: tuple[int, ...]


CONTEXT, COUNTS = (0, 37, 16, 70), (21, 1, 5, 3)


def ragged(heads: int, key_heads: int, size: int) -> Ragged:
    generator = torch.Generator().manual_seed(heads * size)
    shuffled = torch.randperm(POOL, generator=generator).int()
    columns = 6
    pages = shuffled[: 4 * columns].view(4, columns)
    k, v = (
        [torch.randn(c + n, key_heads, size, generator=generator) for c, n in zip(CONTEXT, COUNTS, strict=True)]
        for _ in range(2)
    )
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(COUNTS)).int()
    position = torch.cat([torch.arange(c, c + n) for c, n in zip(CONTEXT, COUNTS, strict=True)]).int()
    q = torch.randn(sum(COUNTS), heads, size, generator=generator)
    return Ragged(q, k, v, RaggedPlaces(pages, owner, position), CONTEXT, COUNTS)


def pools(key_heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing but NaN: whatever is read without having been written shows."""
    return (
        torch.full((POOL, key_heads, size, PAGE), torch.nan),
        torch.full((POOL, key_heads, PAGE, size), torch.nan),
    )


def run(
    kernels: CompiledKernels | None,
    case: Ragged,
    pool: tuple[torch.Tensor, torch.Tensor],
    window: int,
    cap: float = 0.0,
) -> torch.Tensor:
    """Writes the contexts in a first step, then runs the step itself."""
    scale = case.q.shape[2] ** -0.5
    parts = list(zip(case.k, case.v, case.context, strict=True))
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(case.context)).int()
    before = torch.cat([torch.arange(c) for c in case.context]).int()
    write_and_attend(
        kernels,
        torch.zeros(len(owner), *case.q.shape[1:]),
        torch.cat([k[:c] for k, _, c in parts]),
        torch.cat([v[:c] for _, v, c in parts]),
        *pool,
        RaggedPlaces(case.places.pages, owner, before),
        scale,
        window,
    )
    return write_and_attend(
        kernels,
        case.q,
        torch.cat([k[c:] for k, _, c in parts]),
        torch.cat([v[c:] for _, v, c in parts]),
        *pool,
        case.places,
        scale,
        window,
        cap,
    )


def plain(case: Ragged, window: int, cap: float = 0.0) -> torch.Tensor:
    """Softmax attention of each token over its own sequence, in float64."""
    groups = case.q.shape[1] // case.k[0].shape[1]
    out = []
    for q, s, p in zip(case.q.double(), case.places.owner.tolist(), case.places.position.tolist(), strict=True):
        first = max(0, p - window + 1) if window else 0
        k = case.k[s][first : p + 1].double().repeat_interleave(groups, 1)
        v = case.v[s][first : p + 1].double().repeat_interleave(groups, 1)
        scores = torch.einsum("hd,nhd->hn", q, k) * case.q.shape[2] ** -0.5
        if cap:
            scores = cap * torch.tanh(scores / cap)
        out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v))
    return torch.stack(out)


@pytest.mark.parametrize("window", [0, 1, 7, 16, 40])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 16), (3, 1, 64), (9, 3, 64), (2, 2, 48), (8, 1, 80)])
def test_attention_over_pages_is_plain_attention(
    kernels: CompiledKernels, heads: int, key_heads: int, size: int, window: int
) -> None:
    case = ragged(heads, key_heads, size)
    compiled_pool, torch_pool = pools(key_heads, size), pools(key_heads, size)
    compiled = run(kernels, case, compiled_pool, window)
    torch.testing.assert_close(compiled.double(), plain(case, window), atol=1e-5, rtol=1e-5)
    fallback = run(None, case, torch_pool, window)
    torch.testing.assert_close(fallback, compiled, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(compiled_pool, torch_pool, strict=True):
        assert torch.equal(ours.nan_to_num(7e7), theirs.nan_to_num(7e7))  # written to the same places, nothing else


@pytest.mark.parametrize("window", [0, 16])
def test_a_token_attends_to_the_same_bits_alone_in_any_batch_and_on_any_pages(
    kernels: CompiledKernels, window: int
) -> None:
    case, pool = ragged(9, 3, 64), pools(3, 64)
    whole = run(kernels, case, pool, window)
    places, scale = case.places, 64**-0.5
    new = [torch.cat([x[c:] for x, c in zip(xs, case.context, strict=True)]) for xs in (case.k, case.v)]

    def attend(rows: torch.Tensor) -> torch.Tensor:
        at = RaggedPlaces(places.pages, places.owner[rows], places.position[rows])
        return write_and_attend(kernels, case.q[rows], new[0][rows], new[1][rows], *pool, at, scale, window)

    for row in range(len(whole)):
        assert torch.equal(attend(torch.tensor([row])), whole[row : row + 1])
    order = torch.randperm(len(whole))[:17]
    assert torch.equal(attend(order), whole[order])
    moved = Ragged(
        case.q, case.k, case.v, RaggedPlaces(places.pages.flip(0, 1), places.owner, places.position), CONTEXT, COUNTS
    )
    assert torch.equal(run(kernels, moved, pools(3, 64), window), whole)


def test_a_rejected_token_is_overwritten(kernels: CompiledKernels) -> None:
    case, pool = ragged(4, 2, 16), pools(2, 16)
    whole = run(kernels, case, pool, 0)
    wrong = Ragged(case.q, [k + 1 for k in case.k], [v + 1 for v in case.v], case.places, CONTEXT, COUNTS)
    assert not torch.equal(run(kernels, wrong, pool, 0), whole)
    assert torch.equal(run(kernels, case, pool, 0), whole)


@pytest.mark.parametrize("with_kernels", [True, False])
def test_soft_capped_scores(kernels: CompiledKernels, with_kernels: bool) -> None:
    case = ragged(4, 2, 16)
    out = run(kernels if with_kernels else None, case, pools(2, 16), 16, cap=0.5)
    torch.testing.assert_close(out.double(), plain(case, 16, cap=0.5), atol=1e-5, rtol=1e-5)


def test_shapes_that_the_kernel_does_not_know_are_refused(kernels: CompiledKernels) -> None:
    case = ragged(4, 2, 16)
    keys, values = pools(2, 16)
    with pytest.raises(RuntimeError, match="3 query heads cannot share 2 key heads"):
        write_and_attend(kernels, case.q[:, :3], case.q[:, :2], case.q[:, :2], keys, values, case.places, 1.0, 0)
