"""vLLM on this machine is a fair judge: its log-probs are transformers', before and after its weights change."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MAX_LENGTH, NUM_BLOCKS, Server, free_port, make_policy, policy_logps
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from sdpo.generation.client import Client
from sdpo.generation.vllm import ProcessGroupPlane

pytestmark = pytest.mark.vllm
IDS = [8 + 7 * i % 40 for i in range(30)]  # words of the tokenizer
TOLERANCE, DIFFERENCE = 1e-4, 1.0  # nats: equal, and clearly not


def difference(model: Qwen2ForCausalLM, logps: torch.Tensor) -> float:
    return float((policy_logps(model, IDS) - logps).abs().max())


def engine_logps(llm: Any) -> torch.Tensor:
    from vllm import SamplingParams

    [output] = llm.generate([{"prompt_token_ids": IDS}], SamplingParams(max_tokens=1, prompt_logprobs=0))
    return torch.tensor([at[token].logprob for token, at in zip(IDS[1:], output.prompt_logprobs[1:], strict=True)])


def served_logps(server: Server) -> torch.Tensor:
    body = {"prompt": IDS, "max_tokens": 1, "prompt_logprobs": 0}
    values = server.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    return torch.tensor([at[str(token)]["logprob"] for token, at in zip(IDS[1:], values[1:], strict=True)])


def send(server: Server, model: Qwen2ForCausalLM) -> None:
    """The weights of a model to a server of one worker."""
    from vllm.distributed.utils import StatelessProcessGroup

    weights = dict(model.named_parameters())
    address = {"master_address": "127.0.0.1", "master_port": free_port()}
    group_info = {**address, "rank_offset": 1, "world_size": 2}
    update_info = {
        "names": list(weights),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
        "shapes": [list(weight.shape) for weight in weights.values()],
    }
    with ThreadPoolExecutor(1) as executor:  # the server answers when the other side has joined, or sent
        answer = executor.submit(server.post, "/init_weight_transfer_engine", {"init_info": group_info})
        group = StatelessProcessGroup.create(*address.values(), rank=0, world_size=2)
        answer.result()
        server.post("/start_weight_update", {})
        answer = executor.submit(server.post, "/update_weights", {"update_info": update_info})
        for weight in weights.values():
            group.broadcast(weight.detach(), src=0)
        answer.result()
        server.post("/finish_weight_update", {})


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_the_engine_in_this_process_takes_new_weights(
    tokenizer: PreTrainedTokenizerFast, policy_folders: dict[bool, Path], is_tied: bool
) -> None:
    from vllm import LLM

    llm = LLM(
        str(policy_folders[is_tied]),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_LENGTH,
        num_gpu_blocks_override=NUM_BLOCKS,
    )
    assert difference(make_policy(tokenizer, is_tied=is_tied), engine_logps(llm)) < TOLERANCE

    changed = make_policy(tokenizer, is_tied=is_tied, seed=1)
    assert difference(changed, engine_logps(llm)) > DIFFERENCE
    llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(changed.named_parameters())
    assert difference(changed, engine_logps(llm)) < TOLERANCE


def test_the_server_takes_new_weights(tokenizer: PreTrainedTokenizerFast, server: Server) -> None:
    for seed in (0, 1):
        policy = make_policy(tokenizer, is_tied=True, seed=seed)
        if seed:
            assert difference(policy, served_logps(server)) > DIFFERENCE
        send(server, policy)
        assert difference(policy, served_logps(server)) < TOLERANCE


def test_a_server_that_cannot_join_is_not_waited_for() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models, size = {"data": [{"id": "tiny"}]}, {"world_size": 1}
            self.answer(200, json.dumps({**models, **size}))

        def do_POST(self) -> None:
            self.answer(500, "no such host")

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as failing:
        threading.Thread(target=failing.serve_forever, daemon=True).start()
        device, port = torch.device("cpu"), free_port()
        client = Client(f"http://127.0.0.1:{failing.server_port}", group_port=port, timeout=60.0, device=device)
        for _ in range(2):  # the port is free again
            began = time.monotonic()
            with pytest.raises(ConnectionError, match=r"did not take the weights.*no such host"):
                ProcessGroupPlane().open(client, device)
            assert time.monotonic() - began < 10
        failing.shutdown()
