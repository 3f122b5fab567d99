"""The trainer: construction, and the order of the stages of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, set_seed
from transformers.trainer_utils import EvalLoopOutput, has_length

from sdpo import distributed, forward, loading, sources, tokenization
from sdpo.blocks import BlockTrainer
from sdpo.callbacks import Diagnostics, HealthWarnings, KeepGenerationConfig, TeacherUpdate, call_hooks, observe_block
from sdpo.collate import collate, count_trained, idle_batch
from sdpo.config import SDPOConfig
from sdpo.data import BlockLoader, Example, rows_of_step
from sdpo.demonstrations import EarlierSuccesses, for_other_ranks
from sdpo.generation import Generator, build_generator
from sdpo.guard import GuardedTrainer
from sdpo.heads import find_head
from sdpo.log_callback import CompletionLog
from sdpo.losses.objective import blend, objective
from sdpo.losses.policy import group_advantages
from sdpo.metrics import Metrics, StageClock, merge
from sdpo.progress import Progress, functions_note, tokens_note
from sdpo.reprompt import build_teacher_contexts, fit_teacher_prompt
from sdpo.rewards import RewardScorer
from sdpo.served_teacher import Scorer, attach_served
from sdpo.sharding import check_placement, is_sharded, loaded_whole
from sdpo.teacher import PolicyCopy, Teacher, build_teacher
from sdpo.types import Block, Completion, Phase, Prompt, Rollout, Row, ScoredRollout, TeacherContext, TrainingBatch


class SDPOTrainer(BlockTrainer, GuardedTrainer):
    """Trains a language model by self-distillation (SDPO, arXiv 2601.20802), a policy gradient blended in at will.

    Args:
        model: path or id of a causal language model, a `PreTrainedModel`, or a `PeftModel`.
        reward_funcs: one or several of: a callable `f(prompts, completions, completion_ids, **columns,
            trainer_state)` that returns a number, None or `Score(reward, feedback)` for each completion (it may be
            async); a sequence-classification model; the path or id of one.
        args: defaults to `SDPOConfig()`.
        train_dataset, eval_dataset: rows with a `prompt` (string or messages), optionally `privileged_context`, and
            any columns that the reward functions read. A map-style dataset, or a stream with `max_steps`.
        processing_class: tokenizer or processor; loaded from the model's own folder by default.
        reward_processing_classes: tokenizers of reward models, one a reward function.
        callbacks, optimizers: as in `Trainer`. Callbacks may define the hooks of `SDPOCallback`.
        peft_config: adds an adapter to the model.

    Raises:
        ValueError: settings, data, rewards or model that cannot work together; the message says which and what to do.
        TypeError: an argument of another kind.
    """

    loss_is_scaled_for_ga = True
    _tag_names = ("sdpo",)

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module,
        reward_funcs: Any = None,
        args: SDPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        peft_config: Any = None,
    ):
        args = SDPOConfig() if args is None else args
        loading.check_launch(args)
        prompts_by_dataset = sources.check_data(train_dataset, eval_dataset, reward_funcs, args)
        set_seed(args.seed)  # an adapter's first weights are random
        with loaded_whole(args):
            model = loading.load_policy(model, args, peft_config=peft_config)
        if processing_class is None:
            processing_class = loading.load_processing_class(model, args)
        self.tokenizer = self._prompt_tokenizer(model, processing_class, args)
        for prompts in prompts_by_dataset:
            self.tokenizer.check_prompts(prompts)
        self.is_chat = any(not isinstance(prompts[0], str) for prompts in prompts_by_dataset if prompts)
        super().__init__(
            model=model,
            args=args,
            data_collator=list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        check_placement(self.accelerator, args)
        sources.check_same_data(train_dataset, eval_dataset, prompts_by_dataset, self.accelerator)
        distributed.start_alike(self.model, self.accelerator)
        hidden_size = self.model.config.get_text_config().hidden_size
        self.token_cost = 6.0 * hidden_size if forward.try_model(self.model, self.accelerator) else None
        with loaded_whole(args):
            self.scorer = RewardScorer(
                reward_funcs,
                reward_weights=args.reward_weights,
                reward_processing_classes=reward_processing_classes,
                chat_template_kwargs=loading.as_dict(args.chat_template_kwargs),
                model_init_kwargs=loading.as_dict(args.model_init_kwargs),
                trust_remote_code=args.trust_remote_code,
                device=self.accelerator.device,
                demonstration_column=args.demonstration_column,
            )
        self._build_stages()
        set_seed(args.seed + args.process_index)  # each rank samples with random numbers of its own

    @staticmethod
    def _prompt_tokenizer(model: nn.Module, processing_class: Any, args: SDPOConfig) -> tokenization.PromptTokenizer:
        tokenizer = tokenization.text_tokenizer(processing_class)
        tokenization.ensure_pad_token(tokenizer)
        loading.check_vocabulary(model, tokenizer, topk=args.distillation_topk)
        return tokenization.PromptTokenizer(
            processing_class,
            max_prompt_length=args.max_prompt_length,
            chat_template_kwargs=loading.as_dict(args.chat_template_kwargs),
            eos_token_ids=tokenization.eos_token_ids(model.generation_config, tokenizer),
        )

    def _build_stages(self) -> None:
        """What a step goes through, made from the settings and the model."""
        args = self.args
        self.clock = StageClock()
        self.progress = Progress(args, self.clock)
        self.progress.take_place(self.callback_handler)
        self.reprompt = loading.reprompt_settings(self.model, args)
        self.columns = sources.columns_of_run(self.scorer.functions, args)
        self.generator: Generator = build_generator(
            lambda: self.model_wrapped,
            accelerator=self.accelerator,
            processing_class=self.processing_class,
            tokenizer=self.tokenizer.tokenizer,
            eos_token_ids=self.tokenizer.eos_token_ids,
            sampling=args.sampling,
            engine=args.engine if args.use_vllm else None,
            gathers_weights=args.ds3_gather_for_generation,
            report=self.progress.report if self.progress.is_shown else None,
        )
        self.teacher: Teacher | None = None
        if args.distillation_weight > 0:
            self.teacher = build_teacher(self.model, args.teacher)
            self.add_callback(TeacherUpdate(self.teacher))
        self.reference: PolicyCopy | None = None
        if args.beta > 0:
            kept = self.teacher.initial if self.teacher is not None and args.teacher_dtype is None else None
            self.reference = PolicyCopy(self.model) if kept is None else kept
        self.block: Block | None = None
        self.earlier = EarlierSuccesses(args.demonstration_buffer_size)
        self.metrics: dict[Phase, Metrics] = {"train": Metrics(), "eval": Metrics()}
        self.add_callback(KeepGenerationConfig(self.model))
        self.diagnostics = Diagnostics(
            interval=args.diagnostics_warning_interval,
            tolerance=args.diagnostics_flat_tolerance,
            threshold=args.success_reward_threshold,
        )
        if args.diagnostics_warning_interval:
            self.add_callback(HealthWarnings())
        if args.log_completions:
            self.completions = CompletionLog(self, self.tokenizer, self.reprompt)
            self.add_callback(self.completions)
        self.model.add_model_tags(list(self._tag_names))

    # --- the step ---------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Example]], num_batches: int, device: torch.device
    ) -> tuple[list[TrainingBatch], float]:
        """Microbatches of one optimizer step; collects new rollouts when the last block is used up."""
        self.continue_run()
        self.begin_step()
        step: list[TrainingBatch] = []
        for examples in rows_of_step(epoch_iterator, num_batches, is_first=self.state.global_step == 0):
            if examples:  # an empty list stands for one more use of the block
                with self.progress.collecting():
                    self.block = Block(self.collect(examples, "train"))
            assert self.block is not None, "an epoch starts with a block"
            step.append(self.block.next())
        if step:
            self.clock.count_step()
            step = self.serve(step)
        counts = distributed.sum_counts([count_trained(batch) for batch in step], self.accelerator)
        return [replace(batch, counts=counts) for batch in step], counts.policy_tokens

    def collect(self, examples: Sequence[Example], phase: Phase) -> list[TrainingBatch]:
        """One generation block of this rank: from dataset rows to padded microbatches.

        A rank may have no rows of an evaluation's last block; it takes part in what the ranks do together.
        """
        pad_token_id = self.tokenizer.tokenizer.pad_token_id
        with self.clock.timed("generation"):
            rollouts = self.roll_out(examples, phase)
        self.clock.count_tokens(sum(len(rollout.completion.ids) for rollout in rollouts))
        with self.clock.timed("scoring"):
            scored = self.score(rollouts, examples)
        with self.clock.timed("contexts"):
            rows = self._add_contexts(scored, phase)
        with self.clock.timed("collation"):
            size = self.args.per_device_train_batch_size if phase == "train" else self.args.eval_batch_size
            batches = [self._collate(rows[i : i + size]) for i in range(0, len(rows), size)]
            if phase == "eval" and is_sharded(self.model):  # a forward pass is one of all ranks
                num_idle = distributed.num_behind(len(batches), self.accelerator)
                batches += [idle_batch(pad_token_id=pad_token_id)] * num_idle
        with self.clock.timed("logps"):
            batches = self._add_logps(batches, phase)
        with distributed.together(self.accelerator):
            call_hooks(self, phase, rows, batches, pad_token_id=pad_token_id)
        if self.completions is not None and phase == "train":
            batches = self.completions.remember(rows, batches)
        return batches

    def roll_out(self, examples: Sequence[Example], phase: Phase) -> list[Rollout]:
        """Completions of this rank's rows."""
        prompts = [example["prompt"] for example in examples]
        with distributed.together(self.accelerator):
            self.tokenizer.check_prompts(prompts)
            encoded = self.tokenizer.encode_prompts(prompts)
        if num_cut := sum(was_cut for _, was_cut in encoded):
            counts = {"num_cut": num_cut, "num_prompts": len(encoded), "limit": self.args.max_prompt_length}
            self.diagnostics.tell_once("long_prompts", **counts)
        completions, texts = self.sample([ids for ids, _ in encoded])
        start, num_generations = distributed.first_row(len(examples), self.accelerator), self.num_generations(phase)
        return [
            Rollout((start + i) // num_generations, prompts[i], ids, completions[i], texts[i], was_cut)
            for i, (ids, was_cut) in enumerate(encoded)
        ]

    def sample(self, prompt_ids: Sequence[list[int]]) -> tuple[list[Completion], list[str]]:
        """A completion of each of this rank's prompts, and its text. On every rank, also before training."""
        self.place()
        is_joint = is_sharded(self.model) and not self.args.ds3_gather_for_generation
        with distributed.together(self.accelerator, is_joint=is_joint):
            self.generator.sync(self.state.global_step)
            with self.progress.bar("Generation", len(prompt_ids), unit="completions", note=tokens_note):
                completions = self.generator.generate(prompt_ids)
            texts = self.tokenizer.decode_batch([completion.ids for completion in completions])
        return completions, texts

    def score(self, rollouts: Sequence[Rollout], examples: Sequence[Example]) -> list[ScoredRollout]:
        """What the reward functions say of this rank's rollouts. On every rank, also where there are none."""
        num_functions = len(self.scorer.functions)
        total, note = len(rollouts) * num_functions, functions_note(num_functions)
        with distributed.together(self.accelerator):
            if not rollouts:
                return []
            with self.progress.bar("Scoring", total, unit="rewards", note=note):
                return self.scorer.score(rollouts, examples, trainer_state=self.state, report=self.progress.report)

    def _add_contexts(self, scored: list[ScoredRollout], phase: Phase) -> list[Row]:
        """Advantages and teacher prompts of this rank's rows, made from whole groups over all ranks."""
        public = for_other_ranks(scored, self.reprompt, num_generations=self.num_generations(phase))
        world, start = distributed.gather_rows(public, self.accelerator)
        world[start : start + len(scored)] = scored
        rewards = torch.tensor([math.nan if row.reward is None else row.reward for row in world])
        groups = torch.tensor([row.rollout.group for row in world])
        advantages = group_advantages(rewards, groups, scale=self.args.scale_rewards).tolist()
        earlier = self.earlier if phase == "train" else EarlierSuccesses(0)
        contexts = build_teacher_contexts(world, self.reprompt, earlier=earlier, seed=self.state.global_step)
        earlier.add(world, self.reprompt)
        ids_of = self.tokenizer.remembering()
        with distributed.together(self.accelerator):
            rows = [self._row(row, contexts[start + i], advantages[start + i], ids_of) for i, row in enumerate(scored)]
        contexts, _ = distributed.gather_rows([row.context.without_texts() for row in rows], self.accelerator)
        observe_block(
            self.metrics[phase], self.diagnostics, phase, world, contexts, rows, args=self.args, shown=self.reprompt
        )
        return rows

    def _row(
        self, scored: ScoredRollout, context: TeacherContext, advantage: float, ids_of: Callable[[Prompt], list[int]]
    ) -> Row:
        prompt, context, is_shortened = fit_teacher_prompt(
            scored.rollout.prompt, context, self.reprompt, count_tokens=lambda prompt: len(ids_of(prompt))
        )
        prompt_ids = ids_of(prompt) if context.is_informative else scored.rollout.prompt_ids
        return Row(scored, context, prompt_ids, is_shortened, advantage)

    def _collate(self, rows: Sequence[Row]) -> TrainingBatch:
        return collate(
            rows,
            pad_token_id=self.tokenizer.tokenizer.pad_token_id,
            mask_truncated_completions=self.args.mask_truncated_completions,
            weight=self.args.distillation_weight,
            token_cost=self.token_cost,
        )

    def _add_logps(self, batches: list[TrainingBatch], phase: Phase) -> list[TrainingBatch]:
        """Log-probs under the weights of now, where a later step will need them, and under the reference policy."""
        uses = self.args.steps_per_generation * self.args.num_iterations
        is_reused = phase == "train" and self.args.gradient_accumulation_steps % uses != 0
        none, logps = [None] * len(batches), forward.completion_logps
        old = self._read(logps, self.model, batches) if is_reused else none
        reference = none if self.reference is None else self._read(logps, self.reference.model, batches)
        pairs = zip(batches, old, reference, strict=True)
        return [replace(batch, old_logps=old, reference_logps=reference) for batch, old, reference in pairs]

    def serve(self, batches: list[TrainingBatch]) -> list[TrainingBatch]:
        """The microbatches with what the server says of their teacher, where it is there and not here."""
        if not self.args.use_teacher_server:
            return batches
        step, topk, whose = self.state.global_step, self.args.distillation_topk, self.args.teacher_server_support
        with self.clock.timed("teacher_server"):
            support = self._read(forward.student_support, self.model, batches) if whose == "student" else None
            return attach_served(batches, cast(Scorer, self.generator), step=step, topk=topk, support=support)

    def _read(self, values: Callable[..., Tensor], model: nn.Module, batches: list[TrainingBatch]) -> list[Tensor]:
        """What `values`, a function of `forward`, gives of each microbatch (B, T, ...) under a model."""
        head, settings = find_head(self.accelerator.unwrap_model(model)), self.args.objective
        with self.compute_loss_context_manager():
            on_device = (batch.to(self.accelerator.device) for batch in batches)
            return [values(model, head, batch, settings).cpu() for batch in on_device]

    def compute_loss(
        self, model: nn.Module, inputs: TrainingBatch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """This microbatch's share of the step's loss; the sum over microbatches and ranks is the step's loss."""
        if return_outputs:
            raise ValueError("SDPOTrainer returns a loss only; there are no outputs to return.")
        settings, parts = self.args.objective, self.teacher.parts if self.teacher else []
        head = find_head(self.accelerator.unwrap_model(model))
        loss_of = partial(objective, batch=inputs, settings=settings)
        number = 0 if self.completions is None else self.completions.num_alternatives(inputs)
        loss, terms = forward.token_loss(
            model, head, inputs, settings, loss_of, teacher=parts, num_alternatives=number
        )
        if model.training or inputs.completion_ids.numel():  # not an idle batch
            self.metrics["train" if model.training else "eval"].add_microbatch(loss, terms, inputs)
        if self.completions is not None:
            self.completions.observe(inputs, terms)
        if model.training:
            self.observe(loss, terms, inputs)
        # The wrapper averages gradients over ranks, and the counts are already those of all ranks.
        return loss.loss * self.accelerator.num_processes

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Mixed precision for teacher, reference and head too: only a prepared model has it by itself."""
        return self.accelerator.autocast()

    def training_step(self, model: nn.Module, inputs: TrainingBatch, num_items_in_batch: Any = None) -> Tensor:
        with self.clock.timed("train"):
            return super().training_step(model, inputs, num_items_in_batch)

    def _prepare_inputs(self, inputs: TrainingBatch) -> TrainingBatch:
        return inputs.to(self.args.device)

    def floating_point_ops(self, inputs: TrainingBatch) -> int:
        return super().floating_point_ops({self.model.main_input_name: inputs.student.ids})

    def _track_num_input_tokens(self, inputs: TrainingBatch) -> None:
        names = {self.model.main_input_name: inputs.student.ids, "attention_mask": inputs.student.segments >= 0}
        super()._track_num_input_tokens(names)

    # --- evaluation and logging -------------------------------------------------------------------

    def prediction_step(self, model: nn.Module, inputs: list[Example], *_: Any, **__: Any) -> tuple[None, None, None]:
        """Adds the evaluation metrics of a block; `evaluation_loop` makes the loss of their sums."""
        for batch in self.serve(self.collect(inputs, "eval")):
            with torch.no_grad(), self.compute_loss_context_manager():
                self.compute_loss(model, self._prepare_inputs(batch))
        return None, None, None

    def evaluation_loop(
        self, dataloader: BlockLoader, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        self.metrics["eval"].clear()
        self.place()
        num_prompts = len(cast(Sized, dataloader.dataset)) if has_length(dataloader) else None
        with self.progress.evaluation(num_prompts, prompts_per_block=self.prompts_per_eval_block):
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        values = self._drain("eval")
        values["loss"] = blend(
            values.get("self_distillation/policy_loss") or 0.0,
            values.get("self_distillation/distillation_loss") or 0.0,
            weight=self.args.distillation_weight,
        )
        named = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        return output._replace(metrics={**(output.metrics or {}), **named})

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs or "train_loss" in logs:  # a log of training, not of an evaluation
            logs = {**logs, **self._drain("train"), **self.clock.per_step()}
        super().log(logs, start_time)

    def _drain(self, phase: Phase) -> dict[str, Any]:
        values = merge(distributed.gather_values(self.metrics[phase].snapshot(), self.accelerator))
        self.metrics[phase].clear()
        if names := sorted(name for name, value in values.items() if not math.isfinite(value or 0.0)):
            self.diagnostics.tell_once("not_finite", step=self.state.global_step, names=", ".join(names))
        return values
