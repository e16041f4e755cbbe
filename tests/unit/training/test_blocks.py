import pytest
import torch

from tests.unit.training.tiny import LENGTH, VOCABULARY, tiny_config, tiny_tables
from training.blocks import draft_hidden, sample_anchors, supervise
from training.dataset import DataError, eligible_anchors
from training.trainee import Trainee


def make_trainee(**changes: object) -> Trainee:
    config = tiny_config(**changes)
    ids = torch.arange(0, VOCABULARY, VOCABULARY // config.draft_vocab_size)[: config.draft_vocab_size]
    trainee = Trainee(config, tiny_tables(), ids, torch.rand(config.feature_size) + 0.5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in trainee.parameters():
            if weight.requires_grad:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return trainee


@pytest.mark.parametrize("window", [3, 7, 1000])
def test_training_and_serving_give_the_same_hidden_states(window: int) -> None:
    trainee = make_trainee(sliding_window=window)
    drafter = trainee.drafter
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(3, LENGTH, 16, generator=generator)
    tokens = torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator)
    anchors = torch.tensor([[1, 2, 9, 20], [5, 5, 6, 23], [1, 11, 12, 13]])
    trained = draft_hidden(drafter, features, tokens, anchors)
    for s in range(3):
        for a, anchor in enumerate(anchors[s].tolist()):
            seen = torch.arange(max(0, anchor - window), anchor)
            context = [(k[None], v[None]) for k, v in drafter.context_kv(features[s, seen], seen)]
            served = drafter.backbone(
                tokens[s, anchor][None],
                anchors[s, a][None],
                context,
                torch.ones(1, len(seen), dtype=torch.bool),
            )
            torch.testing.assert_close(trained[s, a], served[0], atol=2e-6, rtol=1e-5)


def test_gradients_through_the_shared_context_equal_plain_attention() -> None:
    trainee = make_trainee()
    drafter = trainee.drafter
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, LENGTH, 16, generator=generator)
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator)
    anchors = torch.tensor([[1, 6, 7, 19]])
    direction = torch.randn(4, drafter.config.block_size, 16, generator=generator)

    def gradients(shared: bool) -> list[torch.Tensor]:
        drafter.zero_grad()
        inputs = features.clone().requires_grad_()
        if shared:
            hidden = draft_hidden(drafter, inputs, tokens, anchors)[0]
        else:
            context = [
                (k.expand(4, -1, -1, -1), v.expand(4, -1, -1, -1))
                for k, v in drafter.context_kv(inputs, torch.arange(LENGTH)[None])
            ]
            places = torch.arange(LENGTH)
            mask = (places < anchors[0, :, None]) & (places >= anchors[0, :, None] - drafter.config.sliding_window)
            hidden = drafter.backbone(tokens[0, anchors[0]], anchors[0], context, mask)
        (hidden * direction).sum().backward()
        assert inputs.grad is not None
        return [inputs.grad, *(w.grad.clone() for w in drafter.layers.parameters() if w.grad is not None)]

    for ours, plain in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


def test_supervision_is_the_unbroken_generated_run_after_the_anchor() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1, 1]]).bool()
    tokens = torch.arange(10)[None]
    assert eligible_anchors(mask)[0].nonzero().flatten().tolist() == [1, 2, 5, 6, 7, 8]
    blocks = supervise(tokens, mask, torch.tensor([[1, 2, 7]]), slots=3)
    assert blocks.valid[0].tolist() == [[True, True, False], [True, False, False], [True, True, False]]
    assert blocks.previous[0, 0].tolist() == [1, 2, 3]
    assert blocks.wanted[0, 0].tolist() == [2, 3, 4]


def test_anchors_are_distinct_when_there_are_enough() -> None:
    mask = torch.ones(2, 30).bool()
    mask[1, 4:] = False
    anchors = sample_anchors(mask, 10, torch.Generator().manual_seed(0))
    assert len(anchors[0].unique()) == 10
    assert set(anchors[1].tolist()) == {1, 2}
    with pytest.raises(DataError):
        sample_anchors(torch.zeros(1, 5).bool(), 2, torch.Generator())
