import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from engine.checkpoint import (
    CheckpointError,
    check_fits_target,
    load_drafter,
    load_fusion,
    read_config,
    read_temperatures,
    save_drafter,
    save_temperatures,
    weights_hash,
)
from engine.drafters.config import DSparkConfig
from engine.drafters.dspark import DSparkDrafter, FeatureFusion
from engine.token_tables import load_token_tables

FIELDS: dict[str, object] = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": 40,
    "draft_vocab_size": 20,
    "target_layer_ids": [1, 3],
    "num_target_layers": 6,
    "block_size": 4,
    "mask_token_id": 0,
    "markov_rank": 5,
}


def config(**changes: object) -> DSparkConfig:
    return DSparkConfig.model_validate(FIELDS | changes)


def table() -> torch.Tensor:
    return torch.randn(40, 16, generator=torch.Generator().manual_seed(7))


def make(**changes: object) -> tuple[FeatureFusion, DSparkDrafter]:
    torch.manual_seed(0)
    shape = config(**changes)
    ids = torch.arange(shape.draft_vocab_size) * 2
    return FeatureFusion(shape), DSparkDrafter(shape, table(), table()[ids], ids)


def test_the_order_of_context_keys_and_masked_rubbish_do_not_matter() -> None:
    _, drafter = make()
    positions = torch.arange(3, 12)
    context = drafter.context_kv(torch.randn(9, 16), positions)
    anchor, at = torch.tensor([5]), torch.tensor([12])
    straight = drafter.backbone(
        anchor, at, [(k[None], v[None]) for k, v in context], torch.ones(1, 9, dtype=torch.bool)
    )
    # A ring buffer: rotated, with two slots that hold something old.
    order = torch.cat((torch.arange(4, 9), torch.arange(4)))
    ring, mask = [], torch.ones(1, 11, dtype=torch.bool)
    mask[0, 5:7] = False
    for keys, values in context:
        ring.append(
            tuple(torch.cat((x[order[:5]], torch.full((2, 2, 8), 1e3), x[order[5:]]))[None] for x in (keys, values))
        )
    torch.testing.assert_close(drafter.backbone(anchor, at, ring, mask), straight, atol=1e-5, rtol=1e-5)


def test_blocks_of_a_batch_do_not_see_each_other_and_an_empty_context_is_allowed() -> None:
    _, drafter = make()
    context = [tuple(torch.randn(2, 3, 2, 8) for _ in range(2)) for _ in range(2)]
    mask = torch.tensor([[True, True, True], [False, False, False]])
    both = drafter.backbone(torch.tensor([3, 4]), torch.tensor([9, 0]), context, mask)
    assert both.isfinite().all()
    alone = drafter.backbone(
        torch.tensor([4]), torch.tensor([0]), [(k[:1, :0], v[:1, :0]) for k, v in context], mask[:1, :0]
    )
    torch.testing.assert_close(both[1:], alone, atol=1e-5, rtol=1e-5)


def test_heads_have_the_vocabularies_they_claim() -> None:
    _, drafter = make()
    hidden, previous = torch.randn(3, 4, 16), torch.randint(0, 40, (3, 4))
    assert drafter.base_logits(hidden).shape == (3, 4, 20)
    torch.testing.assert_close(drafter.base_logits(hidden), hidden @ table()[drafter.draft_ids].T)
    assert drafter.markov_bias(previous).shape == (3, 4, 20)
    assert drafter.confidence_logits(hidden, previous).shape == (3, 4)
    _, plain = make(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
    assert not plain.markov_bias(previous).any()
    with pytest.raises(ValueError, match="enable_confidence_head"):
        plain.confidence_logits(hidden, previous)


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    fusion, drafter = make()
    save_drafter(tmp_path, fusion, drafter)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"fc.weight", "hidden_norm.weight", "markov_head.markov_w1.weight", "d2t", "t2d"} <= names
    assert {"layers.0.self_attn.q_norm.weight", "layers.1.mlp.down_proj.weight", "norm.weight"} <= names
    assert {"confidence_head.proj.weight", "confidence_head.proj.bias"} <= names
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert json.loads((tmp_path / "config.json").read_text())["sample_from_anchor"] is True

    loaded, loaded_fusion = load_drafter(tmp_path, table(), table()), load_fusion(tmp_path)
    assert loaded.config == drafter.config
    assert torch.equal(loaded.draft_ids, drafter.draft_ids)
    for module, original in ((loaded, drafter), (loaded_fusion, fusion)):
        expected = original.state_dict()
        for name, value in module.state_dict().items():
            assert torch.equal(value, expected[name].to(torch.bfloat16).to(value.dtype) if "lm" not in name else value)
    assert loaded.lm_head.weight.dtype == torch.float32
    assert len(weights_hash(tmp_path)) == 16
    before = weights_hash(tmp_path)
    with torch.no_grad():
        drafter.norm.weight.mul_(2)
    save_drafter(tmp_path, fusion, drafter)
    assert weights_hash(tmp_path) != before


def test_a_misfit_is_refused_with_both_values(tmp_path: Path) -> None:
    check_fits_target(config(), 16, 40, 6)
    for arguments, message in (
        ((17, 40, 6), "hidden_size: .* 16, .* 17"),
        ((16, 41, 6), "vocab_size: .* 40, .* 41"),
        ((16, 40, 7), "num_target_layers: .* 6, .* 7"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_fits_target(config(), *arguments)
    fusion, drafter = make()
    save_drafter(tmp_path, fusion, drafter)
    with pytest.raises(CheckpointError, match=r"\(41, 16\).*\(40, 16\)"):
        load_drafter(tmp_path, torch.zeros(41, 16), torch.zeros(41, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": "x"}, "block_size"),
        ({"sample_from_anchor": False}, "sample_from_anchor is false"),
        ({"sample_from_anchor": None}, "sample_from_anchor is null"),
        ({"model_type": "eagle3"}, "eagle3"),
        ({"surprise": 1}, "surprise"),
        ({"intermediate_size": 25}, r"\(24, 16\).*\(25, 16\)"),
        ({"num_hidden_layers": 3}, r"missing.*layers\.2"),
        ({"num_hidden_layers": 1}, r"unknown.*layers\.1"),
        ({"draft_vocab_size": 19}, r"\(20,\).*\(19,\)"),
    ],
)
def test_a_config_that_does_not_match_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    save_drafter(tmp_path, *make())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, table(), table())


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)
    save_drafter(tmp_path, *make())
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_fusion(tmp_path)


def test_temperatures_belong_to_their_weights(tmp_path: Path) -> None:
    fusion, drafter = make()
    save_drafter(tmp_path, fusion, drafter)
    save_temperatures(tmp_path, [1.0, 1.25, 1.5, 2.0], {"rounds": 10})
    assert read_temperatures(tmp_path) == [1.0, 1.25, 1.5, 2.0]
    save_temperatures(tmp_path, [1.0, 1.25], {})
    with pytest.raises(CheckpointError, match="2 temperatures, block_size is 4"):
        read_temperatures(tmp_path)
    save_temperatures(tmp_path, [1.0, 1.25, 1.5, 2.0], {})
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"] * 2}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="fitted for weights"):
        read_temperatures(tmp_path)
    save_drafter(tmp_path, fusion, drafter)
    assert not (tmp_path / "sts.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"draft_vocab_size": 41}, "draft_vocab_size 41"),
        ({"mask_token_id": 40}, "mask_token_id 40"),
        ({"target_layer_ids": [3, 1]}, "target_layer_ids"),
        ({"target_layer_ids": [1, 5]}, "below the last layer 5"),
        ({"markov_rank": 0}, "confidence_head_with_markov"),
        ({"markov_head_type": "gated"}, "markov_head_type"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**change)


def test_token_tables_are_read_without_the_model(tmp_path: Path) -> None:
    tied = {"model.embed_tokens.weight": table().to(torch.bfloat16), "model.norm.weight": torch.ones(16)}
    save_file(tied, tmp_path / "model.safetensors")
    tables = load_token_tables(tmp_path)
    assert tables.head is tables.embedding and tables.embedding.dtype == torch.float32
    save_file(tied | {"lm_head.weight": table()}, tmp_path / "model.safetensors")
    assert torch.equal(load_token_tables(tmp_path).head, table())
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="embed_tokens"):
        load_token_tables(tmp_path)
