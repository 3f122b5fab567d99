"""Small models that both transformers and vLLM read, and a real server of vLLM on this machine's CPU."""

from __future__ import annotations

import os

# Before vLLM is imported, and for the server too.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default nearly all memory, and then it fails
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine of `vllm.LLM` in the test's own process
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # the endpoints for weights
}

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

MAX_LENGTH = 256
NUM_BLOCKS = 64  # of 128 tokens: a few MB of keys and values, in place of the GiB above
START_SECONDS = 300.0


# A run that is told to end (a time limit, say) still ends its server.
signal.signal(signal.SIGTERM, signal.default_int_handler)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def make_policy(tokenizer: PreTrainedTokenizerFast, *, is_tied: bool, seed: int = 0) -> Qwen2ForCausalLM:
    """A float32 model with heads of 32, the smallest that vLLM takes on a CPU. No weight, norm or bias is trivial."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=is_tied,
        initializer_range=0.3,  # far from uniform, so that differences show
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def policy_logps(model: Qwen2ForCausalLM, ids: list[int]) -> torch.Tensor:
    """(T-1,) log-probs of ids[1:] by transformers, each given those before it."""
    with torch.no_grad():
        logps = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logps.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


class Server:
    """`vllm serve` as a group of processes; it can be killed and started again on the same port."""

    def __init__(self, model: Path, log: Path, *arguments: str):
        self.model, self.log, self.arguments, self.port = model, log, arguments, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when the server answers.

        Raises:
            RuntimeError: it does not within `START_SECONDS`; the message is its log.
        """
        assert self.process is None, "it runs already"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", str(MAX_LENGTH), "--num-gpu-blocks-override", str(NUM_BLOCKS)]
        command += ["--logprobs-mode", "processed_logprobs"]
        command += ["--max-logprobs", "-1", "--weight-transfer-config", '{"backend": "process_group"}']
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        end = time.monotonic() + START_SECONDS
        while not self._is_up():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"The vLLM server did not start. {self.log}:\n{self.log.read_text()[-20000:]}")
            time.sleep(0.5)

    def _is_up(self) -> bool:
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{self.url}/health", timeout=5).status_code == 200
        return False

    def kill(self) -> None:
        """Ends the server and its engine at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # the whole group has ended by itself
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = requests.post(f"{self.url}{path}", json=body, timeout=60)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()


@pytest.fixture(scope="session")
def policy_folders(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folder of `make_policy` with its tokenizer, by whether the embeddings are tied."""
    folders = {is_tied: tmp_path_factory.mktemp("tied" if is_tied else "untied") for is_tied in (True, False)}
    for is_tied, folder in folders.items():
        make_policy(tokenizer, is_tied=is_tied).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


@contextlib.contextmanager
def serving(model: Path, log: Path) -> Iterator[Server]:
    one = Server(model, log)
    try:
        one.start()
        yield one
    finally:
        one.kill()


@pytest.fixture(scope="session")
def server(policy_folders: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the session, of the model with tied embeddings. Its weights are those of the test before."""
    with serving(policy_folders[True], tmp_path_factory.mktemp("server") / "log.txt") as one:
        yield one


@pytest.fixture
def untied_server(policy_folders: dict[bool, Path], tmp_path: Path) -> Iterator[Server]:
    """A server of the model with untied embeddings, for one test."""
    with serving(policy_folders[False], tmp_path / "server.txt") as one:
        yield one
