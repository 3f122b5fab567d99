"""Small Python functions to be written, each with a reference and inputs to test it on.

`code_rows(functions, "public")` gives rows with the columns `prompt`, `question` and `tests` (for
`sdpo.rewards.code_reward`). Of a function's tests the first ones are public, to train on, and the others private, to
measure with: a program that answers with the outputs it was shown does not pass them. What is expected is computed by
the reference.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from demo_tasks import chat

NUM_PUBLIC = 2
EXAMPLES = [
    ("Write a Python function double(n) that returns two times n.", "def double(n):\n    return 2 * n"),
    (
        "Write a Python function last_char(s) that returns the last character of s.",
        "def last_char(s):\n    return s[-1]",
    ),
]
Which = Literal["public", "private", "all"]


@dataclass(frozen=True)
class Function:
    """A function to write: its signature, what it returns, a reference, and the arguments of its tests."""

    signature: str
    returns: str
    reference: Callable[..., Any]
    inputs: Sequence[tuple[Any, ...]]

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]

    @property
    def question(self) -> str:
        return f"Write a Python function {self.signature} that returns {self.returns}."

    def tests(self, which: Which) -> str:
        """The tests as the column `tests` of `CodeReward`; of all of them, the private ones are hidden."""
        inputs = {"public": self.inputs[:NUM_PUBLIC], "private": self.inputs[NUM_PUBLIC:], "all": self.inputs}[which]
        # A fresh copy for the reference, which may change what it is given.
        cases = [{"input": list(i), "output": self.reference(*json.loads(json.dumps(i)))} for i in inputs]
        if which == "all":
            cases = [{**case, "hidden": i >= NUM_PUBLIC} for i, case in enumerate(cases)]
        return json.dumps({"type": "functional", "fn_name": self.name, "tests": cases})


def code_rows(functions: Sequence[Function], which: Which) -> list[dict[str, Any]]:
    """One row a function, with its public or its private tests, or all of them."""
    return [
        {"prompt": chat(None, EXAMPLES, f.question), "question": f.question, "tests": f.tests(which)}
        for f in functions
    ]


def split_functions(*, num_held_out: int, seed: int = 0) -> tuple[list[Function], list[Function]]:
    """Functions to train on, and functions held out; which is which depends on the seed alone.

    Raises:
        ValueError: there are too few functions.
    """
    functions = list(FUNCTIONS)
    if not 0 < num_held_out < len(functions):
        raise ValueError(f"There are {len(functions)} functions: {num_held_out} of them cannot be held out.")
    random.Random(seed).shuffle(functions)
    return functions[num_held_out:], functions[:num_held_out]


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, n))


def fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


ONE = ((4,), (7,), (0,), (1,), (12,), (35,))
TWO = ((3, 5), (8, 2), (1, 1), (10, 4), (7, 7), (2, 9))
LISTS = (([3, 1, 2],), ([5, 8],), ([7],), ([2, 9, 4, 4],), ([10, 3, 6, 1],))
SIGNED = (([3, -1, 2],), ([-5, 8],), ([7],), ([-2, -9, 4, 0],), ([10, -3],))
TEXTS = (("hello",), ("Python",), ("a",), ("level",), ("banana",), ("Noon time",))
SENTENCES = (("the cat sat",), ("hello",), ("a b c d",), ("to be or not to be",))
WORD_LISTS = ((["tree", "sun", "ocean"],), (["a", "bb"],), (["pear"],), (["red", "green", "blue", "yellow"],))

FUNCTIONS = (
    Function("is_even(n)", "True if n is even and False if not", lambda n: n % 2 == 0, ONE),
    Function("is_odd(n)", "True if n is odd and False if not", lambda n: n % 2 == 1, ONE),
    Function("is_positive(n)", "True if n is greater than zero", lambda n: n > 0, ((3,), (-2,), (0,), (8,), (-7,))),
    Function("is_negative(n)", "True if n is less than zero", lambda n: n < 0, ((3,), (-2,), (0,), (8,), (-7,))),
    Function("square(n)", "the square of n", lambda n: n * n, ONE),
    Function("cube(n)", "n to the power of three", lambda n: n**3, ONE),
    Function("half(n)", "n divided by two", lambda n: n / 2, ONE),
    Function("increment(n)", "n plus one", lambda n: n + 1, ONE),
    Function("negate(n)", "n with the opposite sign", lambda n: -n, ((3,), (-2,), (0,), (8,), (-7,))),
    Function("absolute(n)", "the absolute value of n", abs, ((-3,), (4,), (0,), (-12,), (5,))),
    Function("last_digit(n)", "the last digit of the number n", lambda n: n % 10, ((27,), (135,), (8,), (40,), (91,))),
    Function("digit_sum(n)", "the sum of the digits of n", lambda n: sum(map(int, str(n))),
             ((27,), (135,), (8,), (40,))),
    Function("num_digits(n)", "how many digits the number n has", lambda n: len(str(n)),
             ((27,), (135,), (8,), (4021,))),
    Function("factorial(n)", "the factorial of n", math.factorial, ((3,), (5,), (0,), (1,), (6,))),
    Function("sum_to(n)", "the sum of the numbers from 1 to n", lambda n: n * (n + 1) // 2, ((3,), (5,), (1,), (10,))),
    Function("fibonacci(n)", "the n-th Fibonacci number, where fibonacci(0) is 0 and fibonacci(1) is 1", fibonacci,
             ((3,), (6,), (0,), (1,), (10,))),
    Function("is_prime(n)", "True if n is a prime number", is_prime, ((5,), (9,), (2,), (1,), (21,), (17,))),
    Function("countdown(n)", "the list of the numbers from n down to 1", lambda n: list(range(n, 0, -1)),
             ((3,), (5,), (1,), (4,))),
    Function("count_up(n)", "the list of the numbers from 1 to n", lambda n: list(range(1, n + 1)),
             ((3,), (5,), (1,), (4,))),
    Function("add(a, b)", "the sum of a and b", lambda a, b: a + b, TWO),
    Function("subtract(a, b)", "a minus b", lambda a, b: a - b, TWO),
    Function("multiply(a, b)", "the product of a and b", lambda a, b: a * b, TWO),
    Function("power(a, b)", "a to the power of b", lambda a, b: a**b, TWO),
    Function("remainder(a, b)", "the remainder of a divided by b", lambda a, b: a % b, TWO),
    Function("larger(a, b)", "the larger one of a and b", max, TWO),
    Function("smaller(a, b)", "the smaller one of a and b", min, TWO),
    Function("average(a, b)", "the average of a and b", lambda a, b: (a + b) / 2, TWO),
    Function("distance(a, b)", "the absolute difference of a and b", lambda a, b: abs(a - b), TWO),
    Function("is_multiple(a, b)", "True if a is divisible by b", lambda a, b: a % b == 0,
             ((6, 3), (7, 2), (8, 8), (9, 4), (10, 5))),
    Function("perimeter(w, h)", "the perimeter of a rectangle with sides w and h", lambda w, h: 2 * (w + h), TWO),
    Function("area(w, h)", "the area of a rectangle with sides w and h", lambda w, h: w * h, TWO),
    Function("to_fahrenheit(c)", "the temperature c, in Celsius, in Fahrenheit", lambda c: c * 9 / 5 + 32,
             ((10,), (25,), (0,), (-40,), (100,))),
    Function("to_seconds(m)", "how many seconds m minutes have", lambda m: 60 * m, ONE),
    Function("total(xs)", "the sum of the list xs", sum, LISTS),
    Function("mean(xs)", "the average of the list xs", lambda xs: sum(xs) / len(xs), LISTS),
    Function("product(xs)", "the product of the numbers in the list xs", math.prod, LISTS),
    Function("largest(xs)", "the largest number in the list xs", max, SIGNED),
    Function("smallest(xs)", "the smallest number in the list xs", min, SIGNED),
    Function("spread(xs)", "the largest minus the smallest number in xs", lambda xs: max(xs) - min(xs), SIGNED),
    Function("first(xs)", "the first item of the list xs", lambda xs: xs[0], LISTS),
    Function("last(xs)", "the last item of the list xs", lambda xs: xs[-1], LISTS),
    Function("length(xs)", "how many items the list xs has", len, (*LISTS, ([],))),
    Function("is_empty(xs)", "True if the list xs has no items", lambda xs: not xs,
             (([],), ([1, 2],), ([0],), ([[]],))),
    Function("reverse(xs)", "the list xs in reverse order", lambda xs: xs[::-1], LISTS),
    Function("ascending(xs)", "the list xs sorted in ascending order", sorted, SIGNED),
    Function("descending(xs)", "the list xs sorted from large to small", lambda xs: sorted(xs)[::-1], SIGNED),
    Function("without_first(xs)", "the list xs without its first item", lambda xs: xs[1:], LISTS),
    Function("doubled(xs)", "a list with every number of xs times two", lambda xs: [2 * x for x in xs], LISTS),
    Function("squares(xs)", "a list with the square of every number of xs", lambda xs: [x * x for x in xs], LISTS),
    Function("evens(xs)", "a list of the even numbers in xs", lambda xs: [x for x in xs if x % 2 == 0], LISTS),
    Function("positives(xs)", "a list of the numbers in xs that are above zero", lambda xs: [x for x in xs if x > 0],
             SIGNED),
    Function("count_evens(xs)", "how many numbers in xs are even", lambda xs: sum(x % 2 == 0 for x in xs), LISTS),
    Function("contains(xs, x)", "True if x is in the list xs", lambda xs, x: x in xs,
             (([1, 2], 2), ([3], 1), ([], 4), ([5, 6, 7], 5), ([2, 4], 3))),
    Function("count(xs, x)", "how often x is in the list xs", lambda xs, x: xs.count(x),
             (([1, 2, 2], 2), ([3], 1), ([], 4), ([5, 5, 5], 5), ([2, 4, 2], 4))),
    Function("joined(xs, ys)", "the list xs followed by the list ys", lambda xs, ys: xs + ys,
             (([1], [2, 3]), ([], [4]), ([5, 6], [7]), ([8], []))),
    Function("upper(s)", "the string s in upper case", str.upper, TEXTS),
    Function("reverse_text(s)", "the string s reversed", lambda s: s[::-1], TEXTS),
    Function("is_palindrome(s)", "True if s reads the same backwards", lambda s: s == s[::-1],
             (("level",), ("house",), ("a",), ("noon",), ("abca",))),
    Function("first_char(s)", "the first character of s", lambda s: s[0], TEXTS),
    Function("text_length(s)", "the number of characters in s", len, TEXTS),
    Function("count_vowels(s)", "the number of vowels in s", lambda s: sum(c in "aeiou" for c in s),
             (("hello",), ("banana",), ("sky",), ("queue",), ("aeiou",))),
    Function("count_a(s)", "how often the letter a is in s", lambda s: s.count("a"),
             (("banana",), ("hello",), ("a",), ("cat and",))),
    Function("repeat(s, n)", "the string s repeated n times", lambda s, n: s * n,
             (("ab", 2), ("x", 4), ("hey", 0), ("no", 1), ("abc", 3))),
    Function("shout(s)", "the string s followed by an exclamation mark", lambda s: s + "!", TEXTS),
    Function("count_words(s)", "the number of words in s", lambda s: len(s.split()), SENTENCES),
    Function("words(s)", "a list of the words in s", str.split, SENTENCES),
    Function("first_word(s)", "the first word of s", lambda s: s.split()[0], SENTENCES),
    Function("without_spaces(s)", "the string s without its spaces", lambda s: s.replace(" ", ""), SENTENCES),
    Function("sentence(words)", "the words joined by spaces", " ".join, WORD_LISTS),
    Function("longest(words)", "the longest one of the words", lambda words: max(words, key=len), WORD_LISTS),
    Function("lengths(words)", "a list with the length of every word", lambda words: [len(w) for w in words],
             WORD_LISTS),
    Function("starts_with(s, c)", "True if s starts with c", str.startswith,
             (("hello", "h"), ("cat", "d"), ("Noon", "n"), ("abc", "a"), ("zoo", "o"))),
)  # fmt: skip
