"""The prompts of the benchmark: math, code and conversation in turn, so that any first few are mixed.

All of them ask for answers longer than the tokens that are measured.
"""

from __future__ import annotations

MATH: tuple[str, ...] = (
    "A cyclist rides 24 km uphill at 12 km/h and comes back the same way at 30 km/h. Find the average speed "
    "of the whole trip and explain every step.",
    "Explain how to add the fractions 5/6 and 3/8, and then do the same for 7/10 and 4/15.",
    "A bakery sells 45 loaves in the morning and 3/5 as many in the afternoon, at 4 dollars each. How much does it "
    "take in over 6 days? Reason step by step.",
    "Solve the equations 2x + y = 11 and x - y = 1, and check the answer.",
    "Explain what a percentage is, with four worked examples from shopping.",
    "A rectangular garden is 8 m longer than it is wide and has a perimeter of 64 m. Find its sides and its area, "
    "one step after another.",
    "Write down the multiplication table of 7 from 1 to 15 and describe a pattern in the last digits.",
    "Explain the Pythagorean theorem and use it to find the diagonal of three different rectangles.",
    "A jar holds 6 red, 9 blue and 5 green marbles. Explain how likely each colour is, and how that changes after a "
    "blue one is taken out.",
    "Describe how to turn the number 45 into binary and back, in detail.",
)

CODE: tuple[str, ...] = (
    "Write a Python function that merges two sorted lists into one sorted list, with comments and an example.",
    "Write a Python class BankAccount with deposit, withdraw and transfer, and show how it is used.",
    "Write an HTML page with a form that asks for a name, an email address and a message.",
    "Write a Python program that counts how often each word occurs in a text file and prints the ten most frequent.",
    "Explain recursion to a beginner, with two examples in Python.",
    "Write a JavaScript function that checks whether brackets in a string are balanced, and explain it line by line.",
    "Write SQL statements that create tables for books, authors and loans of a library, and three useful queries.",
    "Implement bubble sort and insertion sort in Python and compare them.",
    "Write a C program that reads ten numbers and prints their minimum, maximum and mean.",
    "Write a Python script that renames all photos in a folder by their date, and explain how it works.",
    "Show how to use dictionaries in Python, with six short examples.",
)

CHAT: tuple[str, ...] = (
    "I have a job interview next week and I am nervous. How should I prepare?",
    "Write a short story about a clockmaker who finds a door behind a wall.",
    "What are the advantages and disadvantages of living in a large city?",
    "Plan a healthy breakfast, lunch and dinner for three days.",
    "Explain how rain forms, for a class of ten-year-olds.",
    "Write a letter to a friend who has moved to another country, with news from home.",
    "How do I start a small vegetable garden on a balcony?",
    "Give me advice on how to save money as a student.",
    "Tell me about the history of the bicycle.",
    "Describe a walk through a forest in autumn, with all the senses.",
    "What should a beginner know before adopting a dog?",
)


def mixed() -> tuple[str, ...]:
    """All prompts, one of each kind in turn."""
    kinds = (MATH, CODE, CHAT)
    longest = max(len(kind) for kind in kinds)
    return tuple(kind[i] for i in range(longest) for kind in kinds if i < len(kind))


PROMPTS: tuple[str, ...] = mixed()
