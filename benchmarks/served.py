"""Measures the served system with speculation, without it, and transformers' generate, in one run on one machine.

Each number of concurrent streams gets pairs of runs of the same greedy requests: with speculation, then with
"speculation": false, which is the path of verify length 0. They alternate, so that a drifting machine slows both
alike. The served system is measured twice: with the shipped drafter, and with a REPLAY drafter, which proposes the
target's own continuations, as generate wrote them, at a chosen acceptance. Verification stays real throughout.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.conditions import conditions_of
from benchmarks.plot import draw
from benchmarks.prompts import PROMPTS
from benchmarks.readme import with_measured
from benchmarks.recording import Ids, Recorded, RecordingError, load_recording, texts_of, write_recording
from benchmarks.runs import SERVED, Answer, Run, differing_texts, from_csv, run_of, to_csv
from benchmarks.streams import chat_body, run_streams
from benchmarks.summary import report
from benchmarks.system import System, running_system
from cluster.bring_up import CPU_CONFIG, load_config
from deployments.openai_prompts import PromptEncoder
from deployments.openai_schema import chat_body as parsed_chat_body
from deployments.preparation import announced, prepare_kernels
from deployments.settings import AppSettings
from engine.embedded import resolve_target

HERE = Path(__file__).parent
README = HERE / "README.md"
CSV = HERE / "results" / "served.csv"
PLOT = HERE.parent / "docs" / "results" / "served.png"

FEWEST_REQUESTS = 6  # in a run: few streams go on with further prompts
WARM_UP_TOKENS = 24
REPLAY_BLOCK = 7


@dataclass(frozen=True)
class Prompts:
    """The prompts in words and as the gateway will encode them, and the texts they were recorded to continue with."""

    words: Sequence[str]
    ids: Sequence[Ids]
    recorded: dict[Ids, set[str]]


def requests_at(streams: int) -> int:
    """How many requests a run of `streams` streams has: whole rounds, and not too few."""
    return streams * -(-FEWEST_REQUESTS // streams)


def encoded(words: Sequence[str], tokenizer: Any, tokens: int) -> list[Ids]:
    """The prompts' token ids, made by the gateway's own code from the requests that will be sent."""

    async def encode() -> list[Ids]:
        encoder = PromptEncoder(tokenizer)
        try:
            return [await encoder.chat(parsed_chat_body(chat_body("any", word, tokens, True))) for word in words]
        finally:
            encoder.close()

    return asyncio.run(encode())


def measure_generate(
    target: Path, tokenizer: Any, ids: Sequence[Ids], options: argparse.Namespace, progress: Any
) -> tuple[list[Run], list[Recorded]]:
    """A run of transformers' generate at each number of streams, and all it wrote."""
    from benchmarks.reference import GenerateReference

    runs: list[Run] = []
    recorded: list[Recorded] = []
    reference = GenerateReference(target, tokenizer.pad_token_id or 0)
    try:
        reference.warm_up(ids[:2])
        for streams in options.concurrency:
            progress.set_description(f"transformers generate, {streams} streams")
            run, wrote = reference.measure(ids[: requests_at(streams)], streams, options.tokens)
            runs.append(run)
            recorded += wrote
            progress.update()
    finally:
        reference.close()
    return runs, recorded


def measure_served(
    system: System, drafter: str, prompts: Prompts, options: argparse.Namespace, progress: Any
) -> list[Run]:
    """The pairs of runs of one running system."""

    def run(streams: int, tokens: int, speculation: bool) -> list[Answer]:
        words = prompts.words[: requests_at(streams)]
        return run_streams(system.url, [chat_body(system.model, w, tokens, speculation) for w in words], streams)

    def unrecorded(answers: Sequence[Answer]) -> int:
        known = (prompts.recorded.get(ids, set()) for ids in prompts.ids)
        return sum(a.text not in texts for a, texts in zip(answers, known, strict=False)) if prompts.recorded else 0

    progress.set_description(f"{drafter}, warm-up")
    for speculation in (True, False):
        run(max(options.concurrency), WARM_UP_TOKENS, speculation)
    runs: list[Run] = []
    for pair in range(options.pairs):
        for streams in options.concurrency:
            progress.set_description(f"{drafter}, {streams} streams, pair {pair + 1}")
            fast = run(streams, options.tokens, True)
            progress.update()
            plain = run(streams, options.tokens, False)
            progress.update()
            for answers, speculation in ((fast, True), (plain, False)):
                runs.append(
                    run_of(
                        answers,
                        system=SERVED,
                        streams=streams,
                        pair=pair,
                        drafter=drafter,
                        speculation=speculation,
                        differing=differing_texts(answers, plain),
                        unrecorded=unrecorded(answers),
                    )
                )
    return runs


def measure(options: argparse.Namespace) -> tuple[list[Run], dict[str, str]]:
    """Everything that the command line asks for: runs, and what they were made on.

    Raises:
        RecordingError: the run needs an earlier recording that is not there.
    """
    from transformers import AutoTokenizer

    conditions = conditions_of(options.tokens, options.pairs)
    settings = AppSettings.model_validate(load_config(CPU_CONFIG, None, None, None)["applications"][0]["args"])
    target = resolve_target(settings.engine.target, settings.cache_root)
    recording = settings.cache_root.resolve() / "benchmarks" / "recording.json"
    with announced("CPU kernels"):
        prepare_kernels(settings)
    tokenizer = AutoTokenizer.from_pretrained(target)
    words = PROMPTS[: max(map(requests_at, options.concurrency))]
    ids = encoded(words, tokenizer, options.tokens)
    drafters = [options.only] if options.only else ["shipped", "replay"]
    recorded: list[Recorded] = []
    if options.skip_transformers and "replay" in drafters:
        recorded = load_recording(recording, ids, options.tokens)

    sizes = len(options.concurrency)
    total = sizes * (not options.skip_transformers) + 2 * options.pairs * sizes * len(drafters)
    runs: list[Run] = []
    with tqdm(total=total, unit="run") as progress:
        if not options.skip_transformers:
            generated, recorded = measure_generate(target, tokenizer, ids, options, progress)
            runs += generated
            write_recording(recording, recorded)
        prompts = Prompts(words, ids, texts_of(recorded, options.tokens, tokenizer))
        for drafter in drafters:
            name, drafting = drafter, dict[str, Any]()
            if drafter == "replay":
                name = f"REPLAY {options.acceptance:g}"
                drafting = {
                    "kind": "replay",
                    "recording": str(recording),
                    "replay_acceptance": options.acceptance,
                    "block_size": REPLAY_BLOCK,
                }
            progress.set_description(f"{name}, start")
            with running_system(target, drafting) as system:
                conditions["CPU kernels"] = "compiled" if system.compiled_kernels else "plain torch, no compiler found"
                runs += measure_served(system, name, prompts, options, progress)
    return runs, conditions


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.served", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--concurrency",
        nargs="+",
        type=_between(1, len(PROMPTS)),
        default=[1, 4, 16, 32],
        metavar="N",
        help="numbers of streams at once (default: 1 4 16 32)",
    )
    parser.add_argument(
        "--tokens", type=_between(8, 1024), default=128, help="tokens of every answer (default: %(default)s)"
    )
    parser.add_argument(
        "--pairs",
        type=_between(1, 1000),
        default=3,
        help="pairs of runs, with speculation and plain, at each number of streams (default: %(default)s)",
    )
    parser.add_argument("--only", choices=("shipped", "replay"), help="leave the other drafter out")
    parser.add_argument(
        "--acceptance",
        type=_probability,
        default=0.85,
        help="mean acceptance of a REPLAY drafter's token, given that those before it were accepted "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--skip-transformers",
        action="store_true",
        help="leave generate out; a REPLAY drafter then reads what an earlier run recorded",
    )
    parser.add_argument("--csv", type=Path, default=CSV, help="table of runs (default: benchmarks/results/served.csv)")
    parser.add_argument("--plot", type=Path, default=PLOT, help="the plot (default: docs/results/served.png)")
    parser.add_argument(
        "--write-readme",
        action="store_true",
        help="measure nothing: fill the measured section of benchmarks/README.md from --csv and draw --plot anew",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = command_line()
    options = parser.parse_args(arguments)
    options.concurrency = sorted(set(options.concurrency))
    if options.write_readme:
        runs, conditions = from_csv(options.csv.read_text())
        README.write_text(with_measured(README.read_text(), report(runs, conditions)))
        draw(runs, conditions, options.plot)
        print(f"filled {README} from {options.csv} and drew {options.plot}")
        return 0
    # An end from outside also takes the way that stops Ray.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        runs, conditions = measure(options)
    except RecordingError as error:
        parser.error(str(error))
    except (SystemExit, KeyboardInterrupt):
        print("ended before its end: nothing is written", file=sys.stderr)
        raise
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    options.csv.write_text(to_csv(runs, conditions))
    draw(runs, conditions, options.plot)
    print(f"\n{report(runs, conditions)}\n\nruns: {options.csv}\nplot: {options.plot}", flush=True)
    return 0


def _between(least: int, most: int) -> Any:
    def parse(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be between {least} and {most}, not {number}")
        return number

    return parse


def _probability(text: str) -> float:
    number = float(text)
    if not 0.0 < number < 1.0:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, not {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
