"""Values that pass between the stages of a step. All are frozen: a stage returns a new value.

Letters: B rows of a microbatch, S sequences, L their length, P prompt, Q teacher prompt, T completion, V vocabulary,
K support, G group. A *row* is one completion. A *block* is all rows of one generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

Message = dict[str, Any]
Prompt = str | list[Message]
Phase = Literal["train", "eval"]
Report = Callable[[int, int], None]
"""Told how much of a stage is done: completions and their tokens, or rewards and the functions that have finished."""

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
ImportanceSamplingLevel = Literal["token", "sequence"]
DistillationMode = Literal["sampled_token", "full_logits", "topk_logits"]
SamplerCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
TeacherKind = Literal["ema", "live", "base", "trust_region"]
ScaleRewards = Literal["group", "batch", "none"]
DemonstrationSelection = Literal["first", "random", "shortest", "best"]
DemonstrationSource = Literal["sibling", "earlier", "column"]


class Score(NamedTuple):
    """What the environment says about one completion.

    `reward` is a number, or None where the function does not apply. `feedback` is the text about that very attempt,
    shown to the teacher when `include_environment_feedback=True`; None or an empty string where there is none.
    """

    reward: float | None
    feedback: str | None = None


# --- frozen views of SDPOConfig, so that pure layers need not know the config ---------------------


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How completions are drawn. `temperature` also divides the logits of every log-prob that is trained on."""

    max_completion_length: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    repetition_penalty: float
    cache_implementation: str | None
    generation_kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Where the vLLM engine is and how it is started. None of it decides what is sampled."""

    mode: Literal["colocate", "server"]
    model_impl: str
    enable_sleep_mode: bool
    server_url: str
    server_timeout: float
    group_port: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    max_model_length: int | None
    trust_remote_code: bool
    engine_kwargs: Mapping[str, Any]
    lora_as_adapter: bool
    check_weights: bool


@dataclass(frozen=True, slots=True)
class RepromptSettings:
    """How the teacher's prompt is made. Field names are those of `SDPOConfig`."""

    use_successful_as_teacher: bool
    demonstration_selection: DemonstrationSelection
    demonstration_buffer_size: int
    demonstration_column: str | None
    success_reward_threshold: float
    dont_reprompt_on_self_success: bool
    max_reprompt_len: int
    reprompt_template: str
    solution_template: str
    feedback_template: str
    include_environment_feedback: bool
    environment_feedback_only_without_solution: bool
    remove_thinking_from_demonstration: bool


@dataclass(frozen=True, slots=True)
class ObjectiveSettings:
    """What is minimized. Field names are those of `SDPOConfig`, without the prefix `distillation_`.

    `sampler_correction`, `sampler_cap`: mode and cap of `vllm_importance_sampling_*`, and None for no correction.
    """

    loss_type: LossType
    max_completion_length: int
    temperature: float
    beta: float
    epsilon: float
    epsilon_high: float
    importance_sampling_level: ImportanceSamplingLevel
    weight: float
    alpha: float
    mode: DistillationMode
    topk: int | None
    is_clip: float | None
    add_tail: bool
    sampler_correction: SamplerCorrection | None
    sampler_cap: float


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """Which weights the teacher has and whether they move: t <- (1 - rate) t + rate s every `sync_steps` steps.

    `dtype`: of the weights it has for itself, None for the student's.
    """

    kind: TeacherKind
    update_rate: float
    sync_steps: int
    dtype: torch.dtype | None = None


# --- rows: Python values until `collate` ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Completion:
    """Token ids of one sampled answer, its end-of-sequence token included where it has one.

    `is_truncated`: it was cut at the length limit, so it has none. `sampled_logps`: the sampler's own log-prob of each
    token in nats (len = number of ids), NaN for one that it has none of; None where the sampler is the policy itself.
    """

    ids: list[int]
    is_truncated: bool
    sampled_logps: list[float] | None = None


class ServedToken(NamedTuple):
    """A token's log-prob under the served teacher, and the ids (K) and log-probs (K) of the support."""

    logp: float
    ids: list[int]
    logps: list[float]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion with its prompt. `group` numbers the prompts of a block over all ranks."""

    group: int
    prompt: Prompt
    prompt_ids: list[int]
    completion: Completion
    text: str
    """The completion without special tokens."""
    is_prompt_truncated: bool = False


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout and what the reward functions returned for it.

    `rewards`: by function name, None where a function gave none. `reward`: their weighted sum over the functions that
    gave one; None where none did (such a row is in no baseline and is never a success). `feedback`: text about this
    attempt, from the reward functions or else from the `privileged_context` column. `solution`: that of the dataset,
    from `demonstration_column`. `question`: what the teacher is asked in place of the last user turn, from the column
    `teacher_prompt`.
    """

    rollout: Rollout
    rewards: Mapping[str, float | None]
    reward: float | None
    feedback: str | None
    solution: str | None = None
    question: Prompt | None = None


@dataclass(frozen=True, slots=True)
class TeacherContext:
    """What the teacher of one row is shown besides the question.

    `source`: whose the demonstration is, a sibling's, an earlier success of the same prompt or the dataset's; None
    where there is none. `demonstration`: index of the sibling among the block's rows. `question`: the teacher's own
    form of the question, None for the student's. An uninformative row keeps its own prompt as the teacher's prompt, so
    that shapes never depend on luck.
    """

    demonstration: int | None = None
    demonstration_text: str = ""
    feedback: str = ""
    source: DemonstrationSource | None = None
    question: Prompt | None = None

    @property
    def has_texts(self) -> bool:
        """Whether there is something to fill the templates with."""
        return bool(self.demonstration_text or self.feedback)

    @property
    def is_informative(self) -> bool:
        return self.has_texts or self.question is not None

    def without_texts(self) -> TeacherContext:
        """The same context with at most one character of each text, enough to say that there is one."""
        question = None if self.question is None else ""
        shown, feedback = self.demonstration_text[:1], self.feedback[:1]
        return replace(self, demonstration_text=shown, feedback=feedback, question=question)


@dataclass(frozen=True, slots=True)
class Row:
    """Everything about one completion that training needs, before padding."""

    scored: ScoredRollout
    context: TeacherContext
    teacher_prompt_ids: list[int]
    is_context_shortened: bool
    advantage: float


# --- tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossCounts:
    """Denominators of one optimizer step, summed over all its microbatches and all ranks.

    A sequence counts where at least one of its tokens is in the mask of that term.
    """

    policy_tokens: float
    policy_sequences: float
    distillation_tokens: float
    distillation_sequences: float
    microbatches: float


@dataclass(frozen=True, slots=True)
class Sequences:
    """What a model reads for the rows of a microbatch, S sequences padded on the right to L tokens.

    A sequence is a prompt and one or more completions of it, without gaps: rows with the same prompt may share it.
    ids, positions (S, L); segments (S, L): 0 on the prompt, n on its n-th completion, -1 on padding. A token sees the
    prompt and its own segment up to itself. predictors (B, T): where in the flattened (S * L) the hidden state stands
    that predicts the token (b, t); 0 for a row that is in no sequence because nothing is computed for it.
    is_shared: some sequence holds several completions.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    predictors: Tensor
    is_shared: bool

    def to(self, device: torch.device | str) -> Sequences:
        """The same sequences with every tensor on `device`."""
        return _moved(self, device)


@dataclass(frozen=True, slots=True)
class Served:
    """The teacher of a microbatch as a server has scored it, in nats at temperature 1.

    logps (B, T) of the tokens; ids, support_logps (B, T, K) of the support, which is the teacher's own top k or the
    student's, K = 0 where none was asked for. Zeros where nothing is distilled.
    """

    logps: Tensor
    ids: Tensor
    support_logps: Tensor

    def to(self, device: torch.device | str) -> Served:
        """The same values with every tensor on `device`."""
        return _moved(self, device)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One microbatch.

    student: sequences of the rows with a token in some loss; teacher: of the rows with a token to distill.
    completion_ids (B, T); completion_mask (B, T) bool, true on the tokens that exist; policy_mask and
    distillation_mask (B, T) bool, the tokens each loss term trains on (subsets of completion_mask); advantages (B,);
    old_logps (B, T), log-probs under the weights that sampled the block, None where those are still the current ones;
    reference_logps (B, T), log-probs under the initial policy, None where beta is 0; sampled_logps (B, T), the
    sampler's own of every token that exists, not finite where it has none, None unless every row has them; served,
    what a server says of the teacher, None where the teacher is here; number, which of this rank's microbatches it is,
    the same at every use, None where completions are not logged; rows, what its rows were, as plain values (see
    `collate.plain`), for whoever has to say which one went wrong. Log-probs are of logits / temperature, in nats, 0 on
    padding; those computed here are 0 also where no loss needs them.
    """

    student: Sequences
    teacher: Sequences
    completion_ids: Tensor
    completion_mask: Tensor
    policy_mask: Tensor
    distillation_mask: Tensor
    advantages: Tensor
    old_logps: Tensor | None = None
    reference_logps: Tensor | None = None
    sampled_logps: Tensor | None = None
    counts: LossCounts | None = None
    served: Served | None = None
    number: int | None = None
    rows: Sequence[Mapping[str, Any]] = ()

    def to(self, device: torch.device | str) -> TrainingBatch:
        """The same batch with every tensor on `device`."""
        return _moved(self, device)


_Moved = TypeVar("_Moved", Sequences, Served, TrainingBatch)


def _moved(value: _Moved, device: torch.device | str) -> _Moved:
    found = {f.name: getattr(value, f.name) for f in fields(value)}
    changes: dict[str, Any] = {n: v.to(device) for n, v in found.items() if isinstance(v, Tensor | Sequences | Served)}
    return replace(value, **changes)


@dataclass(slots=True)
class Block:
    """The microbatches of one generation, and how many uses of them are over."""

    batches: list[TrainingBatch]
    num_used: int = 0

    def next(self) -> TrainingBatch:
        batch = self.batches[self.num_used % len(self.batches)]
        self.num_used += 1
        return batch


@dataclass(frozen=True, slots=True)
class Alternatives:
    """What student and teacher would rather say at the tokens (B, T), for the log of completions.

    student_ids, teacher_ids (B, T, K): the likeliest tokens of each; student_logps, teacher_logps (B, T, K): their
    log-probs, of logits / temperature, in nats. credit (B, T): log teacher - log student of the sampled token, in
    every mode. Zeros where nothing is distilled. A served teacher's are the likeliest of those that its server was
    asked about: perhaps fewer than the student's, or none.
    """

    student_ids: Tensor
    student_logps: Tensor
    teacher_ids: Tensor
    teacher_logps: Tensor
    credit: Tensor


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Per-token values of one microbatch, each (B, T), fp32, in nats, 0 where the token is in no loss.

    logps: log-prob of the sampled token under the student. divergence: distance of student and teacher on the
    support; None where the distillation weight is 0. entropy: of the student. credit: log teacher - log student of
    the sampled token; None where there is no teacher, or where it is read on a support alone. alternatives: only where
    they were asked for. What a loss does with logps and divergence is differentiated.
    """

    logps: Tensor
    entropy: Tensor
    divergence: Tensor | None = None
    credit: Tensor | None = None
    alternatives: Alternatives | None = None


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of one microbatch, already divided by the step's counts, and what to log of it.

    `sums` holds (numerator, denominator) pairs by metric name, as 0-dim tensors without gradient: the logged value is
    the sum of numerators over the sum of denominators, over microbatches, steps and ranks.
    """

    loss: Tensor
    sums: Mapping[str, tuple[Tensor, Tensor]]
