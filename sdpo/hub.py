"""A `Trainer` that pushes to the hub what it has trained, with a model card."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers import Trainer
from transformers.trainer_utils import HubStrategy, sort_checkpoints
from transformers.utils import logging

from sdpo.loading import as_dict
from sdpo.model_card import (
    CardFacts,
    changed_settings,
    eval_results,
    hub_id,
    model_card,
    short_card,
    train_results,
)
from sdpo.rewards import RewardScorer

logger = logging.get_logger(__name__)

CARD = "README.md"
# Whose version a card has, and of which trainers.
LIBRARIES: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("sdpo", "transformers", "torch", "datasets", "tokenizers"), lambda trainer: True),
    "peft": lambda trainer: is_peft_model(trainer.model),
    "vllm": lambda trainer: trainer.args.use_vllm,
}
# What a teacher is shown, by the setting that asks for it.
SOURCES = {
    "use_successful_as_teacher": "an attempt that succeeded",
    "include_environment_feedback": "what the environment said of the attempt",
    "demonstration_column": "a solution of the dataset",
}


class HubTrainer(Trainer):
    """A `Trainer` whose card says what SDPO did, and whose pushes arrive whole, or fail aloud.

    What cannot be found out is left out of a card, and no push is given up for one. What the caller or the disk does
    wrong raises.
    """

    _tag_names: Sequence[str]
    _pushed: str | None = None

    # Made by the subclass.
    model: Any
    scorer: RewardScorer
    is_chat: bool

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Asked now: the name may be a folder here and none where the process is later.
        self.base_model = hub_id_of(self.model.config.name_or_path or "")

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | Sequence[str] | None = None,
        tags: str | Sequence[str] | None = None,
        *,
        language: str | Sequence[str] | None = None,
        license: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | Sequence[str] | None = None,
        dataset_tags: str | Sequence[str] | None = None,
        dataset: str | Sequence[str] | None = None,
        dataset_args: str | Sequence[str] | None = None,
    ) -> None:
        """Writes the model card to `README.md` in `output_dir`, on the main process. `push_to_hub` calls it.

        Args:
            model_name: title; by default the name of the repository or of `output_dir`.
            dataset_name: id on the hub of the training data, or several.
            tags: added to the card's.
            language, license: of the model, as the hub writes them. Neither is guessed.
            finetuned_from: id of the base model; by default the one that the model was loaded from.
            tasks: pipeline tag, text-generation by default.
            dataset_tags, dataset, dataset_args: ids, names and configurations of datasets, as `Trainer` has them.

        Raises:
            OSError: the file cannot be written.
        """
        if not self.is_world_process_zero():
            return
        title, tags = model_name or self._title(), _listed(tags)
        tags = list(dict.fromkeys([*tags, "generated_from_trainer", *self._tag_names]))
        try:
            ids = [found for name in [*_listed(dataset_name), *_listed(dataset_tags)] if (found := hub_id_of(name))]
            card = model_card(
                CardFacts(
                    title=title,
                    tags=tags,
                    language=language,
                    license=license,
                    pipeline_tag=next(iter(_listed(tasks)), "text-generation"),
                    base_model=self.base_model if finetuned_from is None else hub_id_of(finetuned_from),
                    datasets=ids,
                    dataset=_dataset_text(self.train_dataset, ids, _listed(dataset), _listed(dataset_args)),
                    **_of_model(self),
                    **_of_run(self),
                )
            )
        except Exception:  # a card is no reason to lose a run, and a traceback tells of the mistake
            logger.exception("The model card could not be made; %s has the model's name only.", CARD)
            card = short_card(title, tags=tags)
        card.save(os.path.join(self.args.output_dir, CARD))

    def _title(self) -> str:
        repo = self.hub_model_id or self.args.hub_model_id
        return str(repo).split("/")[-1] if repo else Path(self.args.output_dir).absolute().name

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As `Trainer.init_hf_repo`; says what besides the model will be there."""
        super().init_hf_repo(token=token, private=private)
        if self.args.log_completions and self.is_world_process_zero():
            logger.warning(
                "log_completions=True: prompts, completions and feedback of the run are in %s/completions, and so "
                "will be in the repository %s.",
                self.args.output_dir,
                self.hub_model_id,
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """As `Trainer._push_from_checkpoint`; with a card, and with word of a push that fails.

        With `hub_always_push` the push before it is waited for: it reads the files that are replaced here.
        """
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if self.args.hub_always_push:
            self._finish_current_push()
        earlier = [] if self.push_in_progress is None else list(self.push_in_progress.jobs)
        if not all(job.done() for job in earlier):
            return
        self.create_model_card()
        peft_card = Path(checkpoint_folder) / CARD
        if peft_card.exists():
            # It names the base model by its folder, where that is one, and the hub refuses a checkpoint with it.
            peft_card.write_bytes((Path(self.args.output_dir) / CARD).read_bytes())
        super()._push_from_checkpoint(checkpoint_folder)
        self._pushed = checkpoint_folder
        for job in self.push_in_progress.jobs:
            job.add_done_callback(self._tell_of_failure)

    def wait_for_push(self, folder: Path) -> None:
        """Waits for a push of a checkpoint in `folder` that is about to be deleted, for `save_total_limit`."""
        limit = self.args.save_total_limit
        if self._pushed is None or not limit:
            return
        is_last = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        doomed = sort_checkpoints(str(folder), use_mtime=True)[:-limit]
        if self._pushed in doomed or (limit == 1 and is_last):  # then the best one alone stays
            self._finish_current_push()

    def _tell_of_failure(self, job: Future[Any]) -> None:
        """Nobody asks these jobs for their result."""
        if not job.cancelled() and (error := job.exception()) is not None:
            logger.error(
                "A push to %s failed, and the run goes on: %s: %s. What was saved is in %s.",
                self.hub_model_id,
                type(error).__name__,
                error,
                self.args.output_dir,
            )


# --- what is known of a run ------------------------------------------------------------------------------------------


def hub_id_of(name: str) -> str | None:
    """As `hub_id`; None also for a file or folder that is there."""
    found = hub_id(name)
    return None if found == name and os.path.exists(name) else found


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _dataset_text(dataset: Any, ids: Sequence[str], names: Sequence[str], configs: Sequence[str]) -> str:
    """What the model was trained on, to stand after "on"."""
    texts = [name for name in names if not os.path.exists(name)]
    texts = texts or [f"[{name}](https://huggingface.co/datasets/{name})" for name in ids]
    if texts:
        return " and ".join(texts) + (f" ({', '.join(configs)})" if configs else "")
    return f"a dataset of {len(dataset)} prompts" if isinstance(dataset, Sized) else "a stream of prompts"


def _of_model(trainer: Any) -> dict[str, Any]:
    """The facts of the model and of how it is used."""
    args, model = trainer.args, trainer.model
    kind = model.peft_config[model.active_adapter].peft_type.value.lower() if is_peft_model(model) else None
    base = model.get_base_model() if is_peft_model(model) else model
    return {
        "repo": trainer.hub_model_id,
        "architecture": type(base).__name__.removeprefix("FSDP"),
        "adapter": kind,
        "is_chat": trainer.is_chat,
        "chat_template_kwargs": as_dict(args.chat_template_kwargs),
        "max_new_tokens": args.sampling.max_completion_length,
        "trust_remote_code": args.trust_remote_code,
    }


def _of_run(trainer: Any) -> dict[str, Any]:
    """The facts of what was done to it."""
    args, state = trainer.args, trainer.state
    is_over = any("train_runtime" in entry for entry in state.log_history)
    has_best = args.load_best_model_at_end and is_over and state.best_model_checkpoint is not None
    best = state.best_global_step if has_best else None
    libraries = [name for name, is_used in LIBRARIES.items() if is_used(trainer)]
    return {
        "weight": args.distillation_weight,
        "sources": [text for name, text in SOURCES.items() if getattr(args, name)],
        "settings": changed_settings(args),
        "rewards": dict(zip(trainer.scorer.names, trainer.scorer.weights, strict=True)),
        "step": state.global_step,
        "num_completions": args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "num_generations": args.num_generations,
        "temperature": args.sampling.temperature,
        "best": None if best is None else (best, args.metric_for_best_model),
        "train_results": train_results(state.log_history, until=best),
        "eval_results": eval_results(state.log_history, at=best),
        "versions": {name: version(name) for name in libraries},
    }
