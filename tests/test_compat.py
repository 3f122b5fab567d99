"""Scripts written for the peer run here after their import is changed, and log the metrics they rely on."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model, make_tokenizer
from datasets import Dataset

from sdpo import SDPOConfig, SDPOTrainer

SCRIPT = Path(__file__).parent / "compat" / "peer_script.py"
PEER = "trl.experimental.sdpo"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_script(package: str, model_folder: Path, output: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), package, str(model_folder), str(output)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith('{"runs"')]
    return json.loads(line)


def is_documented_metric(name: str) -> bool:
    return name.removeprefix("eval_").startswith(("self_distillation/", "completions/"))


@pytest.mark.slow
def test_a_script_for_the_peer_runs_and_logs_the_same_metrics(model_folder: Path, tmp_path: Path) -> None:
    from trl.experimental.sdpo import SDPOConfig as PeerConfig

    ours = run_script("sdpo", model_folder, tmp_path / "ours")
    peer = run_script(PEER, model_folder, tmp_path / "peer")
    assert list(ours["runs"]) == list(peer["runs"])
    missing = {
        run: sorted(set(filter(is_documented_metric, names)) - set(ours["runs"][run]))
        for run, names in peer["runs"].items()
    }
    assert not any(missing.values()), missing
    assert len(list(filter(is_documented_metric, peer["runs"]["by_path_with_defaults"]))) >= 19
    documented = {f.name for f in dataclasses.fields(PeerConfig)} & SDPOConfig.__annotations__.keys()
    assert len(documented) > 60 and documented - set(ours["fields"]) == set()


def test_feedback_from_a_column_teaches_top_k_of_a_model_given_by_path(model_folder: Path, tmp_path: Path) -> None:
    def right_answer(prompts: Any, completions: Any, answer: list[str], **kwargs: Any) -> list[float]:
        return [float(a in c[0]["content"].split()) for c, a in zip(completions, answer, strict=True)]

    dataset = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": f"Solve w{i} + w{i} ."}] for i in (1, 2)],
            "answer": ["w2", "w4"],
            "privileged_context": ["Your answer was w3 , which is too large .", "Count again ."],
        }
    )
    trainer = SDPOTrainer(
        model=str(model_folder),
        reward_funcs=right_answer,
        args=SDPOConfig(
            output_dir=str(tmp_path),
            distillation_mode="topk_logits",
            distillation_topk=100,
            include_environment_feedback=True,
            per_device_train_batch_size=8,
            max_completion_length=4,
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=dataset,
    )
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["self_distillation/feedback_available_fraction"] == 1.0
    assert entry["self_distillation/feedback_used_fraction"] > 0
    assert entry["self_distillation/distillation_loss"] > 0
    assert not torch.equal(trainer.model.lm_head.weight, before)
