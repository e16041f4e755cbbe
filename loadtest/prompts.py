"""A mixed bag of short prompts: arithmetic and word problems, code, and conversation."""

from __future__ import annotations

MATH: tuple[str, ...] = (
    "A train covers 180 km in 2 hours and 15 minutes. What is its average speed in km/h?",
    "Work out 17 * 23 step by step.",
    "Lena has 3 boxes with 14 pencils each and gives away 9 pencils. How many are left?",
    "What is the area of a triangle with base 12 cm and height 7 cm?",
    "Solve 3x + 11 = 38 and show each step.",
    "A shirt costs 40 euros and is reduced by 15 percent. What does it cost now?",
    "List the prime numbers between 30 and 60.",
    "If two dice are thrown, how likely is a sum of 9?",
    "Convert 5/8 to a decimal number and to a percentage.",
    "A tank loses 4 litres an hour and holds 150 litres. When is it down to 90 litres?",
    "What is the sum of the whole numbers from 1 to 50?",
    "The angles of a triangle are x, 2x and 3x. How large is each?",
    "Three friends share a bill of 86 euros and add a tip of 10 percent. What does each pay?",
)

CODE: tuple[str, ...] = (
    "Write a Python function that reverses the words of a sentence.",
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "Explain what a hash table is and when it is slow.",
    "Write an SQL query that finds the five customers with the most orders.",
    "Write a Python class for a stack with push, pop and peek.",
    "What does `git rebase` do, and when should I not use it?",
    "Write a shell command that counts the lines of all .txt files below a folder.",
    "Write a function in C that checks whether a string is a palindrome.",
    "Show how to read a CSV file in Python and print its second column.",
    "What is the difference between a list and a tuple in Python?",
    "Write a JavaScript function that removes duplicates from an array.",
    "Write a unit test in pytest for a function `add(a, b)`.",
    "Implement binary search in Python and explain each line.",
    "Write a regular expression that matches a date such as 2024-03-09.",
)

CHAT: tuple[str, ...] = (
    "Give me three ideas for a rainy Sunday.",
    "How do I get coffee stains out of a cotton shirt?",
    "Write a short poem about a lighthouse in winter.",
    "What should I look for when buying a used bicycle?",
    "Explain to a child why the sky is blue.",
    "Suggest a simple dinner with rice, eggs and spinach.",
    "Write a polite email asking my landlord to repair the heating.",
    "What are the main differences between cats and dogs as pets?",
    "Tell me something surprising about octopuses.",
    "How can I fall asleep more easily?",
    "Plan a two-day visit to a small town by the sea.",
    "Summarise the story of Cinderella in four sentences.",
    "What makes a good teacher?",
    "Give me five names for a small bakery.",
)

PROMPTS: tuple[str, ...] = MATH + CODE + CHAT
