"""What a checkpoint holds besides the student: teacher, reference, the block in use, accumulators, and the layout.

Files of `sdpo/` inside a checkpoint: `layout.json`; `teacher.safetensors` and `reference.safetensors`, or one of each
a rank with its pieces (`teacher-rank0.safetensors`) where parameters are cut up; a file a rank for what differs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, get_last_checkpoint, rotate_checkpoints

from sdpo import distributed
from sdpo.callbacks import Diagnostics
from sdpo.demonstrations import EarlierSuccesses
from sdpo.hub import HubTrainer
from sdpo.log_callback import CompletionLog
from sdpo.metrics import Metrics, StageClock
from sdpo.progress import Progress
from sdpo.sharding import is_sharded, parallelism_of
from sdpo.teacher import PolicyCopy, Teacher
from sdpo.types import Block, Phase, Sequences, TrainingBatch

FOLDER = "sdpo"
# Checkpoints are written here and renamed when complete. A push of the output folder leaves names like "_*" out.
UNFINISHED = "_unfinished"
REPLACED = f"{UNFINISHED}-old-"  # and an older checkpoint's name, while one of that name takes its place

# Settings that a resumed run must have as they were: those that the order of prompts, the block in use and the saved
# weights come from, and those that say which loss is minimized. Rates and schedules, clip ranges, rewards, what the
# teacher is shown, logging, evaluation and saving are free: they act from the next step or block on.
LAYOUT = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_generations",
    "num_iterations",
    "world_size",
    "seed",
    "data_seed",
    "shuffle_dataset",
    "dataloader_drop_last",
    "max_prompt_length",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "chat_template_kwargs",
    "scale_rewards",
    "mask_truncated_completions",
    "loss_type",
    "importance_sampling_level",
    "distillation_weight",
    "distillation_mode",
    "distillation_topk",
    "distillation_add_tail",
    "beta",
    "teacher_model_kind",
    "teacher_dtype",
)


def layout_of(args: Any) -> dict[str, Any]:
    """The settings of `LAYOUT` and the kind of parallelism, as JSON has them."""
    values = {"parallelism": parallelism_of(args), **{name: getattr(args, name) for name in LAYOUT}}
    layout: dict[str, Any] = json.loads(json.dumps(values, default=lambda value: type(value).__name__))
    return layout


def check_layout(checkpoint: str, args: Any) -> None:
    """Makes sure that a run with these settings goes on as the one that wrote the checkpoint.

    Raises:
        ValueError: the checkpoint has no state of ours, or the settings would change the run.
    """
    path = Path(checkpoint) / FOLDER / "layout.json"
    start_over = (
        f"To start a run of its own from these weights, with a teacher made from them, pass model={checkpoint!r} to "
        "SDPOTrainer and call train() without resume_from_checkpoint."
    )
    if not path.exists():
        raise ValueError(
            f"{checkpoint} holds no teacher and no generation block ({FOLDER}/layout.json is missing), so its run "
            f"cannot be continued: another library wrote it, or save_only_model=True. {start_over}"
        )
    saved, present = json.loads(path.read_text()), layout_of(args)
    changed = [
        f"{name}: {saved.get(name)} there, {value} here" for name, value in present.items() if saved.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"Resuming {checkpoint} with other settings would be another run ({'; '.join(changed)}). Set them as they "
            f"were. {start_over}"
        )


def save_tensors(state: Mapping[str, Tensor], path: Path) -> None:
    """Writes tensors by name, nothing where there are none."""
    if state:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors by name.

    Raises:
        ValueError: the file is not there.
    """
    _check_exists(path)
    return load_file(path)


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise ValueError(f"{path} is missing: the checkpoint is damaged. Resume from an earlier one.")


def save_rank(folder: Path, rank: int, *, block: Block | None, state: Mapping[str, Any]) -> None:
    """Writes what differs by rank: the block with its position, and plain values."""
    batches = [_as_plain(batch) for batch in block.batches] if block is not None else []
    torch.save({"batches": batches, "num_used": block.num_used if block else 0, **state}, folder / f"rank{rank}.pt")


def load_rank(folder: Path, rank: int) -> tuple[Block | None, dict[str, Any]]:
    """What `save_rank` wrote. Only tensors and plain values are read, no code.

    Raises:
        ValueError: the file is not there.
    """
    path = folder / f"rank{rank}.pt"
    _check_exists(path)
    state: dict[str, Any] = torch.load(path, weights_only=True)
    batches = [_as_batch(plain) for plain in state.pop("batches")]
    num_used = state.pop("num_used")
    return (Block(batches, num_used) if batches else None), state


def _as_plain(value: TrainingBatch | Sequences) -> dict[str, Any]:
    found = {f.name: getattr(value, f.name) for f in fields(value)}
    return {name: _as_plain(v) if isinstance(v, Sequences) else v for name, v in found.items()}


def _as_batch(plain: dict[str, Any]) -> TrainingBatch:
    values: dict[str, Any] = {name: Sequences(**v) if isinstance(v, dict) else v for name, v in plain.items()}
    return TrainingBatch(**values)


def publish(staged: Path, final: Path) -> None:
    """Gives a complete checkpoint its name. One of that name from an earlier run gives way; see `put_back`."""
    old = final.with_name(f"{REPLACED}{final.name}")
    remove(old)
    if final.exists():
        os.replace(final, old)
    os.replace(staged, final)
    remove(old)


def put_back(output_dir: Path) -> None:
    """Ends what a killed `publish` left: a checkpoint without a successor gets its name again, any other goes."""
    for old in output_dir.glob(f"{REPLACED}*"):
        final = old.with_name(old.name.removeprefix(REPLACED))
        if final.exists():
            remove(old)
        else:
            os.replace(old, final)


def remove(folder: Path) -> None:
    """Deletes a folder where there is one."""
    if folder.exists():
        shutil.rmtree(folder)


class CheckpointedTrainer(HubTrainer):
    """A `Trainer` whose checkpoints hold the whole run, and have a checkpoint's name only when complete.

    A run that is killed at any moment therefore leaves its last checkpoint usable.
    """

    _is_staging = False
    _resumed_from: str | None = None
    _resumed_log: tuple[float, int] = (0.0, 0)

    model: Any
    optimizer: Any

    # Made by the subclass.
    teacher: Teacher | None
    reference: PolicyCopy | None
    block: Block | None
    earlier: EarlierSuccesses
    metrics: dict[Phase, Metrics]
    clock: StageClock
    progress: Progress
    diagnostics: Diagnostics
    completions: CompletionLog | None = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As `Trainer.train`; resuming gives the run that was interrupted, exactly.

        Raises:
            ValueError: the checkpoint lacks the run's state, or the settings would make another run of it.
        """
        self._forget_run()
        if self.args.should_save:
            put_back(Path(self.args.output_dir))
        distributed.wait(self.accelerator)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            check_layout(os.fspath(resume_from_checkpoint), self.args)
            self._resumed_from = os.fspath(resume_from_checkpoint)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.progress.close()

    def _forget_run(self) -> None:
        """Drops what an earlier `train()` of this object left, finished or not; weights stay."""
        self._resumed_from = None
        self._resumed_log = (0.0, 0)
        self.block = None
        self.earlier.load_state_dict({})
        self.metrics["train"].clear()
        self.clock.clear()
        self.diagnostics.streaks.clear()
        if self.completions is not None:
            self.completions.forget()

    def continue_run(self) -> None:
        """Goes on where the interrupted run was; to be called before the first thing that draws random numbers."""
        if self._resumed_from is not None:
            super()._load_rng_state(self._resumed_from)
            self._resumed_from = None
            loss, self._globalstep_last_logged = self._resumed_log
            self._tr_loss += loss
            self._total_loss_scalar -= loss  # `train_loss` is the mean of the steps since the resume

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing: the base class does it after the first batch is fetched, which here means after sampling."""

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self._place_copies()
        if self.model_wrapped is self.model and not is_sharded(self.model):
            # An evaluation before it marks the model as ready, though it has not been wrapped to average gradients:
            # every rank would train alone.
            self.model._is_accelerate_prepared = False
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._start_teacher()
        return prepared

    def place(self) -> None:
        """Puts student, teacher and reference where they sample before training; training does it by itself."""
        if self.accelerator.is_fsdp2 and not is_sharded(self.model):
            self._place_copies()
            self.create_optimizer()  # FSDP2 places a model with its optimizer, and training will use both
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped = self.model
            self._start_teacher()
        elif self.is_deepspeed_enabled and self.deepspeed is None:
            self.model.to(self.accelerator.device)  # DeepSpeed has nothing to do before training

    def _place_copies(self) -> None:
        """Puts teacher and reference where the student will be; before it, so that its first weights are theirs."""
        for weights in self._kept_weights().values():
            weights.place(self.accelerator)

    def _start_teacher(self) -> None:
        if self.teacher is not None:
            self.teacher.start()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._start_teacher()
            self._load_run_state(Path(checkpoint) / FOLDER)

    def _save_run_state(self, folder: Path) -> None:
        if self.args.should_save:
            (folder / "layout.json").write_text(json.dumps(layout_of(self.args), indent=2))
        if self.args.should_save or is_sharded(self.model):
            for name, weights in self._kept_weights().items():
                save_tensors(weights.state_dict(), folder / self._file_of(name))
        state = {
            "metrics": self.metrics["train"].snapshot(),
            "streaks": [(phase, name, number) for (phase, name), number in self.diagnostics.streaks.items()],
            "loss_since_log": self._tr_loss.item(),
            "logged_step": self._globalstep_last_logged,
            "earlier_successes": self.earlier.state_dict(),
            "completions": None if self.completions is None else self.completions.state_dict(),
        }
        save_rank(folder, self.args.process_index, block=self.block, state=state)

    def _load_run_state(self, folder: Path) -> None:
        for name, weights in self._kept_weights().items():
            if weights.state_dict():
                weights.load_state_dict(load_tensors(folder / self._file_of(name)))
        self.block, state = load_rank(folder, self.args.process_index)
        self.metrics["train"].restore(state["metrics"])
        self.diagnostics.streaks.update({(phase, name): number for phase, name, number in state["streaks"]})
        self.earlier.load_state_dict(state["earlier_successes"])
        self._resumed_log = (state["loss_since_log"], state["logged_step"])
        if self.completions is not None and state.get("completions") is not None:
            self.completions.load_state_dict(state["completions"])

    def _file_of(self, name: str) -> str:
        return f"{name}-rank{self.args.process_index}.safetensors" if is_sharded(self.model) else f"{name}.safetensors"

    def _kept_weights(self) -> dict[str, Teacher | PolicyCopy]:
        """Weights besides the student's that a resumed run needs, by file name."""
        kept: dict[str, Teacher | PolicyCopy] = {}
        if self.teacher is not None:
            kept["teacher"] = self.teacher
        if self.reference is not None and (self.teacher is None or self.reference is not self.teacher.initial):
            kept["reference"] = self.reference
        return kept

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The student alone, whole, for `from_pretrained`. On every rank."""
        plugin = self.accelerator.state.fsdp_plugin if self.accelerator.is_fsdp2 else None
        if plugin is None or self._is_staging or "SHARDED" not in str(plugin.state_dict_type):
            super().save_model(output_dir, _internal_call)
            return
        # With this type the base class writes nothing, and checkpoints have the pieces.
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            plugin.set_state_dict_type("SHARDED_STATE_DICT")

    def _get_output_dir(self, trial: Any) -> str:
        final: str = super()._get_output_dir(trial)
        return str(Path(final) / UNFINISHED) if self._is_staging else final

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        final = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staged = final / UNFINISHED / name
        if self.args.should_save:
            remove(final / UNFINISHED)
        distributed.wait(self.accelerator)
        self._is_staging = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._is_staging = False
        if not self.args.save_only_model:
            (staged / FOLDER).mkdir(parents=True, exist_ok=True)
            self._save_run_state(staged / FOLDER)
        self._name_best(final)
        if self.args.should_save:
            self.state.save_to_json(str(staged / "trainer_state.json"))
        distributed.wait(self.accelerator)
        if self.args.should_save:
            publish(staged, final / name)
            remove(final / UNFINISHED)
        distributed.wait(self.accelerator)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final / name))
        if self.args.should_save:
            self.wait_for_push(final)
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
            rotate_checkpoints(str(final), limit, best, use_mtime=True)

    def _name_best(self, final: Path) -> None:
        """The best checkpoint under its final name; the base class saw the unfinished one."""
        if self.state.best_global_step:
            best = final / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best.exists() or self.state.best_global_step == self.state.global_step:
                self.state.best_model_checkpoint = str(best)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._is_staging:
            super()._push_from_checkpoint(checkpoint_folder)
