"""Reward and feedback of programs: the code of a completion against the tests of its question."""

from __future__ import annotations

import json
import logging
import re
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

from sdpo.rewards import verdict
from sdpo.rewards.attempts import column, cut, text_of
from sdpo.rewards.sandbox import Call, Level, Limits, Run, isolation_level, num_cores, run
from sdpo.rewards.sandbox_child import FILE
from sdpo.types import Score

logger = logging.getLogger(__name__)

PRELUDE = """
from typing import *
from collections import *
from functools import *
from itertools import *
from heapq import *
from bisect import *
import bisect, collections, functools, heapq, itertools, math, re, string
"""
"""What functions may use without importing it, as on LeetCode."""

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+.-]*)[^\n`]*$", re.MULTILINE)
_LANGUAGES = ("python", "python3", "py")
_LINE = re.compile(rf'File "{re.escape(FILE)}", line \d+')
_TRACEBACK_LINES = 6
_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")


@dataclass(frozen=True, slots=True)
class Case:
    """One test. `given`: the positional arguments of the function, or the text on standard input."""

    given: Any
    expected: Any
    is_hidden: bool = False


@dataclass(frozen=True, slots=True)
class Cases:
    """The tests of one question; `fn_name` None where programs read standard input."""

    fn_name: str | None
    cases: tuple[Case, ...]


class CodeReward:
    """Reward function: 1.0 where a completion's program passes the tests of its row, and what went wrong elsewhere.

    The column `tests_column` holds, as a dict or as JSON text,
    `{"type": "functional", "fn_name": "add", "tests": [{"input": [1, 2], "output": 3}]}` or
    `{"type": "stdin", "tests": [{"input": "1 2\\n", "output": "3\\n"}]}`; None: the function does not apply.

    `reward` "all": all tests or 0; a program is run up to the first test that it fails. "fraction": the share of
    tests it passes. `use_hidden`: tests with `"hidden": true` count too; they are never shown. `limits`: of one test;
    `attempt_seconds`: of all tests of one completion. `num_workers`: programs at once, None for one a core.
    `max_feedback`: characters. `tolerance`: of fractions, see `verdict`. `level`: see `sandbox`; "limited" is for
    programs that are trusted. `prelude` precedes functions; `paths`: folders of packages that programs may import.
    """

    __name__ = "code_reward"

    def __init__(
        self,
        *,
        tests_column: str = "tests",
        reward: Literal["all", "fraction"] = "all",
        use_hidden: bool = False,
        limits: Limits | None = None,
        attempt_seconds: float = 30.0,
        num_workers: int | None = None,
        max_feedback: int = 2000,
        tolerance: float = 1e-6,
        level: Level | None = None,
        prelude: str = PRELUDE,
        paths: Sequence[str] = (),
    ) -> None:
        if reward not in ("all", "fraction"):
            raise ValueError(f"reward is {reward!r}; 'all' or 'fraction' is needed")
        if attempt_seconds <= 0 or max_feedback < 100 or (num_workers is not None and num_workers < 1):
            raise ValueError("attempt_seconds and num_workers must be above 0, max_feedback at least 100")
        self._column, self._is_fraction, self._use_hidden = tests_column, reward == "fraction", use_hidden
        self._limits, self._attempt_seconds = limits or Limits(), attempt_seconds
        self._num_workers = num_workers
        self._max_feedback, self._tolerance = max_feedback, tolerance
        self._level, self._prelude, self._paths = level, prelude, tuple(paths)
        if level == "limited":
            logger.warning("Programs run at isolation level 'limited': they can do whatever this user can.")

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = None, **columns: Any
    ) -> list[Score]:
        """One Score per completion, in order.

        Raises:
            ValueError: no column of tests, or tests that cannot be read; the message names the row.
            RuntimeError: no way to confine programs works here.
        """
        given = column(columns, self._column, len(completions), what="the tests of programs are")
        rows = [self._read(tests, f"{self._column} of row {i}") for i, tests in enumerate(given)]
        level = self._level or isolation_level()
        with ThreadPoolExecutor(self._num_workers or num_cores()) as pool:
            return list(pool.map(self._score, completions, rows, [level] * len(rows)))

    def _read(self, tests: Any, where: str) -> Cases | None:
        """Tests of one row that count, those that may be shown first."""
        if tests is None:
            return None
        read = read_tests(tests, where)
        shown = [case for case in read.cases if not case.is_hidden]
        hidden = [case for case in read.cases if case.is_hidden] if self._use_hidden else []
        if not shown + hidden:
            raise ValueError(f"{where}: no test counts; give some, or use_hidden=True where all are hidden")
        return replace(read, cases=(*shown, *hidden))

    def _score(self, completion: Any, tests: Cases | None, level: Level) -> Score:
        if tests is None:
            return Score(None)
        program, is_fenced = extract_code(text_of(completion))
        if not program.strip():
            return Score(0.0, "Format Error: there is no code. Answer with one ```python code block.")
        num_passed, feedback = 0, None
        deadline = time.monotonic() + self._attempt_seconds
        for case in tests.cases:
            seconds = min(self._limits.seconds, deadline - time.monotonic())
            if seconds <= 0:
                feedback = feedback or f"Time Limit Exceeded: all tests together took {self._attempt_seconds:g} s."
                break
            result = self._run(program, tests.fn_name, case, seconds, level)
            failure = self._failure(result, tests.fn_name, case)
            num_passed += failure is None
            feedback = feedback or failure
            if failure is not None and (not self._is_fraction or _is_syntax_error(result)):
                break
        if num_passed == len(tests.cases):
            return Score(1.0)
        if not is_fenced and feedback is not None and feedback.startswith("Syntax Error"):
            feedback = f"Format Error: no ```python code block, and the answer as a whole is no program.\n{feedback}"
        reward = num_passed / len(tests.cases) if self._is_fraction else 0.0
        return Score(reward, cut(feedback or "", self._max_feedback))

    def _run(self, program: str, fn_name: str | None, case: Case, seconds: float, level: Level) -> Run:
        return run(
            program,
            stdin="" if fn_name else case.given,
            call=Call(fn_name, case.given) if fn_name else None,
            limits=replace(self._limits, seconds=seconds),
            level=level,
            prelude=self._prelude if fn_name else "",
            paths=self._paths,
        )

    def _failure(self, result: Run, fn_name: str | None, case: Case) -> str | None:
        """What is wrong with one run, as text; None where it passes."""
        part = max(40, (self._max_feedback - 150) // 3)
        given = _shown(case.given, fn_name, part)
        problem = _ending(result, part)
        if problem is not None:
            if _is_syntax_error(result):
                return problem
            kind = problem.split("\n")[0].split(":")[0]
            # Details are the program's words, and may hold what it was given.
            return f"{kind} on a hidden test." if case.is_hidden else f"{problem}\nLast Input:\n{given}"
        answer = result.output.decode(errors="replace")
        if fn_name is None:
            is_right = verdict.same_text(answer, case.expected, tolerance=self._tolerance)
        else:
            try:
                value = verdict.parse(result.output)
            except verdict.NoValue:
                is_right, answer = False, "nothing that can be read as a value of JSON"
                if not result.output:
                    answer = "nothing: the program ended before the function returned"
            else:
                is_right = verdict.same_value(value, case.expected, tolerance=self._tolerance)
        if is_right:
            return None
        if case.is_hidden:
            return "Wrong Answer on a hidden test."
        expected = case.expected if fn_name is None else json.dumps(case.expected)
        shown = [cut(text.rstrip("\n"), part) for text in (answer, expected)]
        return f"Wrong Answer\nInput:\n{given}\nYour Output:\n{shown[0]}\nExpected:\n{shown[1]}"


code_reward = CodeReward()
"""With every setting at its default."""


# --- reading ---------------------------------------------------------------------------------------------------------


def extract_code(text: str) -> tuple[str, bool]:
    """Code of the last block marked as Python, else of the last block without a mark, else the text; and whether it
    was in a block. A block that is not closed goes to the end."""
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            blocks.append((opened[2].lower(), text[opened.end() : fence.start()]))
            opened = None
    if opened is not None:
        blocks.append((opened[2].lower(), text[opened.end() :]))
    for languages in (_LANGUAGES, ("",)):
        found = [code for language, code in blocks if language in languages]
        if found:
            return found[-1].removeprefix("\n"), True
    return text, False


def read_tests(tests: Any, where: str) -> Cases:
    """The tests of one row.

    Raises:
        ValueError: they are not of the form that `CodeReward` describes.
    """
    try:
        found = json.loads(tests) if isinstance(tests, str) else tests
    except ValueError as error:
        raise ValueError(f"{where}: no JSON ({error})") from error
    kind = found.get("type") if isinstance(found, Mapping) else None
    if kind not in ("functional", "stdin") or not isinstance(found.get("tests"), Sequence):
        raise ValueError(f"{where}: needs 'type' (\"functional\" or \"stdin\") and a list 'tests'")
    fn_name = found.get("fn_name") if kind == "functional" else None
    if kind == "functional" and not (isinstance(fn_name, str) and fn_name):
        raise ValueError(f"{where}: functional tests need the name of the function, 'fn_name'")
    needed: type = list if fn_name else str
    cases = []
    for i, test in enumerate(found["tests"]):
        is_whole = isinstance(test, Mapping) and isinstance(test.get("input"), needed) and "output" in test
        if not is_whole or (not fn_name and not isinstance(test["output"], str)):
            raise ValueError(f"{where}, test {i}: needs 'input' (a {needed.__name__}) and 'output'")
        # Through JSON, as answers go: tuples are lists and keys are text.
        expected = json.loads(json.dumps(test["output"]))
        cases.append(Case(test["input"], expected, bool(test.get("hidden"))))
    return Cases(fn_name, tuple(cases))


# --- feedback --------------------------------------------------------------------------------------------------------


def _ending(result: Run, part: int) -> str | None:
    """How a run ended, where it did not end well."""
    if result.ended == "time":
        return f"Time Limit Exceeded: stopped after {result.seconds:.1f} s"
    if result.ended == "output":
        return f"Output Limit Exceeded: more than {len(result.output)} characters"
    last = _last_line(result)
    if last.startswith("MemoryError") and result.exit_code != 0:
        return "Memory Limit Exceeded"
    if result.ended == "signal":
        names = {int(s): s.name for s in signal.Signals}
        number = -result.exit_code
        if number == signal.SIGKILL:
            return "Memory Limit Exceeded: stopped by the system"
        hint = " (too deep a recursion, or too much memory)" if number in (signal.SIGSEGV, signal.SIGBUS) else ""
        return f"Runtime Error: stopped by {names.get(number, f'signal {number}')}{hint}"
    if result.exit_code == 0:
        return None
    if not last:
        return f"Runtime Error: the program ended with exit code {result.exit_code}"
    lines = result.errors.rstrip().splitlines()[-_TRACEBACK_LINES:]
    if _is_syntax_error(result):
        start = max((i for i, line in enumerate(lines) if _LINE.search(line)), default=0)
        return "Syntax Error\n" + cut("\n".join(lines[start:]), part)
    return "Runtime Error\n" + cut("\n".join(lines), part)


def _last_line(result: Run) -> str:
    lines = result.errors.rstrip().splitlines()
    return lines[-1] if lines else ""


def _is_syntax_error(result: Run) -> bool:
    return result.exit_code == 1 and _last_line(result).split(":")[0] in _SYNTAX_ERRORS


def _shown(given: Any, fn_name: str | None, budget: int) -> str:
    """The input as it is read: an argument a line, or the text."""
    text = given.rstrip("\n") if fn_name is None else "\n".join(json.dumps(argument) for argument in given)
    return cut(text, budget)
