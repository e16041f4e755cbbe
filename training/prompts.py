"""Openings of user turns, so that the generated data covers chat, mathematics and code."""

from __future__ import annotations

import random
from collections.abc import Callable

_NAMES = (
    "Ana",
    "Ben",
    "Chen",
    "Dara",
    "Emil",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Liam",
    "Mina",
)
_THINGS = (
    "apples",
    "books",
    "pencils",
    "cookies",
    "tickets",
    "marbles",
    "stamps",
    "bottles",
    "coins",
    "flowers",
)
_TASKS = (
    "returns the {n}th Fibonacci number",
    "checks whether a number is prime",
    "reverses a string",
    "counts the vowels in a string",
    "sorts a list of integers",
    "finds the largest element of a list",
    "removes duplicates from a list",
    "computes the factorial of a number",
    "checks whether a string is a palindrome",
    "computes the greatest common divisor of two numbers",
    "merges two sorted lists",
    "counts how often each word occurs in a text",
    "converts Celsius to Fahrenheit",
    "flattens a nested list",
    "computes the sum of the digits of a number",
    "rotates a list by {n} places",
    "finds the second largest number in a list",
    "checks whether two words are anagrams",
    "returns the first {n} square numbers",
    "reads a file and counts its lines",
    "implements binary search",
    "implements a stack with push and pop",
    "transposes a matrix",
    "finds all pairs in a list that add up to {n}",
)
_LANGUAGES = ("Python", "Python", "Python", "JavaScript", "C++", "Java")


def _arithmetic(rng: random.Random) -> str:
    a, b, c = rng.randint(2, 99), rng.randint(2, 60), rng.randint(2, 20)
    who, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    return rng.choice(
        (
            f"What is {a} {rng.choice('+-*')} {b}?",
            f"{who} has {a + b} {thing} and gives away {b}. How many {thing} are left?",
            f"{who} buys {c} boxes with {b} {thing} each. How many {thing} is that in total?",
            f"A train travels {a} km in {c} hours. What is its average speed?",
            f"Solve for x: {c}x + {a} = {a + b * c}. Show your steps.",
            f"What is {c}% of {a * 10}? Explain step by step.",
            f"A rectangle is {a} cm long and {b} cm wide. Find its area and its perimeter.",
            f"{who} earns {a} dollars an hour and works {c} hours a day. How much is that in {b} days?",
            f"What is the next number in the sequence {c}, {c + b}, {c + 2 * b}, {c + 3 * b}?",
        )
    )


def _code(rng: random.Random) -> str:
    task = rng.choice(_TASKS).format(n=rng.randint(3, 20))
    language = rng.choice(_LANGUAGES)
    return rng.choice(
        (
            f"Write a {language} function that {task}.",
            f"How do I write a {language} program that {task}? Explain the code.",
            f"Give me a short {language} example that {task}, with comments.",
        )
    )


def _opening(rng: random.Random) -> str:
    """Only the first words; the target goes on."""
    return rng.choice(
        (
            "Write a", "Explain", "What is the", "How do I", "Can you", "Why", "Give me", "I want to", "Describe",
            "Summarize", "What are the", "Tell me about", "Compare", "Help me", "Solve the following", "Write a story",
            "Write an email", "List", "Rewrite", "Translate", "Imagine", "Who", "When", "Calculate", "Write a poem",
            "A company", "In a class of", "def", "Given a list", "I have", "My", "Is it",
        )
    )  # fmt: skip


# kind of user turn -> (share, its opening, whether the opening is the whole turn)
KINDS: tuple[tuple[float, Callable[[random.Random], str], bool], ...] = (
    (0.34, lambda rng: "", False),
    (0.24, _opening, False),
    (0.21, _arithmetic, True),
    (0.21, _code, True),
)


def user_turn(rng: random.Random) -> tuple[str, bool]:
    """The opening of a user turn, and whether it is complete (else the target writes the rest)."""
    ((_, opening, complete),) = rng.choices(KINDS, weights=[share for share, _, _ in KINDS])
    return opening(rng), complete
