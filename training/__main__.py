"""Make a drafter for a target: `python -m training COMMAND --help` explains each step.

The steps in order: `generate` lets the target write the training text, `train` trains a drafter on it,
`evaluate` says how good it is on held-out text, `export` writes the folder that is served, and `calibrate`
fits the confidence temperatures into that folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from engine.checkpoint import CheckpointError, check_fits_target, save_drafter
from engine.token_tables import load_token_tables
from training.dataset import DataError, SequenceData, draft_vocabulary
from training.evaluate import HeldOut
from training.shape import drafter_shape
from training.train import STATE_FILE, Run, TrainOptions, load_state, restore_trainee, train
from training.trainee import measure_feature_size

TARGET = Path("~/.cache/dspark-serve/SmolLM2-135M-Instruct").expanduser()
EXPORTED = Path(__file__).parent.parent / "engine" / "drafters" / "smollm2_135m_dspark"

# Special tokens of SmolLM2's vocabulary. Code files were separated by <file_sep> in pre-training; no chat and
# no code that is shown to a user holds it, so its embedding is free to mean "to be drafted".
SMOLLM2_END = 2  # <|im_end|>
SMOLLM2_MASK = 5  # <file_sep>


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the process's exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["generate"]:
        # It has its own options, and needs transformers, which the other commands do without.
        from training import generate

        return int(generate.main(arguments[1:]) or 0)
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        options.run(options)
    except (DataError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _train(options: argparse.Namespace) -> None:
    data = SequenceData(options.data, options.held_out)
    tables = load_token_tables(options.target)
    saved = load_state(options.out) if (options.out / STATE_FILE).is_file() else None
    if saved is not None and not options.resume:
        raise DataError(f"{options.out / STATE_FILE} exists: add --resume to go on with it, or choose another --out")
    config = drafter_shape(
        options.target,
        data.meta.target_layer_ids,
        num_hidden_layers=options.layers,
        draft_vocab_size=options.draft_vocabulary,
        block_size=options.block,
        mask_token_id=options.mask_token,
        markov_rank=options.markov_rank,
        sliding_window=options.window,
    )
    check_fits_target(config, data.meta.hidden_size, data.meta.vocab_size, config.num_target_layers)
    if saved is None:
        counts = data.token_counts()
        draft_ids, covered = draft_vocabulary(counts, config.draft_vocab_size, tuple(options.always))
        length, generated = data.meta.sequence_length, int(counts.sum())
        print(f"{data.scan()} training sequences of {length} tokens, {generated} generated")
        print(f"draft vocabulary: {config.draft_vocab_size} tokens cover {covered:.2%} of the generated text")
        feature_size = measure_feature_size(data)
    else:
        weights = saved["weights"]
        draft_ids = weights["drafter.d2t"] + torch.arange(config.draft_vocab_size)
        feature_size = weights["feature_size"]
    run = Run(
        data,
        tables,
        config,
        draft_ids,
        feature_size,
        TrainOptions(
            minutes=options.minutes,
            steps=options.steps,
            sequences=options.sequences,
            anchors=options.anchors,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            evaluate_every=options.evaluate_every,
            save_every=options.save_every,
            chunk=options.chunk,
            seed=options.seed,
        ),
    )
    if saved is not None:
        run.restore(saved)
        print(f"going on from step {run.step}, after {run.seconds / 60:.1f} minutes of training")
    trained = sum(weight.numel() for weight in run.trainee.parameters() if weight.requires_grad)
    print(f"{trained / 1e6:.1f} M parameters are trained")
    train(run, options.out, tables.head)
    print(f"saved in {options.out}")


def _evaluate(options: argparse.Namespace) -> None:
    tables = load_token_tables(options.target)
    trainee = restore_trainee(load_state(options.out), tables)
    data = SequenceData(options.data, options.held_out)
    score = HeldOut(data, tables.head, options.anchors, trainee.drafter.config.block_size).score(trainee)
    print(f"{score.blocks} blocks of {options.held_out} held-out sequences, teacher-forced")
    print("position          " + " ".join(f"{k + 1:>6}" for k in range(len(score.acceptance))))
    print("acceptance (T = 1)" + " ".join(f"{value:>6.3f}" for value in score.acceptance))
    print("greedy agreement  " + " ".join(f"{value:>6.3f}" for value in score.agreement))
    lengths = f"{score.accepted_length:.3f} (T = 1), {score.greedy_length:.3f} (greedy)"
    print(f"tokens a round, bonus included: {lengths}")


def _export(options: argparse.Namespace) -> None:
    trainee = restore_trainee(load_state(options.out), load_token_tables(options.target))
    save_drafter(options.drafter, trainee.folded_fusion(), trainee.drafter)
    print(f"{options.drafter} written; its confidences are to be calibrated next (python -m training calibrate)")


def _calibrate(options: argparse.Namespace) -> None:
    from training.calibrate import calibrate

    data = SequenceData(options.data, options.held_out)
    tables = load_token_tables(options.target)
    print(calibrate(data, tables, options.drafter, options.candidates, options.seed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("generate", help="let the target write training text (see: generate --help)")

    def command(name: str, run: object, text: str, *, data: bool = True) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        made.set_defaults(run=run)
        made.add_argument("--target", type=Path, default=TARGET, help="folder of the target model")
        made.add_argument("--threads", type=int, default=2, help="CPU threads")
        if data:
            made.add_argument("--data", type=Path, required=True, help="folder that `generate` wrote")
            made.add_argument("--held-out", type=int, default=32, help="sequences never trained on")
        return made

    made = command("train", _train, "train a drafter; evaluates, draws the learning curve and saves on the way")
    made.add_argument("--out", type=Path, required=True, help="folder of the run")
    made.add_argument("--resume", action="store_true", help="go on with the run saved in --out, if there is one")
    length = made.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="time to train for; the learning rate follows the time")
    length.add_argument("--steps", type=int, help="steps to train for; the learning rate follows the steps")
    made.add_argument("--sequences", type=int, default=6, help="sequences a step")
    made.add_argument("--anchors", type=int, default=128, help="blocks a sequence")
    made.add_argument("--learning-rate", type=float, default=2e-3, help="its peak")
    made.add_argument("--weight-decay", type=float, default=0.01, help="of matrices")
    made.add_argument("--layers", type=int, default=2, help="layers of the drafter")
    made.add_argument("--block", type=int, default=5, help="draft tokens of a block (gamma)")
    made.add_argument("--window", type=int, default=256, help="context positions that a block sees")
    made.add_argument("--markov-rank", type=int, default=64, help="rank of the Markov head")
    made.add_argument("--draft-vocabulary", type=int, default=8192, help="tokens that can be drafted")
    made.add_argument("--mask-token", type=int, default=SMOLLM2_MASK, help="token id in the slots to be drafted")
    made.add_argument(
        "--always",
        type=int,
        nargs="*",
        default=[SMOLLM2_END],
        help="token ids that can be drafted in any case",
    )
    made.add_argument("--evaluate-every", type=int, default=50, help="steps between evaluations")
    made.add_argument("--save-every", type=int, default=50, help="steps between saves")
    made.add_argument("--chunk", type=int, default=512, help="rows of the loss in memory at once")
    made.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data, the anchors")

    made = command("evaluate", _evaluate, "acceptance and greedy agreement on held-out text, by position")
    made.add_argument("--out", type=Path, required=True, help="folder of the run")
    made.add_argument("--anchors", type=int, default=64, help="blocks a sequence")

    made = command("export", _export, "write a trained drafter as the folder that is served (bf16)", data=False)
    made.add_argument("--out", type=Path, required=True, help="folder of the run")
    made.add_argument("--drafter", type=Path, default=EXPORTED, help="folder to write")

    made = command("calibrate", _calibrate, "fit the confidence temperatures (STS) on held-out rounds")
    made.add_argument("--drafter", type=Path, default=EXPORTED, help="exported folder, which gets sts.json")
    made.add_argument("--candidates", type=int, default=32, help="K: tokens kept of each draft distribution")
    made.add_argument("--seed", type=int, default=0, help="of the drafted tokens and the acceptance tests")
    return parser


if __name__ == "__main__":
    sys.exit(main())
