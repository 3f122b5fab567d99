"""What a run costs: its steps and samples, and the memory of one process. Arithmetic alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sdpo.chunk import CPU_CHUNK, DEVICE_CHUNK


@dataclass(frozen=True, slots=True)
class Schedule:
    """Counts of a run over all processes; those of an epoch are None where the number of prompts is not known.

    A block is one generation. `num_steps` None: neither `max_steps` nor the number of prompts is known.
    """

    prompts_per_block: int
    completions_per_block: int
    uses_per_block: int
    completions_per_step: int
    blocks_per_epoch: int | None
    steps_per_epoch: int | None
    num_steps: int | None
    num_blocks: int | None
    num_completions: int | None


def schedule(
    *,
    completions_per_block: int,
    num_generations: int,
    steps_per_generation: int,
    num_iterations: int,
    accumulation_steps: int,
    max_steps: int,
    num_epochs: float,
    num_prompts: int | None,
    drop_last: bool,
) -> Schedule:
    """As the trainer's loader cuts it: a block serves steps_per_generation * num_iterations microbatches."""
    prompts, uses = completions_per_block // num_generations, steps_per_generation * num_iterations
    blocks = steps_per_epoch = None
    if num_prompts is not None:
        blocks = num_prompts // prompts if drop_last else math.ceil(num_prompts / prompts)
        steps_per_epoch = max(1, math.ceil(blocks * uses / accumulation_steps))
    steps = max_steps if max_steps > 0 else None
    if steps is None and steps_per_epoch is not None:
        steps = math.ceil(num_epochs * steps_per_epoch)
    num_blocks = None if steps is None else _blocks_of(steps, blocks, uses, accumulation_steps)
    return Schedule(
        prompts_per_block=prompts,
        completions_per_block=completions_per_block,
        uses_per_block=uses,
        completions_per_step=completions_per_block // steps_per_generation * accumulation_steps,
        blocks_per_epoch=blocks,
        steps_per_epoch=steps_per_epoch,
        num_steps=steps,
        num_blocks=num_blocks,
        num_completions=None if num_blocks is None else num_blocks * completions_per_block,
    )


def _blocks_of(steps: int, blocks_per_epoch: int | None, uses: int, accumulation_steps: int) -> int:
    """Blocks sampled in so many steps. An epoch's last step takes what is left, and the next epoch a new block."""
    if blocks_per_epoch is None:
        return math.ceil(steps * accumulation_steps / uses)
    per_epoch = max(1, math.ceil(blocks_per_epoch * uses / accumulation_steps))
    whole, rest = divmod(steps, per_epoch)
    return whole * blocks_per_epoch + min(blocks_per_epoch, math.ceil(rest * accumulation_steps / uses))


# --- memory ----------------------------------------------------------------------------------------------------------

# Bytes an optimizer keeps a trained parameter, besides the parameter: (of the parameter's own size, plus fixed).
_OPTIMIZERS: dict[str, tuple[float, float]] = {
    "adamw_torch": (2, 0),
    "adamw_torch_fused": (2, 0),
    "adamw_8bit": (0, 2),
    "adamw_bnb_8bit": (0, 2),
    "paged_adamw_8bit": (0, 2),
    "paged_adamw_32bit": (0, 8),
    "sgd": (0, 0),
    "rmsprop": (1, 0),
    "adagrad": (1, 0),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory depends on. `itemsize`: bytes of a weight; `trained_itemsize`: of a trained parameter."""

    num_parameters: int
    num_trained: int
    itemsize: int
    trained_itemsize: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    key_value_size: int
    vocabulary_size: int
    is_head_trained: bool


@dataclass(frozen=True, slots=True)
class Load:
    """What a process holds and reads at once: rows of a block and of a microbatch, and the longest of each text."""

    block_rows: int
    batch_rows: int
    prompt_length: int
    teacher_prompt_length: int
    completion_length: int


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the memory in bytes, and how it comes about."""

    name: str
    size: int
    formula: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Parts that are there all the time, and of the two phases that follow each other: sampling and training."""

    always: list[Part]
    sampling: list[Part]
    training: list[Part]
    unknown: list[str] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        phases = (sum(part.size for part in parts) for parts in (self.sampling, self.training))
        return sum(part.size for part in self.always) + max(phases)


def memory(
    model: ModelShape,
    load: Load,
    *,
    optimizer: str,
    teacher: str | None,
    teacher_itemsize: int | None,
    has_reference: bool,
    is_checkpointed: bool,
    activation_itemsize: int,
    is_sampled_elsewhere: bool,
    is_on_cpu: bool,
) -> Memory:
    """Of one process without sharding. `teacher`: its kind, None for none. Activations are an estimate.

    Counted by the largest sizes that the settings allow, so a run whose texts are shorter takes less.
    """
    n, trained = model.num_parameters, model.num_trained
    always = [
        Part("weights", n * model.itemsize, f"{_count(n)} parameters * {model.itemsize} B"),
        Part(
            "gradients",
            trained * model.trained_itemsize,
            f"{_count(trained)} trained * {model.trained_itemsize} B",
        ),
    ]
    unknown = []
    if optimizer in _OPTIMIZERS:
        times, fixed = _OPTIMIZERS[optimizer]
        each = times * model.trained_itemsize + fixed
        always.append(Part("optimizer", int(trained * each), f"{optimizer}: {_count(trained)} trained * {each:g} B"))
    else:
        unknown.append(f"states of the optimizer {optimizer}")
    always += _copies(model, teacher=teacher, teacher_itemsize=teacher_itemsize, has_reference=has_reference)
    sampling = [] if is_sampled_elsewhere else [_cache(model, load, activation_itemsize)]
    training = _training(
        model,
        load,
        has_teacher=teacher is not None,
        is_checkpointed=is_checkpointed,
        itemsize=activation_itemsize,
        is_on_cpu=is_on_cpu,
    )
    return Memory(always, sampling, training, unknown)


def _copies(
    model: ModelShape, *, teacher: str | None, teacher_itemsize: int | None, has_reference: bool
) -> list[Part]:
    """Weights besides the student's; a copy has trained parameters alone, all others are shared."""
    trained, parts = model.num_trained, []
    itemsize = teacher_itemsize or model.trained_itemsize
    if teacher in ("ema", "base", "trust_region"):
        parts.append(Part("teacher", trained * itemsize, f"{teacher}: {_count(trained)} trained * {itemsize} B"))
    if teacher == "ema" and itemsize != 4:
        parts.append(Part("teacher's average", trained * 4, f"{_count(trained)} trained * 4 B, float32"))
    is_kept_by_teacher = teacher in ("base", "trust_region") and teacher_itemsize is None
    if has_reference and not is_kept_by_teacher:
        size = model.trained_itemsize
        parts.append(Part("reference policy", trained * size, f"{_count(trained)} trained * {size} B"))
    return parts


def _cache(model: ModelShape, load: Load, itemsize: int) -> Part:
    """Keys and values of a block while it is sampled."""
    length, layers, size = load.prompt_length + load.completion_length, model.num_layers, model.key_value_size
    return Part(
        "keys and values",
        load.block_rows * length * layers * 2 * size * itemsize,
        f"{load.block_rows} rows * {length} tokens * {layers} layers * 2 * {size} * {itemsize} B",
    )


def _training(
    model: ModelShape, load: Load, *, has_teacher: bool, is_checkpointed: bool, itemsize: int, is_on_cpu: bool
) -> list[Part]:
    """Activations of a microbatch, and what the chunked head holds."""
    hidden, rows = model.hidden_size, load.batch_rows
    tokens = rows * (load.prompt_length + load.completion_length)
    # Of a layer and a token: two norms, query, attention's output and its projection, residual; keys and values; gate,
    # up, their product and its activation. Attention by blocks keeps no matrix of scores.
    layer = 6 * hidden + 2 * model.key_value_size + 4 * model.intermediate_size
    kept = model.num_layers * hidden + layer if is_checkpointed else model.num_layers * layer
    how = "inputs of the layers and one layer's inside" if is_checkpointed else "inside of every layer"
    parts = [
        Part("activations", tokens * kept * itemsize, f"about, {how}: {tokens} tokens * {_count(kept)} * {itemsize} B")
    ]
    if has_teacher:
        read = rows * (load.teacher_prompt_length + load.completion_length)
        formula = f"about, one layer: {read} tokens * {_count(layer)} * {itemsize} B"
        parts.append(Part("teacher's forward", read * layer * itemsize, formula))
    if model.is_head_trained:
        numbers = model.vocabulary_size * hidden
        parts.append(Part("gradient of the head", numbers * 4, f"{model.vocabulary_size} * {hidden} * 4 B, float32"))
    limit = CPU_CHUNK if is_on_cpu else DEVICE_CHUNK
    chunk = min(math.ceil(limit / model.vocabulary_size), rows * load.completion_length)
    number = 4 if has_teacher else 3
    parts.append(
        Part(
            "a chunk of logits",
            chunk * model.vocabulary_size * number * 4,
            f"{chunk} tokens * {model.vocabulary_size} * {number} * 4 B, whatever the length",
        )
    )
    return parts


def _count(number: int) -> str:
    """A count in few characters."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)
