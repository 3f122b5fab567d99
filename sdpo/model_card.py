"""The model card: what a run made and how, as a README.md whose metadata the hub accepts.

Text and metadata are made of `CardFacts` alone. No fact is a place on the machine that trained: what may be one is
left out here, by `hub_id` and `shown`.
"""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from sdpo.config import SECTIONS, Derived
from sdpo.metric_table import METRICS

PAPER = "https://arxiv.org/abs/2601.20802"
PAPER_CITATION = """\
@article{huebotter2026sdpo,
  title   = {Reinforcement Learning via Self-Distillation},
  author  = {Jonas Huebotter and Frederike Luebeck and Lejs Behric and Anton Baumann and Marco Bagatella and
             Daniel Marta and Ido Hakimi and Idan Shenfeld and Thomas Kleine Buening and Carlos Guestrin and
             Andreas Krause},
  journal = {arXiv preprint arXiv:2601.20802},
  year    = {2026}
}"""

# Settings that say what was trained, by section of the config. Those of the others (logging, where a server is, what
# is handed to a loader) say how a machine was used, and may name it.
SHOWN_SECTIONS = ("Policy objective", "Distillation", "Teacher", "Reprompting", "Generation", "Training")
HIDDEN_SECTIONS = (
    "Changed defaults of TrainingArguments",
    "Diagnostics",
    "Log of completions",
    "Model and data",
    "vLLM",
)
SHOWN_BESIDES = (
    *("disable_dropout", "max_prompt_length", "shuffle_dataset", "use_vllm", "vllm_mode", "use_teacher_server"),
    *("teacher_server_support", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_cap", "learning_rate", "lr_scheduler_type", "warmup_steps", "num_train_epochs"),
    *("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16", "seed"),
)
NOT_A_CHOICE = ("cache_implementation", "ds3_gather_for_generation")  # of the shown sections: the same model without

# Of these metrics the card has the last value, in training and in evaluation.
SHOWN_METRICS = (
    "reward",
    "rewards/<name>/mean",
    "self_distillation/success_group_fraction",
    "completions/mean_length",
    "completions/clipped_ratio",
)
_ADAPTERS = {"lora": "LoRA", "ia3": "IA3"}  # as they write themselves
MAX_SHOWN = 240  # characters of a setting's value
_PATH = re.compile(r"/.+/|~/|[A-Za-z]:[/\\]|\\\\|\.{1,2}[/\\]|file:")
_SNAPSHOT = re.compile(r"[/\\]models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\][^/\\]+[/\\]?$")


class Setting(NamedTuple):
    """A setting of the run that is not its default; both values as they are shown."""

    name: str
    value: str
    default: str


class Result(NamedTuple):
    """The last value of a metric."""

    name: str
    value: float
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card is made of.

    `repo`, `base_model`, `datasets`: ids on the hub. `adapter`: kind of PEFT adapter, None for a whole model.
    `sources`: what the teacher was shown. `rewards`: names with weights. `step`: optimizer steps taken, of
    `num_completions` each. `best`: step and metric of the weights, where they are not the last ones.
    """

    title: str
    repo: str | None
    base_model: str | None
    architecture: str
    adapter: str | None
    is_chat: bool
    chat_template_kwargs: Mapping[str, Any]
    max_new_tokens: int
    trust_remote_code: bool
    dataset: str
    datasets: Sequence[str]
    tags: Sequence[str]
    language: Any
    license: str | None
    pipeline_tag: str
    weight: float
    sources: Sequence[str]
    settings: Sequence[Setting]
    rewards: Mapping[str, float]
    step: int
    num_completions: int
    num_generations: int
    temperature: float
    best: tuple[int, str] | None
    train_results: Sequence[Result]
    eval_results: Sequence[Result]
    versions: Mapping[str, str]


def model_card(facts: CardFacts) -> ModelCard:
    """The card, metadata and text."""
    sections = [
        f"# {facts.title}\n\n{_summary(facts)}",
        f"## Quick start\n\n{_quick_start(facts)}",
        f"## Training\n\n{_training(facts)}",
        f"## Results\n\n{_results(facts)}",
        f"## Framework versions\n\n{_versions(facts)}",
        f"## Citation\n\n{_citation(facts)}",
    ]
    return _with_metadata(facts, "\n\n".join(sections))


def short_card(title: str, *, tags: Sequence[str]) -> ModelCard:
    """A card of what is known in any case, for when the whole one cannot be made."""
    data = ModelCardData(tags=list(tags))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {title}\n\nTrained by self-distillation ([SDPO]({PAPER})).\n")


def _with_metadata(facts: CardFacts, body: str) -> ModelCard:
    is_adapter = facts.adapter is not None
    data = ModelCardData(
        base_model=facts.base_model,
        datasets=list(facts.datasets) or None,
        language=facts.language,
        library_name="peft" if is_adapter else "transformers",
        license=facts.license,
        pipeline_tag=facts.pipeline_tag,
        tags=[*facts.tags, *filter(None, [facts.adapter])],
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


# --- what may be said ------------------------------------------------------------------------------------------------


def hub_id(name: str) -> str | None:
    """The id on the hub that a name of a model or dataset is, None for anything else, as a path.

    A folder of the hub's cache has one too. Whether a name such as "models/mine" is a folder cannot be told from it.
    """
    if cached := _SNAPSHOT.search(name):
        name = f"{cached[1]}/{cached[2]}"
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name if name else None


def shown(value: Any) -> str:
    """A setting's value as Python writes it, not too long, with "..." for each path in it."""
    text = repr(_without_paths(getattr(value, "value", value)))
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _without_paths(value: Any) -> Any:
    if isinstance(value, str):
        return "..." if _PATH.match(value) else value
    if isinstance(value, Mapping):
        return {_without_paths(name): _without_paths(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_without_paths, value)) if type(value) in (list, tuple) else list(value)
    return value


def changed_settings(args: Any) -> list[Setting]:
    """Settings of `SHOWN_SECTIONS` and `SHOWN_BESIDES` that are not the default of the config's class."""
    fields = {f.name: f for f in dataclasses.fields(args)}
    names = [*_fields_of_sections(list(fields)), *SHOWN_BESIDES]
    found = []
    for name in names:
        if name not in fields or isinstance(getattr(args, name), Derived):  # a newer or older transformers
            continue
        value, default = getattr(args, name), _default_of(fields[name])
        is_resolved = default is None and value is False  # None: the machine decides
        if getattr(value, "value", value) != getattr(default, "value", default) and not is_resolved:
            found.append(Setting(name, shown(value), shown(default)))
    return found


def _fields_of_sections(names: Sequence[str]) -> list[str]:
    heads = {first: section for section, first in SECTIONS.items()}
    section, found = "", []
    for name in names:
        section = heads.get(name, section)
        if section in SHOWN_SECTIONS and name not in (*NOT_A_CHOICE, *SHOWN_BESIDES):
            found.append(name)
    return found


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


# --- results ---------------------------------------------------------------------------------------------------------


def train_results(history: Iterable[Mapping[str, Any]], *, until: int | None = None) -> list[Result]:
    """The shown metrics of the last entry of the log that has a reward, or of the last one up to step `until`."""
    entries = [e for e in history if e.get("reward") is not None and (until is None or e.get("step", 0) <= until)]
    return _chosen(entries[-1], prefix="") if entries else []


def eval_results(history: Iterable[Mapping[str, Any]], *, at: int | None = None) -> list[Result]:
    """The shown metrics and the loss of the last evaluation, or of the one at step `at`; of all its datasets."""
    entries = [e for e in history if any(name.startswith("eval_") for name in e)]
    step = entries[-1].get("step") if entries and at is None else at
    values = {name: value for e in entries if e.get("step") == step for name, value in e.items()}
    return _chosen(values, prefix="eval_")


def _chosen(values: Mapping[str, Any], *, prefix: str) -> list[Result]:
    """In the order of `SHOWN_METRICS`. With several datasets a name has that of its dataset behind the prefix."""
    meanings = {metric.name: metric.meaning for section in METRICS for metric in section.metrics}
    shapes = [(re.escape(name).replace("<name>", ".+"), meanings[name]) for name in SHOWN_METRICS]
    found = []
    for shape, meaning in [*shapes, *([("loss", "both terms of the loss, blended")] if prefix else [])]:
        full = re.compile(f"{prefix}(?:[^/]+_)?{shape}" if prefix else shape)
        named = [(name, value) for name, value in values.items() if full.fullmatch(name)]
        found += [Result(name, value, meaning) for name, value in named if isinstance(value, int | float)]
    return found


# --- text ------------------------------------------------------------------------------------------------------------


def _summary(facts: CardFacts) -> str:
    base = "a model that is not on the hub"
    if facts.base_model is not None:
        base = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"
    if facts.adapter is not None:
        kind = _ADAPTERS.get(facts.adapter, facts.adapter.replace("_", " "))
        what = f"{kind} adapter of {base}, trained"
    else:
        what = f"`{facts.architecture}` trained from {base}" if facts.base_model is None else f"{base}, trained"
    return f"{what} on {facts.dataset} by {_method(facts)}."


def _method(facts: CardFacts) -> str:
    if facts.weight == 0:
        return f"a policy gradient alone, with the trainer of [SDPO]({PAPER}) and its distillation switched off"
    teacher = f", a teacher that was shown {_either(facts.sources)}" if facts.sources else ""
    distilled = f"self-distillation ([SDPO]({PAPER})): the same model{teacher}, judged each token of its attempts"
    if facts.weight == 1:
        return distilled
    return f"{distilled}; a policy gradient has {1 - facts.weight:g} of the loss"


def _either(texts: Sequence[str]) -> str:
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _quick_start(facts: CardFacts) -> str:
    package, loader = ("peft", "AutoPeftModelForCausalLM")
    imports = f"from {package} import {loader}\nfrom transformers import AutoTokenizer"
    if facts.adapter is None:
        loader = "AutoModelForCausalLM"
        imports = f"from transformers import {loader}, AutoTokenizer"
    remote = ", trust_remote_code=True" if facts.trust_remote_code else ""
    name = '"."  # the folder with this file' if facts.repo is None else f'"{facts.repo}"'
    lines = [
        imports,
        "",
        f"name = {name}",
        f"tokenizer = AutoTokenizer.from_pretrained(name{remote})",
        f"model = {loader}.from_pretrained(name{remote})",
        *_prompt_lines(facts),
        f"output = model.generate(**inputs, max_new_tokens={facts.max_new_tokens})",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    code = "\n".join(lines)
    note = ""
    if facts.adapter is not None and facts.base_model is None:
        note = (
            "\n\nThe base model is not on the hub: `base_model_name_or_path` in `adapter_config.json` has to name a "
            "folder that holds it."
        )
    return f"```python\n{code}\n```{note}"


def _prompt_lines(facts: CardFacts) -> list[str]:
    if not facts.is_chat:
        return ['inputs = tokenizer("What is 17 + 25?", return_tensors="pt")']
    return [
        'messages = [{"role": "user", "content": "What is 17 + 25?"}]',
        "inputs = tokenizer.apply_chat_template(",
        "    messages,",
        "    add_generation_prompt=True,",
        "    return_dict=True,",
        '    return_tensors="pt",',
        *(f"    {text}," for text in _keywords(facts.chat_template_kwargs)),
        ")",
    ]


def _keywords(values: Mapping[str, Any]) -> list[str]:
    """Arguments of a call in Python. What Python cannot read again, and names that are no words of it, go."""
    plain = {name: value for name, value in values.items() if name.isidentifier() and not keyword.iskeyword(name)}
    return [f"{name}={value!r}" for name, value in plain.items() if _is_literal(value)]


def _is_literal(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_literal(inner) for pair in value.items() for inner in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_literal, value))
    return value is None or (type(value) in (str, int, float, bool) and _without_paths(value) == value)


def _training(facts: CardFacts) -> str:
    parts = []
    if facts.step:
        parts.append(f"{facts.step} optimizer steps of {facts.num_completions} completions, ")
        parts[-1] += f"{facts.num_generations} to a prompt."
    if facts.best is not None:
        parts.append(f"The weights are those of step {facts.best[0]}, the best by `{facts.best[1]}`.")
    weights = {name: "" if weight == 1 else f" (weight {weight:g})" for name, weight in facts.rewards.items()}
    named = ", ".join(f"`{name}`{weight}" for name, weight in weights.items())
    parts.append(f"The reward came from {named}." if named else "There was no reward function.")
    text = " ".join(parts)
    if not facts.settings:
        return f"{text} All settings had their defaults."
    rows = [(s.name, _as_code(s.value), _as_code(s.default)) for s in facts.settings]
    table = _table(("setting", "value", "default"), [(f"`{name}`", value, default) for name, value, default in rows])
    return f"{text} These settings are not the defaults of `SDPOConfig`:\n\n{table}"


def _results(facts: CardFacts) -> str:
    parts = []
    how = f"sampled at temperature {facts.temperature:g}"
    for results, of in ((facts.train_results, "training prompts"), (facts.eval_results, "evaluation prompts")):
        if results:
            rows = [(f"`{r.name}`", f"{r.value:.4g}", _in_a_cell(r.meaning)) for r in results]
            parts.append(f"On {of}, {how}:\n\n{_table(('metric', 'value', 'what it is'), rows)}")
    return "\n\n".join(parts) or "No metric was logged."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _as_code(text: str) -> str:
    """Inline code that holds the text whatever backticks there are in it, within a cell of a table."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return _in_a_cell(f"{fence}{space}{text}{space}{fence}")


def _in_a_cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")


def _versions(facts: CardFacts) -> str:
    return "\n".join(f"- {name} {version}" for name, version in facts.versions.items())


def _citation(facts: CardFacts) -> str:
    version = facts.versions.get("sdpo", "")
    library = (
        "@software{sdpo,\n"
        "  title   = {sdpo: reinforcement learning of language models by self-distillation},\n"
        f"  version = {{{version}}},\n"
        "  license = {Apache-2.0}\n"
        "}"
    )
    return f"The method, and the library that trained this model:\n\n```bibtex\n{PAPER_CITATION}\n\n{library}\n```"
