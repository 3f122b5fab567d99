"""Two real processes: the same update as one process, no deadlock, and FSDP2.

All runs of both ranks are one launch, which takes most of the time; the tests read what it left.
"""

from __future__ import annotations

import fcntl
import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BLEND, FSDP2_VARIANTS, LORA, ROWS, SAME_UPDATE, build, trained
from launch import HERE, run_suite, torchrun
from safetensors.torch import load_file
from suites import CHECKPOINTS, KINDS, REUSED, compared, different_start, evaluated, logged, sampled_before

from sdpo.checkpoint import check_layout

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 1e-6

Results = list[dict[str, Any]]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results by rank and by name of the run; several workers of pytest share one launch."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = shared / "two_ranks"
    with open(shared / "two_ranks.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            run_suite("two ranks", folder, limit_s=540)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """What one process leaves with one microbatch a step."""
    with tempfile.TemporaryDirectory() as folder:
        return trained(SAME_UPDATE[name], Path(folder))


def values(ranks: Results, name: str) -> list[Any]:
    """What the run returned on each rank."""
    assert [rank[name].get("trace") for rank in ranks] == [None, None]
    return [rank[name]["value"] for rank in ranks]


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, tolerance: float = TOLERANCE) -> None:
    """Weights and logs are equal up to the order of summation."""
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert torch.allclose(found["weights"][name], value, rtol=0, atol=tolerance), name
    assert len(found["logs"]) == len(expected["logs"])
    for log, other in zip(found["logs"], expected["logs"], strict=True):
        assert_same_numbers(log, other)


def assert_same_numbers(found: dict[str, float | None], expected: dict[str, float | None]) -> None:
    assert found.keys() == expected.keys()
    pairs = {name: (value, expected[name]) for name, value in found.items() if value != expected[name]}
    assert {n: p for n, p in pairs.items() if None in p or p[0] != pytest.approx(p[1], rel=1e-4, abs=1e-5)} == {}


# --- the same update ---------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatch", [ROWS // 2, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAME_UPDATE)
def test_two_ranks_make_the_update_of_one(ranks: Results, kind: str, name: str, microbatch: int) -> None:
    """Of two steps: weights of student and teacher to 1e-6, and every logged number."""
    for found in values(ranks, f"{kind}: {name}"):
        assert_same(found[microbatch], alone(name))


@pytest.mark.parametrize("name", SAME_UPDATE)
def test_accumulation_makes_the_update_of_one_microbatch(name: str, tmp_path: Path) -> None:
    assert_same(trained(SAME_UPDATE[name], tmp_path, microbatch=2), alone(name))


@pytest.mark.parametrize("name", FSDP2_VARIANTS)
def test_settings_of_fsdp2_do_not_change_the_update(ranks: Results, name: str, tmp_path: Path) -> None:
    expected = trained(SAME_UPDATE[REUSED].having(lora=LORA), tmp_path)
    for found in values(ranks, f"fsdp2 with {name}"):
        found["weights"] = {n.replace("_checkpoint_wrapped_module.", ""): v for n, v in found["weights"].items()}
        assert_same(found, expected)


def test_mixed_precision_is_that_of_one_process(ranks: Results) -> None:
    """FSDP2 rounds whole weights once where autocast rounds each product: equal to a few parts in 2^8."""
    plain, cut = (values(ranks, f"{kind}: bfloat16")[0] for kind in KINDS)
    assert plain["dtypes"] == cut["dtypes"] == ["torch.float32"]
    for log, other in zip(plain["logs"], cut["logs"], strict=True):
        assert log["loss"] == pytest.approx(other["loss"], rel=0.05, abs=0.01)
        assert log["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)


def test_the_cases_move_the_weights() -> None:
    """Without that the comparisons would hold for nothing."""
    for name in SAME_UPDATE:
        is_empty = name in ("nothing but empty completions", "no reward anywhere")
        norms = [log["grad_norm"] for log in alone(name)["logs"]]
        assert all(norm == 0 if is_empty else norm > 1e-2 for norm in norms), name


# --- errors of one rank ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("reward", "no such verifier"),
        ("generation", "the engine is full"),
        ("hook", "the disk is full"),
        ("prompt", "a prompt that no template takes"),
        ("exit", "SystemExit: 0"),
    ],
)
def test_an_error_on_one_rank_ends_all_with_its_text(ranks: Results, kind: str, stage: str, text: str) -> None:
    first, second = (rank[f"{kind}: error in {stage}"] for rank in ranks)
    assert text in first["error"] and "Rank 1 failed" in first["error"]
    assert text in second["error"] and "Rank 1 failed" not in second["error"]
    assert max(first["seconds"], second["seconds"]) < 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_one_rank_that_is_not_finite_ends_all_before_the_step(ranks: Results, kind: str) -> None:
    """With the same error, which has the rows of that rank; resumed, it is the straight run."""
    first, second = values(ranks, f"{kind}: a loss that is not finite")
    assert first["text"] == second["text"] and "The loss of step 2 is not finite" in first["text"]
    assert first["rows"] == second["rows"] == first["file"]["rows"]
    assert {row["rank"] for row in first["rows"]} == {1}
    assert max(first["seconds"], second["seconds"]) < 10
    for found in (first, second):
        assert found["resumed"]["logs"] == found["straight"]["logs"]
        for parameter, value in found["straight"]["weights"].items():
            assert torch.equal(found["resumed"]["weights"][parameter], value), parameter


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_of_one_rank_is_logged(ranks: Results, kind: str) -> None:
    for found in values(ranks, f"{kind}: a metric of one rank"):
        assert [log.get("only_here") for log in found["logs"]] == [3.0, 3.0]


@pytest.mark.parametrize("kind", KINDS)
def test_datasets_that_differ_between_ranks_are_refused(ranks: Results, kind: str) -> None:
    for rank in ranks:
        assert "different datasets: their numbers of rows are [[2], [2]]" in rank[f"{kind}: different data"]["error"]


# --- before training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_drew_different_adapters_train_one_student_and_one_teacher(
    ranks: Results, kind: str, tmp_path: Path
) -> None:
    """Under DDP that of the main process; FSDP2 takes a piece from each rank."""
    first, second = values(ranks, f"{kind}: different start")
    assert_same(first, second, tolerance=0.0)
    if kind == "ddp":
        assert_same(first, different_start("ddp", tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_sample_from_the_policy_before_training(ranks: Results, kind: str, tmp_path: Path) -> None:
    expected = sampled_before("ddp", tmp_path)
    assert len(set(expected)) == 2
    assert values(ranks, f"{kind}: sampling before training") == [expected, expected]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_out_a_comparison_of_teacher_and_student(ranks: Results, kind: str, tmp_path: Path) -> None:
    """Five questions, two of one rank and three of the other; both say what one process does."""
    expected = compared("ddp", tmp_path)
    assert "(5 questions)" in expected and "gain" in expected
    assert values(ranks, f"{kind}: compare_teacher") == [expected, expected]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_one_rank_ends_the_comparison_on_all(ranks: Results, kind: str) -> None:
    first, second = (rank[f"{kind}: error in compare_teacher"] for rank in ranks)
    assert "Rank 1 failed" in first["error"] and "no such verifier" in second["error"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_of_two_ranks_ends_on_both_with_the_success_of_one(ranks: Results, kind: str) -> None:
    """Blocks of 8: the first is trained on, and the fifth attempt of the second, 13 in all, is the last rank's."""
    first, second = values(ranks, f"{kind}: discover")
    assert first == second and len(first) == 2
    for found in first:
        assert (found["index"], found["steps"], found["is_kept"]) == (ROWS + ROWS // 2 + 1, 1, True)
        assert [step for _, step, _, _ in found["attempts"]] == [0] * ROWS + [1] * ROWS
        assert found["told"] == [index for index, *_ in found["attempts"]] == list(range(1, 2 * ROWS + 1))


# --- the log of completions --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_all_ranks_are_logged_as_those_of_one_process(ranks: Results, kind: str, tmp_path: Path) -> None:
    """Texts, who was shown what, and the values of each token, in one file a step."""
    expected = logged("ddp", tmp_path, world_size=1)
    found, nothing = values(ranks, f"{kind}: the log of completions")
    assert nothing is None and found.keys() == expected.keys() == {1, 2}
    assert any(row["credit"] for rows in expected.values() for row in rows)
    for step, rows in expected.items():
        assert [row["row"] for row in found[step]] == list(range(ROWS))
        for row, other in zip(found[step], rows, strict=True):
            assert_same_row(row, other)


def assert_same_row(found: Any, expected: Any) -> None:
    """Equal, numbers up to the order of summation."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same_row(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for value, other in zip(found, expected, strict=True):
            assert_same_row(value, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_that_cannot_be_written_ends_all_ranks(ranks: Results, kind: str) -> None:
    first, second = (rank[f"{kind}: error in the log"] for rank in ranks)
    assert "Exists" in first["error"] or "NotADirectory" in first["error"]
    assert "The main process failed" in second["error"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_the_main_process_logs_alone_keeps_nobody_waiting(ranks: Results, kind: str) -> None:
    assert values(ranks, f"{kind}: a number of the main process") == [[2.0, 2.0]] * 2


# --- evaluation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_with_an_uneven_end_has_the_numbers_of_one_process(
    ranks: Results, kind: str, tmp_path: Path
) -> None:
    """Five questions on two ranks: the last block leaves one of them without a row. Training goes on from there."""
    expected = evaluated("ddp", tmp_path)
    for found in values(ranks, f"{kind}: evaluation"):
        assert_same_numbers(found["eval"], expected["eval"])
        assert_same(found, expected)


# --- sampling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["ddp: sampling", "fsdp2: sampling", "fsdp2: sampling on pieces"])
def test_ranks_sample_different_completions_of_one_prompt(ranks: Results, run: str) -> None:
    first, second = (found["completions"] for found in values(ranks, run))
    assert len(first) == len(second) == 2 * ROWS // 2
    assert first != second
    assert len({tuple(ids) for ids in first[:4] + second[:4]}) >= 7


def test_sampling_with_gathered_weights_draws_what_each_rank_draws_with_all_of_them(ranks: Results) -> None:
    """The first block, before the weights of the two runs part in their last bits."""
    for whole, cut in zip(values(ranks, "ddp: sampling"), values(ranks, "fsdp2: sampling"), strict=True):
        assert whole["completions"][:4] == cut["completions"][:4]


# --- checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_resumed_run_is_the_straight_one(ranks: Results, name: str) -> None:
    for found in values(ranks, f"checkpoint {name}"):
        straight, resumed = found["straight"], found["resumed"]
        assert resumed["logs"][-2:] == straight["logs"][-2:]
        for parameter, value in straight["weights"].items():
            assert torch.equal(resumed["weights"][parameter], value), parameter


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_saved_model_is_the_student_alone_and_whole(ranks: Results, name: str) -> None:
    found = values(ranks, f"checkpoint {name}")[0]
    assert not any("teacher" in file or "reference" in file for file in found["files"]["final"])
    is_adapter = CHECKPOINTS[name][1].lora is not None
    file = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    weights = load_file(str(Path(found["folder"]) / "final" / file))
    for parameter, value in weights.items():
        own = parameter.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")
        assert torch.equal(value, found["resumed"]["weights"][f"student {own}"]), parameter


def test_a_checkpoint_of_pieces_has_a_file_a_rank(ranks: Results) -> None:
    files = values(ranks, "checkpoint fsdp2")[0]["files"]["checkpoint-4"]
    assert {"teacher-rank0.safetensors", "teacher-rank1.safetensors", "reference-rank0.safetensors"} <= set(files)
    assert "teacher.safetensors" not in files
    assert "teacher.safetensors" in values(ranks, "checkpoint ddp")[0]["files"]["checkpoint-4"]


def test_resuming_with_another_number_of_ranks_is_refused(ranks: Results, tmp_path: Path) -> None:
    folder = values(ranks, "checkpoint ddp")[0]["folder"]
    trainer = build(BLEND.having(max_steps=4, num_iterations=2), tmp_path)
    with pytest.raises(ValueError, match="world_size: 2 there, 1 here"):
        check_layout(f"{folder}/checkpoint-2", trainer.args)


# --- a rank that dies --------------------------------------------------------------------------------


def test_a_killed_rank_ends_the_others_and_torchrun_says_which(tmp_path: Path) -> None:
    began = time.monotonic()
    done = torchrun(HERE / "killed.py", tmp_path, "fsdp2", limit_s=120)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stdout and "local_rank: 1" in done.stdout
    assert time.monotonic() - began < 60


def test_a_rank_that_fails_while_the_policy_is_gathered_ends_all_with_its_text(tmp_path: Path) -> None:
    """The others wait in the gathering: they are ended, and not asked to listen first."""
    done = torchrun(HERE / "killed.py", tmp_path, "fsdp2", "full", limit_s=120)
    assert done.returncode != 0
    assert "StoppedHalfway: OutOfMemoryError: no memory for the next layer" in done.stdout
    assert "collective mismatch" not in done.stdout and "local_rank: 1" in done.stdout
