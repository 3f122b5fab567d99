"""What the log keeps of a completion, and its forms: a parquet file a step, a table, lines of metrics.

Files of `output_dir/completions/`: `completions_00000012.parquet`, the completions that step 12 trained on first, a
row each; `_metrics.jsonl`, what was logged, a line an entry. A file has its name only when complete.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table
from rich.text import Text

# Readers that take a folder of parquet files as one table pass over names that begin with "_" or ".".
FOLDER, METRICS = "completions", "_metrics.jsonl"
UNFINISHED = ".unfinished-"  # how the name of a file begins that is being written
REWARD = "rewards/"  # a column a reward function, under this and its name
MAX_CELL = 600  # characters of a cell of the table
_FILE = re.compile(r"completions_(\d+)\.parquet")
_CUT = " [...] "

_NUMBERS = pa.list_(pa.float32())
_TYPES: Mapping[str, pa.DataType] = {
    "int": pa.int32(),
    "int | None": pa.int32(),
    "float": pa.float64(),
    "float | None": pa.float64(),
    "bool": pa.bool_(),
    "str": pa.string(),
    "str | None": pa.string(),
    "list[int]": pa.list_(pa.int32()),
    "list[str]": pa.list_(pa.string()),
    "list[float] | None": _NUMBERS,
    "list[list[str]] | None": pa.list_(pa.list_(pa.string())),
    "list[list[float]] | None": pa.list_(_NUMBERS),
}


@dataclass(frozen=True, slots=True)
class TokenValues:
    """What student and teacher said of one completion's tokens, an entry a token; None where it was not computed.

    student_logp: log-prob of the token under the student. entropy: of the student. credit: log teacher - log student.
    divergence: as it is trained. All in nats, of logits / temperature. student_top, teacher_top: the likeliest tokens
    of each, likeliest first, and student_top_prob, teacher_top_prob: their probabilities.
    """

    student_logp: list[float] | None = None
    entropy: list[float] | None = None
    credit: list[float] | None = None
    divergence: list[float] | None = None
    student_top: list[list[str]] | None = None
    student_top_prob: list[list[float]] | None = None
    teacher_top: list[list[str]] | None = None
    teacher_top_prob: list[list[float]] | None = None


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """One completion, as plain values.

    block numbers the generations of the run; group and row number the prompts and the completions of a block, over all
    processes. prompt and teacher_prompt: what student and teacher read, special tokens included; the teacher's is the
    student's where it has no context. token_texts joined are the completion with its special tokens. rewards: by
    function, None where one gave none. demonstration_source: whose solution the teacher was shown, a "sibling"'s, an
    "earlier" success or that of a "column" of the dataset; demonstration: the sibling's row; demonstration_text,
    shown_feedback: the texts as they were shown, perhaps shortened; all None for none. is_distilled, is_in_policy:
    which loss terms train on it.
    """

    block: int
    group: int
    row: int
    prompt: str
    completion: str
    token_ids: list[int]
    token_texts: list[str]
    reward: float | None
    advantage: float
    is_success: bool
    feedback: str | None
    teacher_prompt: str
    demonstration: int | None
    demonstration_source: str | None
    demonstration_text: str | None
    shown_feedback: str | None
    is_distilled: bool
    is_in_policy: bool
    is_prompt_truncated: bool
    is_context_shortened: bool
    is_completion_truncated: bool
    rewards: dict[str, float | None] = field(default_factory=dict)
    values: TokenValues = TokenValues()


_PLAIN = [f for f in fields(CompletionRecord) if f.name not in ("rewards", "values")]
_OF_TOKENS = fields(TokenValues)


def writable(text: str) -> str:
    """The text without what UTF-8 cannot hold: half of a surrogate pair, which feedback from outside may have."""
    return text.encode("utf-8", "replace").decode("utf-8")


# --- files -----------------------------------------------------------------------------------------------------------


def file_of(folder: Path, step: int) -> Path:
    """The file of a step."""
    return folder / f"completions_{step:08d}.parquet"


def files_in(folder: Path) -> dict[int, Path]:
    """Complete files by step, in order."""
    found = {int(match[1]): path for path in folder.glob("*.parquet") if (match := _FILE.fullmatch(path.name))}
    return dict(sorted(found.items()))


def as_arrow(step: int, records: Sequence[CompletionRecord]) -> pa.Table:
    """A column a field, `step` first, rewards as `rewards/<name>`, per-token values as lists."""
    names = list(dict.fromkeys(name for record in records for name in record.rewards))
    columns: dict[str, pa.Array] = {"step": pa.array([step] * len(records), pa.int32())}
    for f in _PLAIN:
        columns[f.name] = pa.array([getattr(record, f.name) for record in records], _TYPES[str(f.type)])
    for name in names:
        columns[REWARD + name] = pa.array([record.rewards.get(name) for record in records], pa.float64())
    for f in _OF_TOKENS:
        columns[f.name] = pa.array([getattr(record.values, f.name) for record in records], _TYPES[str(f.type)])
    return pa.table(columns)


def write_completions(folder: Path, step: int, records: Sequence[CompletionRecord]) -> Path:
    """Writes the file of a step."""
    path = file_of(folder, step)
    unfinished = path.with_name(UNFINISHED + path.name)
    pq.write_table(as_arrow(step, records), unfinished, compression="zstd")
    os.replace(unfinished, path)
    return path


def append_metrics(folder: Path, entry: Mapping[str, Any]) -> None:
    """Adds a line to the metrics."""
    with open(folder / METRICS, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry, default=str) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Entries of the log. A last line that a killed run left unfinished is no entry."""
    path = folder / METRICS
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def begin(folder: Path, *, step: int) -> None:
    """Makes the folder ready for a run that goes on after `step`, 0 for one that starts.

    What an earlier run left there is set aside in a folder `completions-1` or so; of the run that goes on, what it is
    about to write again goes.
    """
    if step == 0 and folder.exists() and any(folder.iterdir()):
        numbers = (number for number in range(1, 10**6))
        aside = next(path for n in numbers if not (path := folder.with_name(f"{folder.name}-{n}")).exists())
        folder.rename(aside)
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob(f"{UNFINISHED}*"), *(p for s, p in files_in(folder).items() if s > step)]:
        path.unlink()
    kept = [entry for entry in read_metrics(folder) if entry.get("step", 0) <= step]
    if (folder / METRICS).exists():
        unfinished = folder / (UNFINISHED + METRICS)
        unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
        os.replace(unfinished, folder / METRICS)


# --- tables ----------------------------------------------------------------------------------------------------------


def chosen(records: Sequence[CompletionRecord], *, number: int | None, unique_prompts: bool) -> list[CompletionRecord]:
    """`number` completions, evenly spread, None for all; with `unique_prompts` of the first one of each prompt."""
    if unique_prompts:
        records = list({(record.block, record.group): record for record in reversed(records)}.values())[::-1]
    if number is None or number >= len(records):
        return list(records)
    return [records[i * len(records) // number] for i in range(number)]


def summary_of(step: int, record: CompletionRecord) -> dict[str, Any]:
    """A completion without its tokens, by column of the trackers' tables."""
    return {
        "step": step,
        "prompt": record.prompt,
        "completion": record.completion,
        **{REWARD + name: value for name, value in record.rewards.items()},
        "reward": record.reward,
        "advantage": record.advantage,
        "feedback": record.feedback,
        "teacher_prompt": record.teacher_prompt,
        "demonstration": record.demonstration,
        "is_distilled": record.is_distilled,
        "is_truncated": record.is_completion_truncated,
        "mean_abs_credit": mean_abs(record.values.credit),
    }


def mean_abs(values: Sequence[float] | None) -> float | None:
    """Mean of the sizes in nats, None of none."""
    return sum(map(abs, values)) / len(values) if values else None


def completions_table(step: int, records: Sequence[CompletionRecord]) -> Table:
    """The completions for a terminal, a row each; long texts lose their middle."""
    names = list(dict.fromkeys(name for record in records for name in record.rewards))
    table = Table(title=f"Completions of step {step}", show_lines=True, expand=True)
    for header in ("Prompt", "Completion"):
        table.add_column(header, ratio=2, overflow="fold")
    for header in (*names, "Reward", "Advantage"):
        table.add_column(header, justify="right", overflow="fold")
    table.add_column("Teacher prompt", ratio=3, overflow="fold")
    table.add_column("Distilled", overflow="fold")
    table.add_column("|credit|", justify="right", overflow="fold")
    for record in records:
        table.add_row(
            _cell(record.prompt),
            _cell(record.completion, style="green" if record.is_success else ""),
            *(_number(record.rewards.get(name)) for name in names),
            _number(record.reward),
            _number(record.advantage),
            _cell(record.teacher_prompt)
            if record.teacher_prompt != record.prompt
            else Text("as the student's", "dim"),
            Text("yes" if record.is_distilled else "no"),
            _number(mean_abs(record.values.credit)),
        )
    return table


def markdown_table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """The same for a tracker that shows Markdown."""
    headers = list(dict.fromkeys(name for summary in summaries for name in summary))
    lines = [headers, ["---"] * len(headers), *([_markdown(s.get(name)) for name in headers] for s in summaries)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _markdown(value: Any) -> str:
    """A cell: what Markdown or HTML would take as its own is escaped, and a line ends as text."""
    text = _shorten("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))
    return "".join(_escaped(text))


def _escaped(text: str) -> Iterator[str]:
    for character in text:
        if character == "\n":
            yield "<br>"
        elif character in "|&<>*_`[]\\#~$":
            yield f"&#{ord(character)};"
        else:
            yield character


def _number(value: float | None) -> Text:
    return Text("-" if value is None else f"{value:.3g}")


def _cell(text: str, style: str = "") -> Text:
    """Text as it is, never as markup; what would steer the terminal is shown as a symbol."""
    symbols = {code: 0x2400 + code for code in range(32) if code != 10} | {127: 0x2421}
    symbols |= {code: 0x2426 for code in range(0x80, 0xA0)}
    return Text(_shorten(text).translate(symbols), style)


def _shorten(text: str) -> str:
    """At most MAX_CELL characters of a text, from both its ends."""
    if len(text) <= MAX_CELL:
        return text
    half = (MAX_CELL - len(_CUT)) // 2
    return text[:half] + _CUT + text[len(text) - half :]
