"""The page: blobs of compressed JSON, each read when it is needed, with script and style in one file.

Everything that comes from the run is inside a blob, in base64, or escaped; the script puts it into the page as text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from string import Template
from typing import Any

import numpy as np
import pyarrow as pa

from sdpo import __version__
from sdpo.report.run import Run, curves

SCRIPTS = ("text.js", "blobs.js", "charts.js", "tokens.js", "detail.js", "list.js", "main.js")
ROWS_OF_INDEX, ROWS_OF_DETAIL = 500, 25  # attempts a blob
STRIP = 32  # cells of the small picture of an attempt's credit
SMALLEST = 0.005  # probability below which an alternative is left out
_LIMIT = 9999  # what stands for infinity, in hundredths

Blob = tuple[str, str]
"""Name and base64."""


def render(run: Run) -> str:
    """The whole page."""
    packed = _Packed(run)
    blobs = list(packed.blobs())
    meta = {
        "name": run.name,
        "version": __version__,
        "curves": packed.credit_curves | curves(run.history),
        "numAttempts": run.num_attempts,
        "numLeftOut": run.num_left_out,
        "steps": [run.steps[0], run.steps[-1]] if run.steps else [],
        "rewardNames": packed.reward_names,
        "rowsOfIndex": ROWS_OF_INDEX,
        "rowsOfDetail": ROWS_OF_DETAIL,
    }
    blobs.append(_blob("meta", meta))
    style, script = _asset("style.css"), "\n".join(["'use strict';", "(() => {", *map(_asset, SCRIPTS), "})();"])
    return Template(_asset("page.html")).substitute(
        title=html.escape(run.name),
        policy=f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:",
        style=style,
        script=script,
        blobs="\n".join(f'<script type="text/plain" id="blob-{name}">{text}</script>' for name, text in blobs),
    )


def _asset(name: str) -> str:
    return resources.files("sdpo.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a content security policy calls this inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _blob(name: str, value: Any) -> Blob:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return name, base64.b64encode(zlib.compress(text.encode(), 6)).decode()


class _Strings:
    """Distinct strings, by number; -1 for None."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int:
        return -1 if text is None else self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        return list(self._numbers)


class _Packed:
    """The attempts of a run in blobs: `index-0` ... for the list, `detail-0` ... with the tokens, and `tokens`."""

    def __init__(self, run: Run):
        self.run = run
        self.reward_names: list[str] = []
        # By name, as the metrics have them, since not every mode of distillation logs them.
        self.credit_curves: dict[str, list[tuple[int, float]]] = {}
        self._tokens = _Strings()

    def blobs(self) -> Iterator[Blob]:
        index = _Gathered("index", ROWS_OF_INDEX, _index_of)
        detail = _Gathered("detail", ROWS_OF_DETAIL, _detail_of)
        for step, table in self.run.tables():
            self._add_credit(step, table)
            names = [name.removeprefix("rewards/") for name in table.column_names if name.startswith("rewards/")]
            self.reward_names += [name for name in names if name not in self.reward_names]
            for row, values in zip(_plain_rows(table), self._values(table), strict=True):
                yield from index.add({**row, **_spread_of(values)})
                yield from detail.add({**row, **values})
        yield from index.finish()
        yield from detail.finish()
        yield _blob("tokens", self._tokens.all())

    def _add_credit(self, step: int, table: pa.Table) -> None:
        """Mean and outer quantiles of the credit of a step's tokens."""
        credit = _numpy(table.column("credit").combine_chunks().flatten())
        credit = credit[np.isfinite(credit)]
        if len(credit):
            low, high = np.quantile(credit, (0.05, 0.95))
            for name, value in (("mean", credit.mean()), ("q05", low), ("q95", high)):
                self.credit_curves.setdefault(f"credit/{name}", []).append((step, float(value)))

    def _values(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Per-token values of each row, as whole numbers."""
        texts = _lists(table, "token_texts")
        numbers = {name: _lists(table, name) for name in ("student_logp", "entropy", "credit", "divergence")}
        number = self._tokens.number
        tops = {who: list(_alternatives(table, who, number)) for who in ("student", "teacher")}
        for i in range(table.num_rows):
            found: dict[str, Any] = {"tokens": [number(text) for text in texts[i]]}
            found |= {name: _hundredths(column[i]) for name, column in numbers.items()}
            yield found | {who: column[i] for who, column in tops.items()}


class _Gathered:
    """Rows that become a blob when there are enough of them."""

    def __init__(self, name: str, size: int, pack: Callable[[Sequence[dict[str, Any]]], dict[str, Any]]):
        self._name, self._size, self._pack = name, size, pack
        self._rows: list[dict[str, Any]] = []
        self._count = 0

    def add(self, row: dict[str, Any]) -> Iterator[Blob]:
        self._rows.append(row)
        if len(self._rows) == self._size:
            yield from self.finish()

    def finish(self) -> Iterator[Blob]:
        if self._rows:
            yield _blob(f"{self._name}-{self._count}", self._pack(self._rows))
            self._rows, self._count = [], self._count + 1


def _lists(table: pa.Table, name: str) -> list[Any]:
    """A column of lists, None where a row has none."""
    found: list[Any] = table.column(name).to_pylist()
    return found


def _plain_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """What is no list, row by row."""
    plain = [name for name in table.column_names if not pa.types.is_list(table.schema.field(name).type)]
    rows: list[dict[str, Any]] = table.select(plain).to_pylist()
    yield from rows


def _hundredths(values: Sequence[float] | None) -> list[int] | None:
    """Values in hundredths, what is not a number as 0 and infinity at the limit; None for none."""
    if values is None:
        return None
    scaled = np.nan_to_num(np.asarray(values, np.float64) * 100, nan=0.0, posinf=_LIMIT, neginf=-_LIMIT)
    rounded: list[int] = np.rint(np.clip(scaled, -_LIMIT, _LIMIT)).astype(int).tolist()
    return rounded


def _alternatives(table: pa.Table, who: str, number: Callable[[str | None], int]) -> Iterator[dict[str, Any] | None]:
    """Likeliest tokens of each row's tokens, None where a row has none.

    They are flat: how many each token has, their texts by number, and their probabilities in thousandths.
    """
    rows = table.column(f"{who}_top").combine_chunks()
    tokens = rows.flatten()
    encoded = tokens.flatten().dictionary_encode()
    texts = np.array([number(text) for text in encoded.dictionary.to_pylist()], dtype=np.int64)[
        _numpy(encoded.indices)
    ]
    shares = _numpy(table.column(f"{who}_top_prob").combine_chunks().flatten().flatten())
    token_of = np.repeat(np.arange(len(tokens)), _numpy(tokens.value_lengths()))
    is_kept = shares >= SMALLEST
    counts = np.bincount(token_of[is_kept], minlength=len(tokens))
    texts, shares = texts[is_kept], np.rint(1000 * shares[is_kept]).astype(np.int64)
    ends, first = np.concatenate([[0], np.cumsum(counts)]), 0
    for size in rows.value_lengths().to_pylist():
        if size is None:
            yield None
            continue
        inside = slice(ends[first], ends[first + size])
        yield {
            "n": counts[first : first + size].tolist(),
            "t": texts[inside].tolist(),
            "p": shares[inside].tolist(),
        }
        first += size


def _numpy(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=False)


def _spread_of(values: dict[str, Any]) -> dict[str, Any]:
    """Of an attempt's credit: mean and largest size in hundredths of a nat, and the small picture."""
    credit = values["credit"]
    if not credit:
        return {"num_tokens": len(values["tokens"]), "mean_credit": None, "max_credit": None, "strip": ""}
    sizes = np.abs(np.asarray(credit))
    cells = [
        credit[part[np.argmax(sizes[part])]] for part in np.array_split(np.arange(len(credit)), STRIP) if len(part)
    ]
    return {
        "num_tokens": len(values["tokens"]),
        "mean_credit": round(float(sizes.mean()), 2),
        "max_credit": int(sizes.max()),
        # A letter a cell: m for 0, then a step for each third of a nat.
        "strip": "".join(chr(ord("m") + max(-12, min(12, round(cell / 33)))) for cell in cells),
    }


_FLAGS = (
    "is_success",
    "is_distilled",
    "is_in_policy",
    "is_prompt_truncated",
    "is_context_shortened",
    "is_completion_truncated",
)


def _index_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns that the list shows and searches."""
    strings = _Strings()
    plain = ("step", "block", "group", "row", "num_tokens", "mean_credit", "max_credit", "strip", "demonstration")
    return {
        **{name: [row[name] for row in rows] for name in plain},
        "reward": [_rounded(row["reward"]) for row in rows],
        "flags": [sum(1 << i for i, name in enumerate(_FLAGS) if row[name]) for row in rows],
        "completion": [row["completion"] for row in rows],
        "prompt": [strings.number(row["prompt"]) for row in rows],
        "feedback": [strings.number(row["feedback"]) for row in rows],
        "strings": strings.all(),
    }


def _detail_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is shown of one attempt."""
    strings = _Strings()
    texts = ("prompt", "teacher_prompt", "feedback", "shown_feedback", "demonstration_text")
    values = ("tokens", "student_logp", "entropy", "credit", "divergence", "student", "teacher")
    packed = [
        {
            **{name: strings.number(row[name]) for name in texts},
            **{name: row[name] for name in values},
            "advantage": _rounded(row["advantage"]),
            "source": row["demonstration_source"],
            "rewards": {
                name.removeprefix("rewards/"): _rounded(value)
                for name, value in row.items()
                if name.startswith("rewards/")
            },
        }
        for row in rows
    ]
    return {"rows": packed, "strings": strings.all()}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(value, 4)
