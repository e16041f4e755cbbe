"""Training data from the target itself: it writes user turns, answers them, and its states are kept.

Sequences of one shard advance in step over the same positions, so there is no padding at all. A shard is a pure
function of (target, seed, number): generation can be stopped at any time and goes on with the next missing shard.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.embedded import resolve_target
from engine.pages import PagePool
from engine.target import StepInput, TargetRunner, places_of
from training.prompts import user_turn

FEATURE_LAYERS = (1, 8, 15, 22, 28)
ANSWER_TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
CANDIDATES = 128  # sampling looks at this many best tokens; top-p 0.95 rarely needs more
LOOP_WINDOW, LOOP_DISTINCT = 64, 24  # a turn whose last tokens repeat this much is ended


class Conversation:
    """One sequence: which tokens are forced on it (roles, openings), which the target writes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> None:
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self._end: int = tokenizer.eos_token_id
        self._rng = rng
        self._recent: deque[int] = deque(maxlen=LOOP_WINDOW)
        prefix = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False)
        self.answering = False
        self.forced: deque[int] = deque(self._encode(prefix[: prefix.index("\0")]))
        self._open_user_turn()

    @property
    def temperature(self) -> float:
        """Of the token to be written next: the user speaks at 1, the assistant at its own of this turn."""
        return self._answer_temperature if self.answering else 1.0

    def _open_user_turn(self) -> None:
        text, complete = user_turn(self._rng)
        self.answering = False
        self.forced.extend(self._encode(text))
        if complete:
            self._open_answer()

    def _open_answer(self) -> None:
        self.answering = True
        self._answer_temperature = self._rng.choice(ANSWER_TEMPERATURES)
        self._recent.clear()
        self.forced.extend(self._encode("<|im_end|>\n<|im_start|>assistant\n"))

    def written(self, token: int) -> None:
        """The target wrote `token`; opens the next turn where this one ends or has begun to loop."""
        self._recent.append(token)
        grams = {tuple(self._recent)[i : i + 4] for i in range(len(self._recent) - 3)}
        looping = len(self._recent) == LOOP_WINDOW and len(grams) < LOOP_DISTINCT
        if token != self._end and not looping:
            return
        if self.answering:
            self.forced.extend(self._encode(("<|im_end|>" if looping else "") + "\n<|im_start|>user\n"))
            self._open_user_turn()
        else:
            self._open_answer()
            if token == self._end:
                self.forced.popleft()  # the target has closed the turn itself


def sample(logits: torch.Tensor, temperature: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token a row from logits [B, V] at temperature [B] and top-p 0.95; temperature 0 is greedy."""
    top, ids = logits.topk(CANDIDATES)
    p = (top / temperature.clamp(min=1e-3)[:, None]).softmax(-1)
    p = torch.where(p.cumsum(-1) - p < 0.95, p, 0.0)
    p[temperature == 0] = torch.eye(1, CANDIDATES)
    return ids.gather(1, torch.multinomial(p, 1, generator=generator))[:, 0]


def generate_shard(
    target: TargetRunner, tokenizer: PreTrainedTokenizerBase, seed: int, batch: int, length: int
) -> dict[str, torch.Tensor]:
    """Tokens [batch, length], what the assistant wrote, and the states of training/dataset.py's format."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    talks = [Conversation(tokenizer, random.Random(rng.random())) for _ in range(batch)]
    pool = PagePool(target.kv_shape, batch * PagePool.pages_for(length))
    tables = [pool.take(PagePool.pages_for(length)) for _ in talks]
    tokens = torch.zeros(batch, length, dtype=torch.int32)
    mask = torch.zeros(batch, length, dtype=torch.uint8)
    width = len(target.feature_layers) * target.hidden_size
    features = torch.empty(batch, length, width, dtype=torch.float16)
    hidden = torch.empty(batch, length, target.hidden_size, dtype=torch.float16)
    lse = torch.empty(batch, length)
    proposal = torch.zeros(batch, dtype=torch.int64)
    rows = torch.arange(batch)
    for position in tqdm(range(length), desc=f"shard {seed}", unit="step", leave=False, mininterval=5):
        for b, talk in enumerate(talks):
            if talk.forced:
                tokens[b, position] = talk.forced.popleft()
            else:
                tokens[b, position] = int(proposal[b])
                mask[b, position] = talk.answering
                talk.written(int(proposal[b]))
        out = target.forward(
            StepInput(tokens[:, position].long(), places_of(tables, [position] * batch, [1] * batch), pool, rows)
        )
        features[:, position] = out.features.half()
        hidden[:, position] = out.hidden.half()
        lse[:, position] = out.logits.logsumexp(-1)
        proposal = sample(out.logits, torch.tensor([t.temperature for t in talks]), generator)
    return {"tokens": tokens, "mask": mask, "features": features, "hidden": hidden, "lse": lse}


def pack_tokens(folder: Path, out: Path) -> None:
    """All shards' tokens and masks in one small file: tokens [N, L] uint16, mask [N, L] as bits."""
    from safetensors import safe_open

    tokens, masks = [], []
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, "pt") as shard:
            tokens.append(shard.get_tensor("tokens").numpy().astype(np.uint16))
            masks.append(shard.get_tensor("mask").numpy().astype(bool))
    np.savez_compressed(out, tokens=np.concatenate(tokens), mask=np.packbits(np.concatenate(masks), axis=1))


def states_of(target: TargetRunner, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The states of given tokens [N, L], computed again: what `generate_shard` keeps, without the sampling."""
    out: dict[str, list[torch.Tensor]] = {"features": [], "hidden": [], "lse": []}
    length = tokens.shape[1]
    pool = PagePool(target.kv_shape, PagePool.pages_for(length))
    table = pool.take(pool.pages)
    for row in tqdm(tokens, desc="states", unit="sequence", leave=False, mininterval=5):
        step = StepInput(row.long(), places_of([table], [0], [length]), pool, torch.arange(length))
        result = target.forward(step)
        out["features"].append(result.features.half())
        out["hidden"].append(result.hidden.half())
        out["lse"].append(result.logits.logsumexp(-1))
    return {"tokens": tokens.int(), "mask": mask.byte(), **{k: torch.stack(v) for k, v in out.items()}}


def write_meta(folder: Path, target: TargetRunner, name: str, length: int) -> None:
    """meta.json of a data folder."""
    meta = {
        "sequence_length": length,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "target_layer_ids": list(target.feature_layers),
        "num_target_layers": target.config.num_hidden_layers,
        "target": name,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training generate", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards; existing ones are kept")
    parser.add_argument("--target", default="embedded", help="'embedded' or a local Hugging Face folder")
    parser.add_argument("--shards", type=int, default=12, help="how many shards in all")
    parser.add_argument("--batch", type=int, default=128, help="sequences in a shard")
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--tokens", type=Path, help="compute the states of this packed token file instead of writing")
    parser.add_argument("--pack", type=Path, help="afterwards, write all tokens and masks into this .npz")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/dspark-serve").expanduser(), help="cache root")
    return parser


def main(arguments: list[str]) -> int:
    """Write the missing shards; returns the process's exit status."""
    args = _parser().parse_args(arguments)
    torch.set_num_threads(args.threads)
    folder = resolve_target(args.target, args.cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = TargetRunner.load(folder, FEATURE_LAYERS)
    args.out.mkdir(parents=True, exist_ok=True)
    packed = np.load(args.tokens) if args.tokens else None
    if packed is not None:
        args.length = packed["tokens"].shape[1]
        args.shards = -(-len(packed["tokens"]) // args.batch)
    write_meta(args.out, target, args.target, args.length)
    for number in tqdm(range(args.shards), desc="shards", unit="shard"):
        path = args.out / f"shard-{number:05d}.safetensors"
        if path.exists():
            continue
        if packed is None:
            shard = generate_shard(target, tokenizer, number, args.batch, args.length)
        else:
            part = slice(number * args.batch, (number + 1) * args.batch)
            bits = np.unpackbits(packed["mask"][part], axis=1)[:, : args.length]
            rows = torch.from_numpy(packed["tokens"][part].astype(np.int64))
            shard = states_of(target, rows, torch.from_numpy(bits))
        partial = path.with_suffix(".partial")
        save_file(shard, partial)
        partial.rename(path)
        share = shard["mask"].float().mean()
        tqdm.write(f"{path.name}: {shard['tokens'].numel()} tokens, {share:.0%} by the assistant")
    if args.pack:
        pack_tokens(args.out, args.pack)
    return 0
