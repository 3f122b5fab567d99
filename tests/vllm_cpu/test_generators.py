"""The policy's weights in a real engine: colocated and served, tied and untied, whole models and adapters."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from conftest import Server, free_port, make_policy, policy_logps
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from sdpo import SDPOConfig, SDPOTrainer
from sdpo.collate import served_grid
from sdpo.forward import token_loss
from sdpo.generation import build_generator
from sdpo.generation.client import Client
from sdpo.heads import find_head
from sdpo.losses.objective import objective
from sdpo.served_teacher import sequence_of, taught_rows
from sdpo.types import Completion, Served, ServedToken

pytestmark = pytest.mark.vllm

PROBE = [9, 12, 30, 17, 21, 11]
LENGTH = 6


def lora(model: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    ).eval()


def settings(folder: Path, **changes: Any) -> SDPOConfig:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "use_vllm": True,
        "vllm_check_weights": True,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": LENGTH,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",  # no rounding error is made as large as a gradient
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        **changes,
    }
    if values.get("vllm_mode", "colocate") == "colocate" and values["use_vllm"]:
        values.setdefault("vllm_max_model_length", 128)
        values.setdefault("vllm_engine_kwargs", {"enforce_eager": True, "num_gpu_blocks_override": 64})
    return SDPOConfig(**values)


def of_server(server: Server, **changes: Any) -> dict[str, Any]:
    return {
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "vllm_server_timeout": 120.0,
        "vllm_group_port": free_port(),
        **changes,
    }


def generator_of(model: Any, tokenizer: Any, args: SDPOConfig) -> Any:
    return build_generator(
        lambda: model,
        accelerator=Accelerator(cpu=True),
        processing_class=tokenizer,
        tokenizer=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        sampling=args.sampling,
        engine=args.engine,
    )


def disturb(model: Any) -> None:
    """What an optimizer step does, only more."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))


def gap(model: Any, generator: Any) -> float:
    found = torch.tensor(generator._prompt_logps(PROBE))
    return float((found - policy_logps(model, PROBE)).abs().max())


def check_sync(model: Any, generator: Any) -> None:
    """Close before a step, far after one that is not sent, close after it is sent."""
    generator.sync(0)
    assert gap(model, generator) < 1e-4
    disturb(model)
    assert gap(model, generator) > 1e-1
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    generator.sync(0)  # the weights themselves say that they have changed
    assert gap(model, generator) < 1e-4
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("adapt", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_colocated_engine_has_the_weights_it_was_sent(
    tokenizer: Any, tmp_path: Path, is_tied: bool, adapt: bool
) -> None:
    model = make_policy(tokenizer, is_tied=is_tied)
    model = lora(model) if adapt else model
    args = settings(tmp_path)
    generator = generator_of(model, tokenizer, args)
    check_sync(model, generator)
    check_samples(model, generator, tokenizer)


@pytest.mark.parametrize("adapt", [False, True], ids=["full", "lora"])
def test_a_server_has_the_weights_it_was_sent(tokenizer: Any, tmp_path: Path, server: Server, adapt: bool) -> None:
    check_server(server, tokenizer, tmp_path, is_tied=True, adapt=adapt)


def test_a_server_whose_update_was_left_half_done_takes_the_next(
    tokenizer: Any, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_policy(tokenizer, is_tied=True, seed=4)
    server.post("/start_weight_update", {})  # by a trainer that died
    generator = generator_of(model, tokenizer, settings(tmp_path, **of_server(server)))
    generator.sync(0)
    assert gap(model, generator) < 1e-4

    post, late = Client._post, []

    def slow(self: Client, url: str, **arguments: Any) -> Any:
        """The server has taken the weights, but says so after the time limit."""
        answer = post(self, url, **arguments)
        if url.endswith("/update_weights") and not late:
            late.append(url)
            raise ConnectionError("no answer in time")
        return answer

    monkeypatch.setattr(Client, "_post", slow)
    disturb(model)
    generator.sync(1)
    assert late and gap(model, generator) < 1e-4
    generator.client.close_communicator()


def test_a_server_of_a_model_with_untied_embeddings_too(tokenizer: Any, tmp_path: Path, untied_server: Server) -> None:
    for adapt in (False, True):  # one after the other, on one server
        check_server(untied_server, tokenizer, tmp_path, is_tied=False, adapt=adapt)


def check_server(server: Server, tokenizer: Any, folder: Path, *, is_tied: bool, adapt: bool) -> None:
    model = make_policy(tokenizer, is_tied=is_tied, seed=3)
    model = lora(model) if adapt else model
    generator = generator_of(model, tokenizer, settings(folder, **of_server(server)))
    check_sync(model, generator)
    check_samples(model, generator, tokenizer)
    generator.client.close_communicator()


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_colocated_engine_takes_the_adapter_as_it_is(tokenizer: Any, tmp_path: Path, is_tied: bool) -> None:
    torch.manual_seed(1)
    # Ranks and scales that differ between layers, and joined layers of which one part has no adapter.
    patterns = {"rank_pattern": {"q_proj": 9}, "alpha_pattern": {"v_proj": 3}}
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **patterns)
    model = get_peft_model(make_policy(tokenizer, is_tied=is_tied), config).eval()
    generator = generator_of(model, tokenizer, settings(tmp_path, vllm_lora_as_adapter=True))
    check_sync(model, generator)
    check_samples(model, generator, tokenizer)

    frozen = model.get_base_model().model.layers[0].self_attn.k_proj.weight
    frozen.data.add_(0.3)  # unseen: a change of `data` is not counted
    disturb(model)
    generator.settings = replace(generator.settings, check_weights=False)
    generator.sync(0)
    assert gap(model, generator) > 1e-1, "the model under the adapter is not sent with every push"
    with torch.no_grad():
        frozen.add_(0.3)  # seen
    generator.sync(0)
    assert gap(model, generator) < 1e-4


def check_samples(model: Any, generator: Any, tokenizer: Any) -> None:
    """Shapes, ends and the engine's own log-probs, of prompts with 3, 1 and 2 copies."""
    prompts = [[9, 12]] * 3 + [[30, 17, 21]] + [[11]] * 2
    found = generator.generate(prompts)
    assert len(found) == len(prompts)
    for prompt, completion in zip(prompts, found, strict=True):
        is_ended = completion.ids[-1] == tokenizer.eos_token_id
        assert completion.is_truncated == (not is_ended) and len(completion.ids) <= LENGTH
        expected = policy_logps(model, [*prompt, *completion.ids])[len(prompt) - 1 :]
        assert (torch.tensor(completion.sampled_logps) - expected).abs().max() < 1e-4


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """About half of the completions succeed."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def trainer_of(tokenizer: Any, args: SDPOConfig, *, adapt: bool = False) -> SDPOTrainer:
    model = make_policy(tokenizer, is_tied=True, seed=5)
    words = sorted(token for token in tokenizer.get_vocab() if token.isalpha())[:4]
    return SDPOTrainer(
        lora(model) if adapt else model,
        reward,
        args,
        train_dataset=Dataset.from_dict({"prompt": [f"{a} {b}" for a in words for b in words]}),
        processing_class=tokenizer,
    )


class Recorder:
    """A generator that writes down what another draws."""

    def __init__(self, inner: Any):
        self.inner, self.drawn = inner, []

    def sync(self, step: int) -> None:
        self.inner.sync(step)

    def generate(self, prompts: Any) -> list[Completion]:
        self.drawn.append(self.inner.generate(prompts))
        return self.drawn[-1]


class Replay:
    """A generator that draws what is written down, as transformers would: with no log-probs of its own."""

    def __init__(self, drawn: list[list[Completion]]):
        self.drawn = list(drawn)

    def sync(self, step: int) -> None:
        pass

    def generate(self, prompts: Any) -> list[Completion]:
        return [replace(completion, sampled_logps=None) for completion in self.drawn.pop(0)]


def losses_of(trainer: SDPOTrainer) -> list[float]:
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_run_has_the_losses_it_has_with_transformers(
    tokenizer: Any, tmp_path: Path, server: Server, mode: str
) -> None:
    place = of_server(server) if mode == "server" else {}
    changes = {"distillation_weight": 0.5, "max_steps": 3, "num_generations_eval": 2}
    trainer = trainer_of(tokenizer, settings(tmp_path / "a", **place, **changes))
    trainer.generator = recorder = Recorder(trainer.generator)
    found = losses_of(trainer)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert all(abs(log["sampling/importance_weight"] - 1) < 1e-4 for log in logs)
    metrics = trainer.evaluate(trainer.train_dataset)
    assert math.isfinite(metrics["eval_loss"])
    plain = trainer_of(tokenizer, settings(tmp_path / "b", use_vllm=False, vllm_check_weights=False, **changes))
    plain.generator = Replay(recorder.drawn)
    expected = losses_of(plain)
    assert len(found) == 3 and any(abs(loss) > 1e-2 for loss in found)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4


@pytest.mark.parametrize(
    ("mode", "topk", "add_tail", "support"),
    [
        ("sampled_token", None, False, "teacher"),
        ("topk_logits", 5, False, "teacher"),
        ("topk_logits", 5, True, "teacher"),
        ("topk_logits", 5, False, "student"),
        ("topk_logits", 5, True, "student"),
    ],
)
def test_a_served_teacher_gives_the_losses_of_a_local_one(
    tokenizer: Any, tmp_path: Path, server: Server, mode: str, topk: int | None, add_tail: bool, support: str
) -> None:
    changes = {
        "use_teacher_server": True,
        "teacher_server_support": support,
        "teacher_model_kind": "live",
        "distillation_mode": mode,
        "distillation_topk": topk,
        "distillation_add_tail": add_tail,
        "num_iterations": 2,  # the second use is scored under new weights
        "max_steps": 4,
    }
    trainer = trainer_of(tokenizer, settings(tmp_path, **of_server(server), **changes))
    seen = []
    compute = trainer.compute_loss

    def both(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        loss = compute(model, inputs, *rest, **named)
        # On the student's support, what is done without a server; on the teacher's, the same with a local forward.
        is_students = support == "student"
        local = None if is_students else local_teacher(model, inputs, topk)
        args = trainer.args.objective
        terms, _ = token_loss(
            model,
            find_head(model),
            replace(inputs, served=local),
            args,
            lambda terms: objective(terms, inputs, args),
            teacher=[(model, 1.0)] if is_students else [],
        )
        seen.append((loss.item(), terms.loss.item()))
        return loss

    trainer.compute_loss = both
    trainer.train()
    assert len(seen) == 4 and any(abs(served) > 1e-2 for served, _ in seen)
    assert max(abs(served - local) for served, local in seen) < 1e-4
    trainer.generator.client.close_communicator()


@torch.no_grad()
def local_teacher(model: Any, batch: Any, topk: int | None) -> Served:
    """What the server should say, by a forward of the current policy on each teacher prompt."""
    rows = {}
    for row in taught_rows(batch):
        prompt, completion = sequence_of(batch, row)
        logps = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        best = logps.topk(topk or 0)
        rows[row] = [
            ServedToken(float(logps[i, token]), best.indices[i].tolist(), best.values[i].tolist())
            for i, token in enumerate(completion)
        ]
    return served_grid(batch.completion_ids.shape, rows, topk=topk or 0)


def test_a_server_started_again_in_mid_run_is_found_and_given_the_weights(
    tokenizer: Any, tmp_path: Path, server: Server
) -> None:
    args = settings(tmp_path, **of_server(server, vllm_server_timeout=200.0), max_steps=4)
    trainer = trainer_of(tokenizer, args)
    trainer.generator = recorder = Recorder(trainer.generator)
    restarts = []

    def restart() -> None:
        server.kill()
        time.sleep(1)
        server.start()

    generate = recorder.inner.generate

    def broken(prompts: Any) -> list[Completion]:
        if trainer.state.global_step == 2 and not restarts:
            restarts.append(threading.Thread(target=restart))
            restarts[0].start()
            time.sleep(0.5)  # the server is gone, and the weights of step 2 with it
        return generate(prompts)

    recorder.inner.generate = broken
    found = losses_of(trainer)
    assert restarts and trainer.state.global_step == 4 and len(found) == 4
    weights = [log["sampling/importance_weight"] for log in trainer.state.log_history if "loss" in log]
    assert all(w is None or abs(w - 1) < 1e-4 for w in weights), "drawn with the right weights"
    recorder.inner.sync(4)
    assert gap(trainer.model, recorder.inner) < 1e-4
    plain = trainer_of(tokenizer, settings(tmp_path / "b", use_vllm=False, vllm_check_weights=False, max_steps=4))
    plain.generator = Replay(recorder.drawn)
    assert max(abs(a - b) for a, b in zip(found, losses_of(plain), strict=True)) < 1e-4
    recorder.inner.client.close_communicator()


def test_a_server_that_stays_away_ends_the_run_with_a_checkpoint_that_can_be_used(
    tokenizer: Any, tmp_path: Path, server: Server
) -> None:
    changes = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    args = settings(tmp_path, **of_server(server, vllm_server_timeout=5.0), **changes)
    trainer = trainer_of(tokenizer, args)
    generate = trainer.generator.generate

    def broken(prompts: Any) -> list[Completion]:
        if trainer.state.global_step == 1:
            server.kill()
        return generate(prompts)

    trainer.generator.generate = broken
    with pytest.raises(ConnectionError, match="vllm_server_timeout=5"):
        trainer.train()
    server.start()
    args = settings(tmp_path, **of_server(server), **changes)
    again = trainer_of(tokenizer, args)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3
    again.generator.client.close_communicator()


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_generation_kwargs_reach_the_engine(tokenizer: Any, tmp_path: Path, server: Server, mode: str) -> None:
    model = make_policy(tokenizer, is_tied=True)
    place = of_server(server) if mode == "server" else {}
    kwargs = {"seed": 7, "min_tokens": LENGTH, "temperature": 0.5}
    word = next(token for token in sorted(tokenizer.get_vocab()) if token.isalpha())
    choice = settings(tmp_path, **place, generation_kwargs={"structured_outputs": {"choice": [word]}})
    args = settings(tmp_path, **place, generation_kwargs=kwargs)
    generator = generator_of(model, tokenizer, args)
    generator.sync(0)
    first, second = (generator.generate([[9, 12]] * 2) for _ in range(2))
    assert [c.ids for c in first] == [c.ids for c in second], "seeded"
    assert all(len(c.ids) == LENGTH for c in first)

    word = next(token for token in sorted(tokenizer.get_vocab()) if token.isalpha())
    generator.sampling = choice.sampling
    [structured] = generator.generate([[9, 12]])
    assert tokenizer.decode(structured.ids, skip_special_tokens=True).strip() == word and not structured.is_truncated


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_stop_string_ends_a_completion(tokenizer: Any, tmp_path: Path, server: Server, mode: str) -> None:
    place = of_server(server) if mode == "server" else {}
    changes = {"mask_truncated_completions": True, "distillation_weight": 0.5}
    trainer = trainer_of(tokenizer, settings(tmp_path, **place, **changes, generation_kwargs={"seed": 7}))
    example = trainer.train_dataset[0]
    whole = trainer.roll_out([example], "train")[0]
    assert whole.completion.is_truncated and len(whole.completion.ids) == LENGTH
    texts = [tokenizer.decode(whole.completion.ids[: i + 1]) for i in range(LENGTH)]
    for place_of_stop in (2, LENGTH - 1):
        stop = tokenizer.decode(whole.completion.ids[place_of_stop])
        end = next(i for i, text in enumerate(texts) if stop in text) + 1
        trainer.generator.sampling = replace(trainer.args.sampling, generation_kwargs={"seed": 7, "stop": [stop]})
        found = trainer.roll_out([example], "train")[0]
        # Its tokens, those of the stop string with them; also where it ends at the limit it is not cut.
        assert found.completion.ids == whole.completion.ids[:end] and not found.completion.is_truncated
        assert found.text == whole.text[: len(found.text)] and found.text.endswith(stop)
        assert len(found.completion.sampled_logps) == end
        expected = policy_logps(trainer.model, [*found.prompt_ids, *found.completion.ids])[len(found.prompt_ids) - 1 :]
        assert (torch.tensor(found.completion.sampled_logps) - expected).abs().max() < 1e-4
        [batch] = trainer.collect([example] * 4, "train")
        assert batch.completion_mask[0].sum() == end == batch.policy_mask[0, :end].sum()
    if mode == "server":
        trainer.generator.client.close_communicator()
