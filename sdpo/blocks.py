"""A `Trainer` that reads blocks of prompts, each repeated for its group."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from sdpo.data import BlockLoader, BlockShape, LoaderSettings, block_loader
from sdpo.types import Phase


class BlockTrainer(Trainer):
    """Its batches are lists of dataset rows, one a completion, with their `columns`; None for all."""

    columns: list[str] | None

    def get_train_dataloader(self) -> BlockLoader:
        if self.train_dataset is None:
            raise ValueError("train() needs a train_dataset; pass one to SDPOTrainer.")
        num_prompts = self.args.generation_batch_size // self.args.num_generations
        return self._loader(self.train_dataset, num_prompts, "train")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> BlockLoader:
        if self.is_deepspeed_enabled and self.deepspeed is None:
            raise ValueError(
                "With DeepSpeed an evaluation needs the engine that train() makes. Set eval_on_start=True to evaluate "
                "before the first step, or call evaluate() after train()."
            )
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluate() needs an eval_dataset; pass one to SDPOTrainer or to evaluate().")
        return self._loader(dataset, self.prompts_per_eval_block, "eval")

    get_test_dataloader = get_eval_dataloader

    def _loader(self, dataset: Any, prompts_per_block: int, phase: Phase) -> BlockLoader:
        args, is_training = self.args, phase == "train"
        return block_loader(
            dataset,
            BlockShape(
                prompts_per_block,
                num_generations=self.num_generations(phase),
                num_uses=args.steps_per_generation * args.num_iterations if is_training else 1,
                rank=args.process_index,
                world_size=args.world_size,
            ),
            LoaderSettings.of(args),
            columns=self.columns,
            shuffle=is_training and args.shuffle_dataset,
            seed=args.seed if args.data_seed is None else args.data_seed,
            is_training=is_training,
            drop_last=args.dataloader_drop_last,
        )

    @property
    def prompts_per_eval_block(self) -> int:
        """Whole groups: one at least, and no more rows than the evaluation batch where those fit."""
        return max(1, self.args.eval_batch_size * self.args.world_size // self.num_generations("eval"))

    def num_generations(self, phase: Phase) -> int:
        """Completions a prompt."""
        number: int = self.args.num_generations
        in_evaluation: int | None = self.args.num_generations_eval
        return in_evaluation if phase == "eval" and in_evaluation is not None else number
