"""What the command line says about tiers."""

from __future__ import annotations

import argparse

import pytest

from loadtest.options import add_options, promises_of
from loadtest.prompts import PROMPTS
from loadtest.tiers import PROMISES, OptionError, Promise, parse_pairs, with_mix


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser)
    return parser.parse_args(arguments)


def test_without_options_the_defaults_hold() -> None:
    assert promises_of(options()) == PROMISES


def test_a_mix_leaves_out_what_it_does_not_name() -> None:
    assert [p.weight for p in promises_of(options("--tier", "priority=3,flex=1"))] == [3, 0, 1]


def test_promises_can_be_named_and_dropped() -> None:
    got = promises_of(options("--promised-rate", "priority=30, default=0", "--promised-ttft", "flex=2.5"))
    assert got == (
        Promise("priority", 30.0, 1.0, 1),
        Promise("default", None, 5.0, 2),
        Promise("flex", None, 2.5, 1),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("priority", "TIER=NUMBER"),
        ("fast=1", "must be one of priority, default, flex"),
        ("priority=1,priority=2", "given twice"),
        ("priority=many", "must be a number"),
        ("priority=-1", "not negative"),
        ("priority=nan", "finite"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_pairs("--tier", text)
    with pytest.raises(argparse.ArgumentError, match=message):
        options("--tier", text)


def test_a_mix_needs_whole_numbers_and_somebody() -> None:
    with pytest.raises(OptionError, match="whole number"):
        with_mix(PROMISES, {"priority": 0.5})
    with pytest.raises(OptionError, match="at least one"):
        with_mix(PROMISES, {"priority": 0.0})


def test_prompts_are_many_and_distinct() -> None:
    assert len(PROMPTS) >= 40
    assert len(set(PROMPTS)) == len(PROMPTS)
