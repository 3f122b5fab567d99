"""Whether two mathematical answers are equal, by math-verify. Runs in the forks of `fork_server`."""

from __future__ import annotations

import logging
from typing import Any

_SHOWN = 200


def warm_up() -> None:
    """Fills the caches of the parser, which every fork would fill anew."""
    logging.disable(logging.CRITICAL)  # it warns that it has no time limit of its own, which the fork has
    for answer in ("1/2", r"\frac{1}{2}", r"x^2 + 1 = \sqrt{3}", "(1, 2]", r"\begin{pmatrix}1\\2\end{pmatrix}"):
        judge({"gold": rf"\boxed{{{answer}}}", "answer": rf"\boxed{{{answer}}}"})
        judge({"gold": f"${answer}$", "answer": f"The answer is {answer}."})


def judge(item: dict[str, str]) -> dict[str, Any]:
    """`is_equal`: whether the answer is the gold one, both found in texts. `found`: the answer as written, None where
    there is none. `read_as`: as it was understood, None where it is no mathematics."""
    from math_verify import parse, verify
    from sympy import Float

    gold, answer = (parse(item[name], parsing_timeout=0) for name in ("gold", "answer"))
    found = next((value for value in answer if isinstance(value, str)), None)
    read = next((value for value in answer if not isinstance(value, str)), None)
    return {
        "is_equal": bool(answer) and verify(gold, answer, timeout_seconds=0),
        "found": None if found is None else found[:_SHOWN],
        # A Float shows all digits of its precision: 0.250000000000000.
        "read_as": None if read is None else str(float(read) if isinstance(read, Float) else read)[:_SHOWN],
    }
