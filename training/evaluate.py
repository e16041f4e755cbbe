"""How good a drafter is on held-out text: acceptance and greedy agreement by position, teacher-forced.

Teacher-forced: every slot is judged with the held-out text's own tokens before it, not with drafted ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.blocks import Blocks, sample_anchors, supervise
from training.dataset import Batch, SequenceData
from training.loss import supervised_rows
from training.trainee import Trainee

SEED = 20_260_101


@dataclass(frozen=True)
class HeldOutScore:
    """Means over the supervised slots of all blocks.

    Attributes:
        acceptance: [g] mean of 1 - L1/2 = sum_v min(p, q).
        agreement: [g] share where the most likely draft token is the target's most likely token.
        accepted_length: mean over whole blocks of 1 + sum_k prod_{j<=k} acceptance_j.
        greedy_length: the same with agreement.
        blocks: how many blocks were judged.
    """

    acceptance: tuple[float, ...]
    agreement: tuple[float, ...]
    accepted_length: float
    greedy_length: float
    blocks: int


@dataclass(frozen=True)
class _HeldOutPart:
    batch: Batch
    blocks: Blocks
    best: Tensor  # [S, A, g] the target's most likely token


class HeldOut:
    """The held-out sequences with fixed anchors, prepared once and scored many times.

    Args:
        data: the data folder.
        head: [V, H] the target's LM head.
        anchors: A, blocks a sequence.
        slots: g.
    """

    def __init__(self, data: SequenceData, head: Tensor, anchors: int, slots: int, group: int = 4) -> None:
        generator = torch.Generator().manual_seed(SEED)
        rows = data.held_out_rows()
        self._parts = []
        for start in range(0, len(rows), group):
            batch = data.load(rows[start : start + group])
            blocks = supervise(batch.tokens, batch.mask, sample_anchors(batch.mask, anchors, generator), slots)
            self._parts.append(_HeldOutPart(batch, blocks, _most_likely(batch.hidden, blocks.positions, head)))

    @torch.no_grad()
    def score(self, trainee: Trainee) -> HeldOutScore:
        """Judge the drafter as it is now."""
        accepted, agreed, valid = [], [], []
        index = trainee.draft_index()
        drafter = trainee.drafter
        for part in self._parts:
            hidden = trainee(part.batch.features, part.batch.tokens, part.blocks.anchors).flatten(0, 2)
            rows = supervised_rows(part.blocks, part.batch.tokens.shape[1], index)
            acceptance, best = torch.zeros(len(hidden)), torch.full((len(hidden),), -1)
            teacher_hidden, lse = part.batch.hidden.flatten(0, 1), part.batch.lse.flatten()
            for start in range(0, len(rows.block), 512):
                some = slice(start, start + 512)
                place, teacher = rows.block[some], rows.teacher[some]
                q = drafter.base_logits(hidden[place]).add_(drafter.markov_bias(rows.previous[some])).softmax(-1)
                p = (drafter.base_logits(teacher_hidden[teacher]) - lse[teacher, None]).exp_()
                acceptance[place] = torch.minimum(p, q).sum(-1)
                best[place] = drafter.draft_ids[q.argmax(-1)]
            shape = part.blocks.valid.shape
            accepted.append(acceptance.view(shape).flatten(0, 1))
            agreed.append((best.view(shape) == part.best).flatten(0, 1).float())
            valid.append(part.blocks.valid.flatten(0, 1))
        acceptance, agreement, mask = torch.cat(accepted), torch.cat(agreed), torch.cat(valid)
        whole = mask.all(-1)
        return HeldOutScore(
            acceptance=_masked_mean(acceptance, mask),
            agreement=_masked_mean(agreement, mask),
            accepted_length=1 + float(acceptance[whole].cumprod(-1).sum(-1).mean()),
            greedy_length=1 + float(agreement[whole].cumprod(-1).sum(-1).mean()),
            blocks=len(mask),
        )


def _most_likely(hidden: Tensor, positions: Tensor, head: Tensor) -> Tensor:
    length = hidden.shape[1]
    places = positions + length * torch.arange(len(hidden))[:, None, None]
    distinct, which = places.unique(return_inverse=True)
    flat = hidden.flatten(0, 1)[distinct]
    best = torch.cat([(part @ head.T).argmax(-1) for part in flat.split(128)])
    return best[which]


def _masked_mean(values: Tensor, mask: Tensor) -> tuple[float, ...]:
    means = (values * mask).sum(0) / mask.sum(0).clamp(min=1)
    return tuple(float(mean) for mean in means)
