"""The layers in one compiled call: same bits in any batch at any width, and the same as the modules they replace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_drafter, tiny_llama, tiny_target
from transformers import LlamaForCausalLM

from engine.drafters.backbone import CompiledBackbone, TorchBackbone, backbone_of
from engine.kernels.attention import RaggedPlaces
from engine.kernels.build import CompiledKernels, load_kernels
from engine.kernels.decoder import DecoderShape, FusedDecoder, LayerWeights
from engine.pages import KVShape, PagePool
from engine.target import TargetRunner

SHAPE = DecoderShape(hidden=44, inner=50, heads=3, key_heads=1, head_dim=16, norm_eps=1e-5, scale=0.25)


@pytest.fixture(scope="module")
def kernels() -> CompiledKernels:
    compiled = load_kernels()
    assert compiled is not None, "these tests need a C++ compiler"
    return compiled


def weights(seed: int, everything: bool) -> LayerWeights:
    """Widths that fill no vector and no panel."""
    g = torch.Generator().manual_seed(seed)
    s = SHAPE

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g) / columns**0.5

    layer = LayerWeights(
        input_norm=torch.rand(s.hidden, generator=g) + 0.5,
        query=matrix(s.heads * s.head_dim, s.hidden),
        key=matrix(s.key_heads * s.head_dim, s.hidden),
        value=matrix(s.key_heads * s.head_dim, s.hidden),
        out=matrix(s.hidden, s.heads * s.head_dim),
        post_norm=torch.rand(s.hidden, generator=g) + 0.5,
        gate=matrix(s.inner, s.hidden),
        up=matrix(s.inner, s.hidden),
        down=matrix(s.hidden, s.inner),
    )
    if not everything:
        return layer
    return replace(
        layer,
        query_norm=torch.rand(s.head_dim, generator=g) + 0.5,
        key_norm=torch.rand(s.head_dim, generator=g) + 0.5,
        qkv_bias=torch.randn((s.heads + 2 * s.key_heads) * s.head_dim, generator=g),
        out_bias=torch.randn(s.hidden, generator=g),
        window=5,
    )


def angles(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    turn = positions.float()[:, None] * 100.0 ** (-torch.arange(8) / 8)
    return turn.cos(), turn.sin()


def expected(layers: list[LayerWeights], x: torch.Tensor) -> torch.Tensor:
    """One sequence from position 0, in float64, in the plainest way."""
    s, count = SHAPE, len(x)
    x = x.double()
    cosine, sine = (a.double()[:, None] for a in angles(torch.arange(count)))

    def norm(y: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        return y if gain is None else y / (y.pow(2).mean(-1, keepdim=True) + s.norm_eps).sqrt() * gain.double()

    def turned(y: torch.Tensor) -> torch.Tensor:
        a, b = y.chunk(2, dim=-1)
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)

    for w in layers:
        y = norm(x, w.input_norm)
        qkv = y @ torch.cat((w.query, w.key, w.value)).double().T
        if w.qkv_bias is not None:
            qkv = qkv + w.qkv_bias.double()
        q, k, v = qkv.unflatten(-1, (-1, s.head_dim)).split([s.heads, s.key_heads, s.key_heads], dim=1)
        q, k = turned(norm(q, w.query_norm)), turned(norm(k, w.key_norm))
        scores = torch.einsum("ihd,jd->hij", q, k[:, 0]) * s.scale
        i, j = torch.arange(count)[:, None], torch.arange(count)
        seen = (j <= i) & (j > i - w.window) if w.window else j <= i
        mixed = torch.einsum("hij,jd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[:, 0]).flatten(1)
        x = x + mixed @ w.out.double().T + (0 if w.out_bias is None else w.out_bias.double())
        y = norm(x, w.post_norm)
        x = x + (F.silu(y @ w.gate.double().T) * (y @ w.up.double().T)) @ w.down.double().T
    return x


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("everything", [False, True])
def test_layers_of_odd_widths_are_right_and_the_same_bits_in_every_batch(
    kernels: CompiledKernels, everything: bool, threads: int
) -> None:
    layers = [weights(seed, everything) for seed in (1, 2)]
    decoder = FusedDecoder(kernels, SHAPE, layers)
    texts = [torch.randn(n, SHAPE.hidden, generator=torch.Generator().manual_seed(n)) for n in (23, 1, 9, 14)]

    def run(batches: list[list[tuple[int, int, int]]]) -> list[torch.Tensor]:
        """Each batch holds (text, from, to); all positions of all texts in the end."""
        pool = PagePool(KVShape(2, SHAPE.key_heads, SHAPE.head_dim), 8)
        for tensor in (*pool.keys, *pool.values):
            tensor.fill_(torch.nan)
        tables = torch.tensor([pool.take(2) for _ in texts], dtype=torch.int32)
        out = [torch.zeros(len(t), 2 * SHAPE.hidden) for t in texts]
        for batch in batches:
            owner = torch.cat([torch.full((b - a,), s) for s, a, b in batch]).int()
            position = torch.cat([torch.arange(a, b) for _, a, b in batch]).int()
            x = torch.cat([texts[s][a:b] for s, a, b in batch]).clone()
            both = decoder.run(
                x, angles(position), (pool.keys, pool.values), RaggedPlaces(tables, owner, position), wanted=(0, 1)
            )
            assert torch.equal(both[:, SHAPE.hidden :], x)
            at = 0
            for s, a, b in batch:
                out[s][a:b] = both[at : at + b - a]
                at += b - a
        return out

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = run([[(s, 0, len(t))] for s, t in enumerate(texts)])
        mixed = run([[(0, 0, 7), (2, 0, 9)], [(3, 0, 13), (0, 7, 8), (1, 0, 1)], [(0, 8, 23)], [(3, 13, 14)]])
        single = run([[(s, i, i + 1)] for s, t in enumerate(texts) for i in range(len(t))])
    finally:
        torch.set_num_threads(before)
    for s, text in enumerate(texts):
        assert torch.equal(alone[s], mixed[s]) and torch.equal(alone[s], single[s])
        torch.testing.assert_close(alone[s][:, SHAPE.hidden :].double(), expected(layers, text), atol=1e-4, rtol=1e-4)


def test_the_common_families_run_fused_and_give_up_their_own_layers() -> None:
    runner = tiny_target().runner
    assert runner.fused and len(runner._model.get_decoder().layers) == 0
    model = tiny_llama()
    model.config.hidden_act = "gelu"  # another shape of layer: its own modules run
    assert not TargetRunner(model).fused


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_scaling_that_depends_on_the_batch_is_refused(kind: str) -> None:
    model: LlamaForCausalLM = tiny_llama()
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": kind}
    with pytest.raises(ValueError, match=kind):
        TargetRunner(model)


def test_a_wrong_shape_is_refused_before_anything_is_read(kernels: CompiledKernels) -> None:
    with pytest.raises(RuntimeError, match="head size"):
        FusedDecoder(kernels, replace(SHAPE, head_dim=12), [])
    with pytest.raises(RuntimeError, match="share"):
        FusedDecoder(kernels, replace(SHAPE, heads=4, key_heads=3), [])


def test_both_backbones_of_a_drafter_agree_as_contexts_grow_past_the_window() -> None:
    model = tiny_drafter(tiny_target().runner, window=32, block_size=5).model
    assert isinstance(backbone_of(model, 3), CompiledBackbone)
    kernels = load_kernels()
    assert kernels is not None
    both = (TorchBackbone(model, 3), CompiledBackbone(kernels, model, 3))
    g = torch.Generator().manual_seed(5)
    ends = [0, 0, 0]
    with torch.inference_mode():
        for new in ((3, 20, 1), (4, 0, 1), (0, 11, 2), (24, 1, 30), (1, 2, 5), (5, 31, 0)):
            slots = torch.cat([torch.full((n,), s) for s, n in enumerate(new)])
            positions = torch.cat([torch.arange(e, e + n) for e, n in zip(ends, new, strict=True)])
            features = torch.randn(len(slots), 64, generator=g)
            ends = [e + n for e, n in zip(ends, new, strict=True)]
            counts = torch.tensor([min(e, 32) for e in ends])
            hidden = []
            for backbone in both:
                backbone.write(slots, positions, features)
                hidden.append(backbone.run(torch.tensor([7, 90, 300]), torch.tensor(ends), torch.arange(3), counts))
            torch.testing.assert_close(hidden[0], hidden[1], atol=1e-4, rtol=1e-4)
