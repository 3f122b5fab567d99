"""What is pushed arrives, loads and resumes; what is written into a card, and when it is."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import TrainerFactory, make_model, make_tokenizer
from hub_stand_in import Hub, problems_of
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import filter_repo_objects
from peft import IA3Config, LoraConfig
from transformers.trainer_utils import HubStrategy

from sdpo import SDPOTrainer, hub
from sdpo.checkpoint import REPLACED, UNFINISHED

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
IA3 = IA3Config(target_modules=["v_proj"], feedforward_modules=[])
QUESTION = [{"role": "user", "content": "w1 w2"}]


class Pushed(NamedTuple):
    found: dict[str, Any]
    hub: Hub
    log: str
    folder: Path

    def files(self, name: str) -> dict[str, bytes]:
        return self.hub.repositories[f"tester/{name}"].files


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    """The runs of pushed.py, and what a hub on this machine had of them."""
    folder, stand_in = tmp_path_factory.mktemp("pushed"), Hub()
    script = Path(__file__).with_name("pushed.py")
    environment = {
        **os.environ,
        "HF_ENDPOINT": stand_in.url,
        "HF_HOME": str(folder / "home"),
        "HF_TOKEN": "hf_y",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(script.parent.parent),
    }
    command = [sys.executable, str(script), str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    stand_in.shutdown()
    assert result.returncode == 0, result.stderr
    return Pushed(json.loads(result.stdout.splitlines()[-1]), stand_in, result.stdout + result.stderr, folder)


def test_a_pushed_model_is_loaded_from_the_hub_as_it_was(pushed: Pushed) -> None:
    assert pushed.found["whole"]["loads"]
    assert pushed.hub.repositories["tester/whole"].messages[-1] == "End of training"


def test_a_pushed_checkpoint_resumes_as_the_straight_run(pushed: Pushed) -> None:
    assert pushed.found["whole"]["resumes"]


def test_a_pushed_adapter_is_loaded_with_its_base_model(pushed: Pushed) -> None:
    assert pushed.found["adapter"]["loads"]
    card = ModelCard(pushed.files("adapter")["README.md"].decode())
    assert (card.data.library_name, card.data.base_model) == ("peft", "tester/base")


@pytest.mark.parametrize("name", ["whole", "adapter"])
def test_the_quick_start_of_a_pushed_card_runs(pushed: Pushed, name: str) -> None:
    assert pushed.found[name]["prints"] == pushed.found[name]["answers"] + "\n" != "\n"


def test_only_the_model_and_the_checkpoint_asked_for_are_pushed(pushed: Pushed) -> None:
    folders = {name.split("/")[0] for name in pushed.files("whole") if "/" in name}
    assert folders == {"last-checkpoint"}  # neither checkpoint-1, checkpoint-2 nor one that is being written
    assert "last-checkpoint/sdpo/teacher.safetensors" in pushed.files("whole")


def test_every_commit_with_a_model_has_a_card(pushed: Pushed) -> None:
    for name in ("whole", "adapter", "slow"):
        for files in pushed.hub.repositories[f"tester/{name}"].commits.values():
            assert ("README.md" in files) == bool(files)


def test_no_token_is_pushed(pushed: Pushed) -> None:
    assert not [name for name, content in pushed.files("whole").items() if b"hf_x" in content]


def test_checkpoints_of_an_adapter_of_a_folder_are_accepted_and_name_no_folder_in_their_cards(pushed: Pushed) -> None:
    cards = {name: text.decode() for name, text in pushed.files("slow").items() if name.endswith("README.md")}
    assert set(cards) == {"README.md", "checkpoint-1/README.md", "checkpoint-3/README.md"}
    assert not any(str(pushed.folder) in text or problems_of(text) for text in cards.values())


def test_a_checkpoint_stays_until_it_is_pushed(pushed: Pushed) -> None:
    """`save_total_limit=1` deletes checkpoint-1 at step 2, when its upload has just begun; step 2 is not pushed."""
    files = pushed.files("slow")
    assert not (pushed.folder / "slow" / "checkpoint-1").exists()
    for step in (1, 3):
        assert json.loads(files[f"checkpoint-{step}/trainer_state.json"])["global_step"] == step
        assert f"checkpoint-{step}/sdpo/rank0.pt" in files
    assert "A push to tester/slow failed" not in pushed.log


def test_a_push_that_fails_is_told_and_the_run_goes_on(pushed: Pushed) -> None:
    assert not pushed.files("full")
    assert pushed.log.count("A push to tester/full failed, and the run goes on: HfHubHTTPError: 403") >= 1
    assert (pushed.folder / "full" / "checkpoint-3").exists()


# --- the card of a trainer -------------------------------------------------------------------------------------------


def card_of(trainer: SDPOTrainer, **arguments: Any) -> ModelCard:
    trainer.create_model_card(**arguments)
    return ModelCard.load(Path(trainer.args.output_dir) / "README.md")


def quick_start(card: ModelCard) -> str:
    return re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1]


def answer_of(trainer: SDPOTrainer, prompt: Any) -> str:
    """What the trained model answers to the question of a quick start, as prompts of the run's kind are read."""
    asked = "What is 17 + 25?"
    [(ids, _)] = trainer.tokenizer.encode_prompts(
        [asked if prompt != QUESTION else [{**QUESTION[0], "content": asked}]]
    )
    output = trainer.model.eval().generate(input_ids=torch.tensor([ids]), max_new_tokens=8)
    return str(trainer.processing_class.decode(output[0, len(ids) :], skip_special_tokens=True))


@pytest.mark.parametrize("prompt", ["w1 w2", QUESTION], ids=["plain", "chat"])
@pytest.mark.parametrize("adapter", [None, LoraConfig(**LORA), IA3])
def test_the_quick_start_runs_beside_a_saved_model(
    make_trainer: TrainerFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prompt: Any,
    adapter: Any,
) -> None:
    make_model(make_tokenizer()).save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    trainer = make_trainer(
        model=str(tmp_path / "base"),
        prompts=[prompt],
        trainer_kwargs={"peft_config": adapter, "processing_class": None},  # read as the quick start reads it
        chat_template_kwargs={"enable_thinking": False},
    )
    trainer.train()
    trainer.save_model()
    card = card_of(trainer)
    monkeypatch.chdir(trainer.args.output_dir)
    capsys.readouterr()
    exec(quick_start(card), {})
    assert capsys.readouterr().out == answer_of(trainer, prompt) + "\n" != "\n"
    assert ("enable_thinking=False" in quick_start(card)) == (prompt == QUESTION)
    assert ("AutoPeftModelForCausalLM" in quick_start(card)) == (adapter is not None)


def test_a_card_says_what_was_done(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(
        distillation_weight=0.75,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
        **{
            "trainer_kwargs": {"eval_dataset": [{"prompt": "w3"}]},
        },
    )
    trainer.train()
    text = card_of(trainer).text
    assert "a policy gradient has 0.25 of the loss" in text
    assert "trained from a model that is not on the hub on a dataset of 1 prompts by" in text
    assert "2 optimizer steps of 4 completions, 4 to a prompt. The reward came from `scripted_reward`." in text
    assert "| `learning_rate` | `0.001` | `5e-05` |" in text
    assert "| `distillation_weight` | `0.75` | `1.0` |" in text
    assert "| `reward` | 0.25 | weighted reward, mean over completions |" in text  # 1, 0, 0, 0
    assert "| `eval_reward` | 0.25 |" in text
    assert f"- torch {torch.__version__}" in text


def test_metadata_of_a_card(make_trainer: TrainerFactory) -> None:
    card = card_of(make_trainer(), tags="mine", license="mit", dataset_name="openai/gsm8k", language="en")
    assert card.data.to_dict() == {
        "datasets": ["openai/gsm8k"],
        "language": "en",
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["mine", "generated_from_trainer", "sdpo"],
    }
    assert "on [openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k) by" in card.text


def test_arguments_as_transformers_scripts_pass_them(make_trainer: TrainerFactory) -> None:
    card = card_of(
        make_trainer(),
        model_name="mine",
        finetuned_from="Qwen/Qwen3-0.6B",
        tasks="text-generation",
        dataset_tags=["glue"],
        dataset=["GLUE MRPC"],
        dataset_args=["mrpc"],
    )
    assert (card.data.base_model, card.data.datasets) == ("Qwen/Qwen3-0.6B", ["glue"])
    assert card.text.startswith(
        "\n# mine\n\n[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B), trained on GLUE"
    )
    assert "on GLUE MRPC (mrpc) by" in card.text


def test_a_base_model_of_the_hub_is_named_and_a_folder_is_not(
    make_trainer: TrainerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, revision = tmp_path / "hub", "0" * 40
    snapshot = cache / "models--acme--tiny-1" / "snapshots" / revision
    for folder in (snapshot, tmp_path / "models" / "mine"):
        make_model(make_tokenizer()).save_pretrained(folder)
    (cache / "models--acme--tiny-1" / "refs").mkdir()
    (cache / "models--acme--tiny-1" / "refs" / "main").write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    for name in ("acme/tiny-1", str(snapshot)):
        assert card_of(make_trainer(model=name)).data.base_model == "acme/tiny-1"
    for name in ("models/mine", str(tmp_path / "models" / "mine")):
        trainer = make_trainer(model=name)
        monkeypatch.chdir("/")  # where "models/mine" is no folder
        card = card_of(trainer)
        monkeypatch.chdir(tmp_path)
        assert card.data.base_model is None
        assert "models/mine" not in str(card) and str(tmp_path) not in str(card)


def test_data_in_a_folder_is_not_named(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    card = card_of(make_trainer(), dataset_name=str(tmp_path), dataset=str(tmp_path))
    assert card.data.datasets is None
    assert "a dataset of 1 prompts" in card.text and str(tmp_path) not in card.text


def test_results_are_those_of_the_best_weights_where_they_were_loaded(make_trainer: TrainerFactory) -> None:
    """Of the first two blocks of four one completion has a reward of 1, of later ones none: 0.25, 0, 0."""
    trainer = make_trainer(
        rewards=[1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, *[0.0] * 100],
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        trainer_kwargs={"eval_dataset": [{"prompt": "w3"}]},
    )
    trainer.train()
    text = card_of(trainer).text
    assert "The weights are those of step 1, the best by `eval_reward`." in text
    assert "| `reward` | 0.25 |" in text and "| `eval_reward` | 0.25 |" in text


def test_only_the_main_process_writes_a_card(make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    trainer.create_model_card()
    assert not (Path(trainer.args.output_dir) / "README.md").exists()


def test_a_card_that_cannot_be_made_is_short_and_told(
    make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(args: Any) -> Any:
        raise RuntimeError("a setting that cannot be shown")

    trainer = make_trainer()
    monkeypatch.setattr(hub, "changed_settings", broken)
    logging.getLogger("transformers").propagate = True
    card = card_of(trainer, model_name="mine")
    logging.getLogger("transformers").propagate = False
    assert card.text.startswith("\n# mine\n") and card.data.tags == ["generated_from_trainer", "sdpo"]
    assert "The model card could not be made" in caplog.text
    assert "a setting that cannot be shown" in caplog.text


def test_a_card_is_made_of_a_stream_and_before_any_training(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    text = card_of(trainer).text
    assert "a stream of prompts" in text and "No metric was logged." in text and "optimizer steps" not in text


def test_with_hub_always_push_a_push_waits_for_the_one_before(
    make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The base class copies a checkpoint's files over those that the upload before it reads."""
    order: list[str] = []
    trainer = make_trainer(max_steps=2, save_strategy="steps", save_steps=1)
    trainer.args.push_to_hub, trainer.args.hub_always_push = True, True
    trainer.args.hub_strategy, trainer.hub_model_id, trainer.push_in_progress = HubStrategy.EVERY_SAVE, "a/b", None
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: Uploads(order))
    trainer.train()
    assert order == ["begin", "end", "begin", "end"]


def test_a_checkpoint_that_is_being_written_is_not_pushed(
    make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload lists `output_dir` in a thread, while the next checkpoint may be under way."""
    uploads = Uploads([])
    trainer = make_trainer(save_strategy="steps", save_steps=1)
    trainer.args.push_to_hub, trainer.hub_model_id, trainer.push_in_progress = True, "a/b", None
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: uploads)
    trainer.train()
    names = [f"{UNFINISHED}/checkpoint-2/model.safetensors", f"{REPLACED}checkpoint-2/model.safetensors", "README.md"]
    assert list(filter_repo_objects(names, ignore_patterns=uploads.ignored)) == ["README.md"]


class Uploads:
    """Uploads that take a moment, as the client's do in a thread."""

    def __init__(self, order: list[str]):
        self.order = order
        self.ignored: list[str] = []

    def upload_folder(self, *, ignore_patterns: list[str], **_: Any) -> Future[None]:
        self.ignored = ignore_patterns
        job: Future[None] = Future()
        self.order.append("begin")

        def end() -> None:
            self.order.append("end")
            job.set_result(None)

        threading.Timer(0.2, end).start()
        return job
