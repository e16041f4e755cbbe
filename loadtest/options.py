"""The load test's own command-line options, beside locust's."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Protocol

from loadtest.tiers import PROMISES, OptionError, Promise, parse_pairs, with_first_tokens, with_mix, with_rates


class _Parser(Protocol):
    def add_argument(self, *names: str, **settings: Any) -> Any: ...


def add_options(parser: _Parser) -> None:
    """Add the options; `promises_of` reads those that concern tiers."""
    add = parser.add_argument
    add("--tier", type=_checked("--tier"), default=None, metavar="TIER=USERS,...")
    add("--promised-rate", type=_checked("--promised-rate"), default=None, metavar="TIER=TOKENS_PER_S,...")
    add("--promised-ttft", type=_checked("--promised-ttft"), default=None, metavar="TIER=SECONDS,...")
    add("--model", default="", help="model name; the first of /v1/models if empty")
    add("--max-tokens", type=_positive, default=128, help="longest answer, in tokens")
    add("--temperature", type=float, default=0.0, help="sampling temperature of every request")
    add("--prompt-seed", type=int, default=1, help="seed of the order of prompts")


def promises_of(options: argparse.Namespace) -> tuple[Promise, ...]:
    """The tiers of this run, with the users and promises that the command line names.

    Raises:
        OptionError: the mix leaves no tier, or is not in whole numbers.
    """
    promises = PROMISES
    if options.promised_rate is not None:
        promises = with_rates(promises, options.promised_rate)
    if options.promised_ttft is not None:
        promises = with_first_tokens(promises, options.promised_ttft)
    if options.tier is not None:
        promises = with_mix(promises, options.tier)
    return promises


def _checked(option: str) -> Callable[[str], dict[str, float]]:
    def read(text: str) -> dict[str, float]:
        try:
            pairs = parse_pairs(option, text)
            if option == "--tier":
                with_mix(PROMISES, pairs)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return pairs

    return read


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, not {text!r}")
    return number
