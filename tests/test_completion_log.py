"""Every completion is logged once, with the step that trains on it first, and with what that step computed of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet as pq
import pytest
import torch
from conftest import TrainerFactory, make_tokenizer
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback

from sdpo import Score, SDPOConfig, SDPOTrainer, completion_log
from sdpo.completion_log import CompletionRecord, TokenValues
from sdpo.token_texts import MAX_WAIT, TokenTexts

LOGGED: dict[str, Any] = {"log_completions": True, "num_completions_to_print": 0}
RECORD = CompletionRecord(
    block=0, group=0, row=0, prompt="p", completion="c", token_ids=[7], token_texts=["c"], reward=1.0, advantage=0.5,
    is_success=True, feedback=None, teacher_prompt="p", demonstration=None, demonstration_source=None,
    demonstration_text=None, shown_feedback=None, is_distilled=False, is_in_policy=True, is_prompt_truncated=False,
    is_context_shortened=False, is_completion_truncated=False, rewards={"exact": 1.0},
)  # fmt: skip


def folder_of(trainer: SDPOTrainer) -> Path:
    return Path(trainer.args.output_dir) / "completions"


def rows_of(trainer: SDPOTrainer) -> dict[int, list[dict[str, Any]]]:
    """Logged rows by step."""
    return {
        step: pq.read_table(path).to_pylist() for step, path in completion_log.files_in(folder_of(trainer)).items()
    }


# --- what a row holds ----------------------------------------------------------------------------------------------


def test_a_row_holds_the_attempt_what_its_teacher_was_shown_and_what_both_said(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(
        rewards=(Score(1.0), Score(0.0, "w30 w31"), Score(0.0), Score(None)),
        include_environment_feedback=True,
        **LOGGED,
    )
    trainer.train()
    [rows] = rows_of(trainer).values()
    assert [row["row"] for row in rows] == [0, 1, 2, 3] and {row["step"] for row in rows} == {1}
    success, told, shown, unknown = rows
    assert success["completion"] == "w1 w2 w3" and success["is_success"] and not success["is_distilled"]
    assert success["credit"] is None and success["student_logp"] is None  # its teacher knows nothing more
    assert success["teacher_prompt"] == success["prompt"] == "w10 w11 w12"
    assert (told["feedback"], told["shown_feedback"], told["demonstration"]) == ("w30 w31", "w30 w31", 0)
    assert (success["demonstration_source"], told["demonstration_source"]) == (None, "sibling")
    assert (shown["feedback"], shown["demonstration_text"], shown["is_distilled"]) == (None, "w1 w2 w3", True)
    assert "w1 w2 w3" in shown["teacher_prompt"] and "w30" not in shown["teacher_prompt"]
    assert (told["reward"], told["rewards/scripted_reward"], unknown["reward"]) == (0.0, 0.0, None)
    for row in (told, shown, unknown):
        size = len(row["token_ids"])
        assert "".join(row["token_texts"]) == row["completion"] + " <eos>" and size == len(row["token_texts"])
        for name in ("student_logp", "entropy", "credit", "divergence", "student_top", "teacher_top_prob"):
            assert len(row[name]) == size
        assert max(row["student_logp"]) < 0


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"distillation_mode": "full_logits", "distillation_alpha": 0.5},
        {"distillation_mode": "topk_logits", "distillation_topk": 3},
        {"distillation_mode": "topk_logits", "distillation_topk": 3, "distillation_add_tail": True},
    ],
)
def test_credit_and_alternatives_are_those_of_the_whole_distributions_in_every_mode(
    make_trainer: TrainerFactory, mode: dict[str, Any]
) -> None:
    trainer = make_trainer(temperature=0.7, learning_rate=0.0, **mode, **LOGGED)
    trainer.train()
    row = rows_of(trainer)[1][1]  # the second completion, taught by the first
    completion = torch.tensor(row["token_ids"])
    logps = []
    for prompt in (row["prompt"], row["teacher_prompt"]):
        ids = torch.tensor(trainer.processing_class(prompt, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logits = trainer.model(torch.cat([ids, completion])[None]).logits[0, len(ids) - 1 : -1]
        logps.append((logits / 0.7).log_softmax(-1))
    at = [found.gather(-1, completion[:, None])[:, 0] for found in logps]
    assert torch.allclose(torch.tensor(row["student_logp"]), at[0], atol=1e-5)
    assert torch.allclose(torch.tensor(row["credit"]), at[1] - at[0], atol=1e-5)
    assert (at[1] - at[0]).abs().max() > 0.01
    for who, found in zip(("student", "teacher"), logps, strict=True):
        probs, ids = found.exp().topk(5)
        assert torch.allclose(torch.tensor(row[f"{who}_top_prob"]), probs, atol=1e-5)
        assert row[f"{who}_top"] == [[trainer.processing_class.decode([i]) for i in of_token] for of_token in ids]


def test_at_weight_0_rows_have_the_students_values_and_no_teachers(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(distillation_weight=0.0, **LOGGED)
    trainer.train()
    for row in rows_of(trainer)[1]:
        assert row["is_in_policy"] and row["student_logp"] is not None
        assert row["credit"] is None and row["divergence"] is None and row["teacher_top"] is None


def test_truncations_are_said(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(truncated=True, prompts=["w1 w2 w3 w4"], max_prompt_length=3, max_reprompt_len=12, **LOGGED)
    trainer.train()
    rows = rows_of(trainer)[1]
    assert all(row["is_completion_truncated"] and row["is_prompt_truncated"] for row in rows)
    assert [row["is_context_shortened"] for row in rows] == [False, True, True, True]  # the first has no context
    assert all(row["prompt"] == "w2 w3 w4" for row in rows)  # what the model read


# --- once, and when --------------------------------------------------------------------------------------------------


def test_a_completion_is_logged_once_with_the_step_that_trains_on_it_first(make_trainer: TrainerFactory) -> None:
    # A block of 8 rows is cut into 2 microbatches and used twice: steps 1, 2 are first uses, 3, 4 are not.
    trainer = make_trainer(prompts=["w10", "w11"], steps_per_generation=2, num_iterations=2, max_steps=6, **LOGGED)
    trainer.train()
    rows = rows_of(trainer)
    assert {step: [(row["block"], row["row"]) for row in found] for step, found in rows.items()} == {
        1: [(0, 0), (0, 1), (0, 2), (0, 3)],
        2: [(0, 4), (0, 5), (0, 6), (0, 7)],
        5: [(1, 0), (1, 1), (1, 2), (1, 3)],
        6: [(1, 4), (1, 5), (1, 6), (1, 7)],
    }


def test_a_step_that_uses_blocks_twice_logs_each_row_once_and_its_first_values(make_trainer: TrainerFactory) -> None:
    # One step of four microbatches: block 0, block 0 again, block 1, block 1 again.
    trainer = make_trainer(
        prompts=["w10", "w11"], steps_per_generation=1, num_iterations=2, gradient_accumulation_steps=4, **LOGGED
    )
    trainer.train()
    assert [(row["block"], row["row"]) for row in rows_of(trainer)[1]] == [(b, r) for b in (0, 1) for r in range(4)]


def test_evaluation_is_not_logged(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(**LOGGED)
    trainer.evaluate(trainer.train_dataset)
    assert not folder_of(trainer).exists()
    trainer.train()
    trainer.evaluate(trainer.train_dataset)
    assert [len(rows) for rows in rows_of(trainer).values()] == [4]


def test_a_resumed_run_logs_what_the_straight_one_does(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "prompts": ["w10", "w11", "w12", "w13"],
        "script": None,  # sampled, so that the numbers depend on the random state
        "steps_per_generation": 2,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        **LOGGED,
    }
    straight = make_trainer(output_dir=str(tmp_path / "straight"), **settings)
    straight.train()
    first = make_trainer(output_dir=str(tmp_path / "resumed"), **settings)
    first.train()
    before = rows_of(first)
    again = make_trainer(output_dir=str(tmp_path / "resumed"), **settings)
    # Step 1 ends in the middle of a block: the rows of its second microbatch wait in the checkpoint.
    again.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-1"))
    assert rows_of(again) == before == rows_of(straight)
    steps = [entry["step"] for entry in completion_log.read_metrics(folder_of(again))]
    assert steps == sorted(steps) and set(steps) == {1, 2, 3, 4}


def test_nothing_is_written_and_nothing_computed_when_it_is_off(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer()
    assert trainer.completions is None
    trainer.train()
    assert not folder_of(trainer).exists()


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_new_run_sets_the_log_of_an_earlier_one_aside(make_trainer: TrainerFactory) -> None:
    for _ in range(3):
        trainer = make_trainer(max_steps=2, prompts=["w10", "w11"], **LOGGED)
        trainer.train()
    names = sorted(
        path.name for path in Path(trainer.args.output_dir).iterdir() if path.name.startswith("completions")
    )
    assert names == ["completions", "completions-1", "completions-2"]
    assert {entry["step"] for entry in completion_log.read_metrics(folder_of(trainer))} == {1, 2}


def test_going_on_removes_what_is_about_to_be_written_again(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        completion_log.write_completions(tmp_path, step, [RECORD])
        completion_log.append_metrics(tmp_path, {"step": step, "loss": 0.5})
    (tmp_path / ".unfinished-completions_00000004.parquet").write_text("half a file")
    with open(tmp_path / "_metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # a run that was killed
    completion_log.begin(tmp_path, step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "_metrics.jsonl",
        "completions_00000001.parquet",
        "completions_00000002.parquet",
    ]
    assert [entry["step"] for entry in completion_log.read_metrics(tmp_path)] == [1, 2]


def test_a_file_has_its_name_only_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(table: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"PAR1")
        raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", killed)
    with pytest.raises(KeyboardInterrupt):
        completion_log.write_completions(tmp_path, 1, [RECORD])
    assert completion_log.files_in(tmp_path) == {}
    assert [path.name for path in tmp_path.iterdir()] == [".unfinished-completions_00000001.parquet"]


def test_the_folder_is_one_table_to_a_reader_of_parquet(tmp_path: Path) -> None:
    for step in (1, 2):
        completion_log.write_completions(tmp_path, step, [RECORD, RECORD])
        completion_log.append_metrics(tmp_path, {"step": step})
    (tmp_path / ".unfinished-completions_00000003.parquet").write_text("half a file")
    assert pandas.read_parquet(tmp_path)["step"].tolist() == [1, 1, 2, 2]


def test_hostile_text_and_numbers_that_are_none_are_written_as_they_are(tmp_path: Path) -> None:
    text = 'a\x00\x1b[31m</script>\u202e\U0001f9ee"\n'
    values = TokenValues(student_logp=[-math.inf], credit=[math.nan], student_top=[[text]], student_top_prob=[[1.0]])
    record = replace(RECORD, completion=text, reward=None, rewards={"exact": None}, values=values)
    [row] = pq.read_table(completion_log.write_completions(tmp_path, 3, [record])).to_pylist()
    assert (row["completion"], row["student_top"], row["reward"], row["rewards/exact"]) == (text, [[text]], None, None)
    assert row["student_logp"] == [-math.inf] and math.isnan(row["credit"][0])
    assert completion_log.writable("\ud83c half") == "? half"  # UTF-8 has no half of a pair


# --- token texts -----------------------------------------------------------------------------------------------------


def test_token_texts_joined_are_the_text_also_where_a_character_is_several_tokens() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    texts = TokenTexts(fast)
    for text in ("plain words", "na\u00efve \U0001f9ee = 42", "\u4f60\u597d", "\U0001f468\u200d\U0001f469"):
        ids = fast(text)["input_ids"]
        found = texts.of(ids)
        assert len(found) == len(ids) and "".join(found) == text
    assert texts.of(fast("\U0001f9ee")["input_ids"]) == ["", "", "", "\U0001f9ee"]  # four bytes
    cut = fast("a\U0001f9ee")["input_ids"][:-1]
    assert texts.of(cut)[0] == "a" and "".join(texts.of(cut)).startswith("a\ufffd")  # a completion cut in a character


def test_token_texts_keep_the_blanks_of_a_decoder_that_drops_the_first() -> None:
    assert TokenTexts(make_tokenizer()).of([8, 9, 1]) == ["w0", " w1", " <eos>"]


# --- tables and trackers ---------------------------------------------------------------------------------------------


def printed(records: list[CompletionRecord]) -> str:
    console = Console(width=200, record=True, file=StringIO())
    console.print(completion_log.completions_table(3, records))
    return console.export_text()


def test_the_table_shows_prompt_completion_rewards_teacher_prompt_and_mask_as_text() -> None:
    record = replace(
        RECORD, completion="[red]4[/red]\x1b[2J", teacher_prompt="p and more", is_distilled=True, feedback="no",
        values=TokenValues(credit=[0.5, -1.5]),
    )  # fmt: skip
    text = printed([record, RECORD])
    for part in ("step 3", "exact", "[red]4[/red]", "p and more", "as the student's", "yes", "no"):
        assert part in text
    assert "\x1b" not in text and "\u241b" in text
    assert " 1 " in text  # mean of 0.5 and 1.5


def test_the_table_has_as_many_rows_as_asked_for_spread_over_the_step() -> None:
    records = [replace(RECORD, row=i, group=i // 4) for i in range(12)]
    assert [r.row for r in completion_log.chosen(records, number=3, unique_prompts=False)] == [0, 4, 8]
    assert [r.row for r in completion_log.chosen(records, number=None, unique_prompts=True)] == [0, 4, 8]
    assert [r.row for r in completion_log.chosen(records, number=2, unique_prompts=True)] == [0, 4]
    assert completion_log.chosen(records, number=None, unique_prompts=False) == records


def test_the_terminal_gets_a_table_a_step(make_trainer: TrainerFactory, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(max_steps=2, prompts=["w10", "w11"], log_completions=True, num_completions_to_print=2).train()
    out = capsys.readouterr().out
    assert out.count("Completions of step 1") == out.count("Completions of step 2") == 1
    make_trainer(**LOGGED).train()
    assert "Completions of" not in capsys.readouterr().out


def test_markdown_of_a_tracker_takes_nothing_from_the_text() -> None:
    row = completion_log.summary_of(2, replace(RECORD, completion="<b>|`x`\n*y*"))
    text = completion_log.markdown_table([row])
    assert len(text.split("\n")) == 3 and "<b>" not in text and "&#60;b&#62;&#124;&#96;x&#96;<br>&#42;y&#42;" in text


def test_tensorboard_gets_the_table(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = make_trainer(report_to="tensorboard", **LOGGED)
    trainer.train()
    [folder] = {path.parent for path in Path(trainer.args.output_dir).rglob("events.out.tfevents.*")}
    events = accumulator.EventAccumulator(str(folder)).Reload()
    [event] = events.Tensors("completions/text_summary")
    assert event.step == 1 and b"w4 w5" in event.tensor_proto.string_val[0]


@pytest.mark.slow
def test_wandb_gets_the_table(make_trainer: TrainerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    make_trainer(report_to="wandb", **LOGGED).train()
    wandb.finish()
    [path] = tmp_path.rglob("media/table/completions*.json")
    table = json.loads(path.read_text())
    assert {"prompt", "completion", "teacher_prompt", "is_distilled"} <= set(table["columns"])
    assert len(table["data"]) == 4


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [{"num_completions_to_print": 3}, {"log_unique_prompts": True}])
def test_settings_of_the_table_need_the_log(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot take effect with log_completions=False"):
        SDPOConfig(**setting)
    SDPOConfig(log_completions=True, **setting)


class Order(TrainerCallback):
    """Whether the file of a step is there when its checkpoint is."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(completion_log.file_of(Path(args.output_dir) / "completions", state.global_step).exists())


def test_a_checkpoint_never_comes_before_the_completions_of_its_step(make_trainer: TrainerFactory) -> None:
    order = Order()
    make_trainer(
        max_steps=2, prompts=["w10", "w11"], save_strategy="steps", save_steps=1,
        trainer_kwargs={"callbacks": [order]}, **LOGGED,
    ).train()  # fmt: skip
    assert order.found == [True, True]


def test_bytes_that_are_no_text_are_decoded_a_few_at_a_time() -> None:
    """Noise without end, as a collapsed model writes it, costs time in proportion to its length, not to the square."""
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    noise = [alphabet["\u0122"]] * 300  # byte 0x80 continues a character that never began
    sizes: list[int] = []
    decode = texts.decode

    def counted(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return decode(ids)

    texts.decode = counted  # type: ignore[method-assign]
    assert "".join(texts._in_context(noise)) == "\ufffd" * 300 and max(sizes) <= 2 * (MAX_WAIT + 1)
