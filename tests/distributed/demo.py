"""The demo with completions that depend on a row's place among all ranks' rows: python demo.py FOLDER BATCH-A-RANK."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import sdpo_math

from sdpo import SDPOTrainer
from sdpo.types import Completion


class Numbers:
    """The numbers 0 to 18, some of which are right, one a row of the block."""

    def __init__(self, trainer: SDPOTrainer):
        self.tokenizer = trainer.tokenizer
        self.rank, self.world_size = trainer.args.process_index, trainer.args.world_size

    def sync(self, step: int) -> None:
        pass

    def generate(self, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        start = self.rank * len(prompt_ids)
        tokenizer = self.tokenizer.tokenizer
        texts = [str((start + i) * 7 % 19) for i in range(len(prompt_ids))]
        end = sorted(self.tokenizer.eos_token_ids)[0]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return [Completion([*one, end], is_truncated=False) for one in ids]


def main(folder: Path, batch: str) -> None:
    trainers: list[SDPOTrainer] = []

    def prepare(trainer: SDPOTrainer) -> None:
        trainers.append(trainer)
        trainer.generator = Numbers(trainer)

    settings = {"output_dir": folder, "per_device_train_batch_size": batch, "max_steps": 2, "use_cpu": "true"}
    settings |= {"num_test_questions": 4, "num_test_samples": 1, "check_teacher": "false", "disable_tqdm": "true"}
    if int(os.environ["WORLD_SIZE"]) > 1:
        settings["ddp_backend"] = "gloo"
    sdpo_math.main(
        [str(word) for name, value in settings.items() for word in (f"--{name}", value)], on_trainer=prepare
    )
    logs = [log for log in trainers[0].state.log_history if "loss" in log]
    kept = [{name: value for name, value in log.items() if not name.startswith("time/")} for log in logs]
    if trainers[0].is_world_process_zero():
        (folder / "logs.json").write_text(json.dumps(kept))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
