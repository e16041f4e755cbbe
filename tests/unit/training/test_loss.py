import torch
import torch.nn.functional as F

from tests.unit.training.test_blocks import make_trainee
from tests.unit.training.tiny import LENGTH, VOCABULARY
from training.blocks import Blocks, sample_anchors, supervise
from training.loss import LossWeights, draft_loss, supervised_rows
from training.trainee import Trainee


def plain_loss(
    trainee: Trainee, hidden: torch.Tensor, blocks: Blocks, teacher: torch.Tensor, weights: LossWeights
) -> torch.Tensor:
    """The definition, written slot by slot with autograd and the whole vocabulary in memory.

    hidden [S, A, g, H]; teacher [S, L, V] probabilities over the target's whole vocabulary.
    """
    drafter = trainee.drafter
    index = trainee.draft_index()
    terms = []
    for s, a, k in blocks.valid.nonzero().tolist():
        h, previous, wanted = hidden[s, a, k], blocks.previous[s, a, k], int(blocks.wanted[s, a, k])
        logits = drafter.base_logits(h) + drafter.markov_bias(previous)
        q = torch.zeros(VOCABULARY).scatter(0, drafter.draft_ids, logits.softmax(-1))
        distance = (q - teacher[s, blocks.positions[s, a, k]]).abs().sum()
        known = int(index[wanted]) >= 0
        entropy = -q[wanted].log() if known else torch.zeros(())
        survival = F.binary_cross_entropy_with_logits(
            drafter.confidence_logits(h, previous), (1 - 0.5 * distance).detach()
        )
        terms.append((torch.exp(torch.tensor(-k / weights.decay)), known, entropy, distance, survival))
    weight = torch.stack([t[0] for t in terms])
    known = torch.tensor([t[1] for t in terms])
    entropy, distance, survival = (torch.stack([t[i] for t in terms]) for i in (2, 3, 4))
    return (
        weights.cross_entropy * (weight * entropy).sum() / (weight * known).sum()
        + weights.total_variation * (weight * distance).sum() / weight.sum()
        + weights.confidence * (weight * survival).sum() / weight.sum()
    )


def test_fused_loss_and_gradients_equal_plain_autograd() -> None:
    trainee = make_trainee()
    drafter = trainee.drafter
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.rand(2, LENGTH, generator=generator) < 0.85
    anchors = sample_anchors(mask, 9, generator)
    blocks = supervise(tokens, mask, anchors, drafter.config.block_size)
    teacher_hidden = 0.5 * torch.randn(2, LENGTH, 16, generator=generator)
    logits = teacher_hidden @ drafter.embedding.T
    start = torch.randn(2, 9, drafter.config.block_size, 16, generator=generator)
    weights = LossWeights()
    rows = supervised_rows(blocks, LENGTH, trainee.draft_index())
    assert (rows.wanted < 0).any() and (rows.wanted >= 0).any()

    results = []
    for fused in (True, False):
        trainee.zero_grad()
        hidden = start.clone().requires_grad_()
        if fused:
            loss = draft_loss(
                drafter,
                hidden.flatten(0, 2),
                rows,
                teacher_hidden.flatten(0, 1),
                logits.logsumexp(-1).flatten(),
                weights,
                chunk=7,
            ).total
        else:
            loss = plain_loss(trainee, hidden, blocks, logits.softmax(-1), weights)
        loss.backward()
        heads = [w for n, w in drafter.named_parameters() if n.startswith(("markov", "confidence"))]
        results.append([loss.detach(), hidden.grad, *(w.grad for w in heads)])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
