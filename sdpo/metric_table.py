"""The metrics that a run logs: name, meaning and unit, in the order in which they are shown.

docs/metrics.md is written from this table, and a test holds it against what runs log.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """A logged number. `<name>` in its name stands for that of a reward function; `meaning` says when it is logged."""

    name: str
    meaning: str
    unit: str


class MetricSection(NamedTuple):
    """Metrics under one heading, and what holds for all of them."""

    heading: str
    intro: str
    metrics: tuple[Metric, ...]


_LOSS = (
    Metric(
        "self_distillation/distillation_loss",
        "divergence of student and teacher, importance weights included, reduced by `loss_type`. In sampled-token "
        "mode an estimate of KL(student, teacher), which can be negative. Where `distillation_weight` is above 0",
        "nats",
    ),
    Metric(
        "self_distillation/policy_loss",
        "clipped surrogate, with vLLM times its importance weight, plus beta times the KL, reduced by `loss_type`. "
        "About 0 in the first use of a block, whatever is learned. Where `distillation_weight` is below 1",
        "advantage units, and nats for the KL",
    ),
    Metric(
        "kl",
        "KL of the policy to the reference, k3 estimate, mean over policy tokens. Where `beta` is above 0",
        "nats",
    ),
    Metric(
        "policy/clip_fraction",
        "policy tokens whose ratio was clipped and so has no gradient. Where a block outlives a step",
        "share",
    ),
    Metric(
        "credit/mean",
        "log teacher - log student of the sampled token, mean over distilled tokens. With 'topk_logits' only where "
        "`distillation_add_tail` is on",
        "nats",
    ),
    Metric(
        "credit/positive_fraction",
        "distilled tokens that the teacher finds likelier than the student does; there where `credit/mean` is",
        "share",
    ),
    Metric(
        "credit/sparsity",
        "distilled tokens whose credit is below 0.1 nats in size: student and teacher agree on them; likewise",
        "share",
    ),
    *(
        Metric(
            f"credit/q{share:02d}",
            f"credit that {share} % of the distilled tokens stay below, to 5 %; likewise",
            "nats",
        )
        for share in (5, 25, 50, 75, 95)
    ),
    Metric("entropy", "entropy of the student's next-token distribution at the tokens of the terms computed", "nats"),
)
_SAMPLER = (
    Metric(
        "sampling/logp_difference",
        "size of log-prob of the trainer less that of vLLM, mean over the tokens that vLLM gave one of",
        "nats",
    ),
    Metric("sampling/importance_weight", "weight of a token's loss, truncated or masked, mean", "ratio"),
    Metric(
        "sampling/cut_fraction",
        "tokens whose ratio is above `vllm_importance_sampling_cap`, so that it was truncated or masked; with a "
        "'sequence' mode, tokens of such completions",
        "share",
    ),
    Metric(
        "sampling/unknown_fraction",
        "tokens that vLLM gave no finite log-prob of; their own ratio counts as 1",
        "share",
    ),
)
_REWARDS = (
    Metric("reward", "weighted reward, mean over completions", "reward"),
    Metric("self_distillation/reward_mean", "the same", "reward"),
    Metric("reward_std", "standard deviation in a group, mean over groups", "reward"),
    Metric("self_distillation/group_reward_std_mean", "the same", "reward"),
    Metric("self_distillation/reward_std", "standard deviation over a block, mean over blocks", "reward"),
    Metric("self_distillation/reward_min", "lowest since the last log", "reward"),
    Metric("self_distillation/reward_max", "highest since the last log", "reward"),
    Metric(
        "self_distillation/flat_group_fraction",
        "groups whose standard deviation is at most `diagnostics_flat_tolerance`",
        "share of groups",
    ),
    Metric(
        "rewards/<name>/mean",
        "what the reward function of that name returned, unweighted, mean over completions it applied to",
        "reward",
    ),
    Metric("self_distillation/rewards/<name>", "the same", "reward"),
)
_CONTEXTS = (
    Metric("self_distillation/success_group_fraction", "groups with a success", "share of groups"),
    Metric(
        "self_distillation/lone_success_fraction",
        "groups with exactly one; it has no demonstration for itself",
        "share of groups",
    ),
    Metric(
        "self_distillation/success_sample_fraction",
        "rows shown a success, of a sibling or an earlier one",
        "share of rows",
    ),
    Metric(
        "self_distillation/earlier_success_fraction",
        "rows shown an earlier one (`demonstration_buffer_size`)",
        "share of rows",
    ),
    Metric(
        "self_distillation/solution_column_fraction",
        "rows shown the dataset's solution (`demonstration_column`)",
        "share of rows",
    ),
    Metric("self_distillation/feedback_available_fraction", "rows with feedback text", "share of rows"),
    Metric("self_distillation/feedback_used_fraction", "rows shown it", "share of rows"),
    Metric(
        "self_distillation/reprompt_sample_fraction",
        "rows whose teacher is shown anything: those that are distilled, unless `mask_truncated_completions` leaves "
        "them out",
        "share of rows",
    ),
    Metric(
        "teacher_prompts/shortened_fraction",
        "rows whose context was shortened, or left out because nothing of it fits",
        "share of rows",
    ),
)
_LENGTHS = (
    Metric("completions/mean_length", "mean over all completions", "tokens"),
    Metric("completions/min_length", "shortest since the last log", "tokens"),
    Metric("completions/max_length", "longest since the last log", "tokens"),
    Metric("completions/mean_terminated_length", "mean over those that ended by themselves", "tokens"),
    Metric("completions/min_terminated_length", "shortest of those", "tokens"),
    Metric("completions/max_terminated_length", "longest of those", "tokens"),
    Metric("completions/clipped_ratio", "completions cut at `max_completion_length`", "share"),
    Metric("prompts/truncated_fraction", "completions whose student prompt was cut to `max_prompt_length`", "share"),
)
_TIME = (
    Metric("time/generation", "tokenizing prompts, sampling, decoding", "seconds a step"),
    Metric("time/scoring", "reward functions", "seconds a step"),
    Metric("time/contexts", "gathering groups, advantages, teacher prompts", "seconds a step"),
    Metric("time/collation", "padding", "seconds a step"),
    Metric("time/logps", "log-probs of the old policy and of the reference", "seconds a step"),
    Metric("time/teacher_server", "scoring of the teacher by a server", "seconds a step"),
    Metric("time/train", "forward and backward passes of student and teacher, not the optimizer", "seconds a step"),
    Metric(
        "time/sampled_tokens_per_second",
        "tokens of this process's completions, in each second of the stage `time/generation`",
        "tokens a second",
    ),
)

METRICS: tuple[MetricSection, ...] = (
    MetricSection("Loss", "Of the tokens that the term trains on; each before its weight.", _LOSS),
    MetricSection(
        "Sampler and trainer",
        "Of the tokens of the terms computed, where `vllm_importance_sampling_correction` acts.",
        _SAMPLER,
    ),
    MetricSection("Rewards", "Of whole blocks. Rows without a valid reward are in none of these.", _REWARDS),
    MetricSection(
        "Teacher contexts",
        "Of whole blocks. What a row is shown is counted after contexts are shortened to `max_reprompt_len`: one of "
        "which nothing fits is not shown.",
        _CONTEXTS,
    ),
    MetricSection("Prompts and completions", "Lengths count the end-of-sequence token.", _LENGTHS),
    MetricSection(
        "Time",
        "Wall seconds of the stages, divided by the optimizer steps that this `train()` began since its last log, of "
        "this process. On an accelerator work is queued, so a stage may be charged for waiting for the one before it. "
        "Blocks of an evaluation since the last log are included.",
        _TIME,
    ),
)
