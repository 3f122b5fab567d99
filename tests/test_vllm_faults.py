"""What the vLLM backends do when the server fails, and the order of sleep and wake; against stand-ins that misbehave.

What they do with a real engine is in tests/vllm_cpu.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from conftest import make_model

from sdpo import SDPOConfig
from sdpo.generation.client import Client, ServerGone
from sdpo.generation.vllm import ColocatedGenerator

Answer = tuple[int, str]


class StandIn:
    """An HTTP server whose answers a test decides; `answer(path)` may sleep."""

    def __init__(self, answer: Callable[[str], Answer]):
        self.answer, self.paths, self.instance, self.backend = answer, [], "a", "process_group"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def handle_all(self) -> None:
                path = self.path.split("?")[0]
                outer.paths.append(path)
                status, text = outer.known(path) or outer.answer(path)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = handle_all

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def known(self, path: str) -> Answer | None:
        if path == "/health":
            return 200, ""
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "tiny"}]})
        if path == "/server_info":
            transfer = {"backend": self.backend}
            return 200, json.dumps({"vllm_config": {"instance_id": self.instance, "weight_transfer_config": transfer}})
        return None


@pytest.fixture
def stand_in() -> Iterator[Callable[[Callable[[str], Answer]], StandIn]]:
    servers = []

    def make(answer: Callable[[str], Answer]) -> StandIn:
        servers.append(StandIn(answer))
        return servers[-1]

    yield make
    for server in servers:
        server.server.shutdown()


def client_of(server: StandIn, *, timeout: float) -> Client:
    return Client(server.url, group_port=0, timeout=timeout, device=torch.device("cpu"))


def test_an_error_of_the_server_is_tried_again(stand_in: Any) -> None:
    left = [2]

    def answer(_: str) -> Answer:
        left[0] -= 1
        return (500, "out of memory") if left[0] >= 0 else (200, '{"choices": []}')

    client = client_of(stand_in(answer), timeout=20)
    assert client._post(f"{client.base_url}/v1/completions", json={}) == {"choices": []}


def test_a_server_that_keeps_failing_ends_the_run_in_time_with_its_own_text(stand_in: Any) -> None:
    client = client_of(stand_in(lambda _: (500, "CUDA error: out of memory")), timeout=2)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"vllm_server_timeout=2 .*500, CUDA error: out of memory"):
        client._post(f"{client.base_url}/v1/completions", json={})
    assert time.monotonic() - began < 10


def test_a_server_that_stalls_ends_the_run_in_time(stand_in: Any) -> None:
    def stall(_: str) -> Answer:
        time.sleep(8)
        return 200, "{}"

    client = client_of(stand_in(stall), timeout=2)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="Timeout"):
        client._post(f"{client.base_url}/v1/completions", json={})
    assert time.monotonic() - began < 7


def test_a_refusal_is_not_tried_again(stand_in: Any) -> None:
    server = stand_in(lambda _: (400, "max_tokens is too large"))
    client = client_of(server, timeout=20)
    with pytest.raises(ValueError, match="max_tokens is too large"):
        client._post(f"{client.base_url}/v1/completions", json={})
    assert server.paths.count("/v1/completions") == 1


def test_no_server_at_all_is_said_within_the_time_limit() -> None:
    with pytest.raises(ConnectionError, match="vllm serve"):
        Client("http://127.0.0.1:9", group_port=0, timeout=1, device=torch.device("cpu"))


def test_what_is_no_address_is_said_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="localhost:8000 is no address"):  # http:// is missing
        Client("localhost:8000", group_port=0, timeout=30, device=torch.device("cpu"))
    assert time.monotonic() - began < 5


def test_a_server_of_something_else_is_said_to_be_one(stand_in: Any) -> None:
    server = stand_in(lambda _: (200, ""))
    server.known = lambda _: (200, "<html>a notebook</html>")
    with pytest.raises(ValueError, match=r"no vLLM server: '<html>a notebook.*vllm_server_base_url"):
        client_of(server, timeout=30)


def test_a_server_that_goes_down_while_it_joins_is_joined_again(tokenizer: Any, tmp_path: Any) -> None:
    from sdpo.generation.server import ServerGenerator

    done: list[str] = []

    def connect() -> None:
        done.append("connect")
        if len(done) == 1:
            raise ConnectionError("did not take the weights")
        client.instance = "b"

    def send(_: Any, weights: Any) -> None:
        done.append(f"send {len(list(weights)) > 3}")

    client: Any = SimpleNamespace(instance="a", find_instance=lambda: "b", connect=connect, send=send)
    model = make_model(tokenizer)
    generator = object.__new__(ServerGenerator)
    generator.settings = SDPOConfig(output_dir=str(tmp_path), use_vllm=True, vllm_mode="server").engine
    generator.get_model, generator.accelerator = lambda: model, Accelerator(cpu=True)
    generator._metadata, generator._pushed, generator._client = None, None, client
    generator.sync(0)
    assert done == ["connect", "connect", "send True"]
    done.clear()

    def never() -> None:
        done.append("connect")
        raise ConnectionError("no room")

    client.instance, client.connect = "a", never
    with pytest.raises(ConnectionError, match="no room"):
        generator.sync(1)
    assert done == ["connect"] * 3


def test_the_server_says_how_a_completion_has_ended(stand_in: Any) -> None:
    choices = [
        {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": reason}
        for reason in ("stop", "length")
    ]
    client = client_of(stand_in(lambda _: (200, json.dumps({"choices": choices}))), timeout=5)
    found = client.complete([[1, 2]], {"n": 2, "max_tokens": 2})
    assert [completion.is_truncated for completion in found] == [False, True]  # both have two tokens
    assert all(completion.sampled_logps == [-1.0, -2.0] for completion in found)


def test_a_server_that_does_not_know_chosen_ids_is_refused(stand_in: Any) -> None:
    answer = {"choices": [{"logprobs": {"top_logprobs": [{"token_id:4": -1.0, "token_id:9": -3.0}]}}]}
    client = client_of(stand_in(lambda _: (200, json.dumps(answer))), timeout=5)
    assert client.logps_of([([1, 2], [9, 4])]) == [[-3.0, -1.0]]
    with pytest.raises(ValueError, match="logprob_token_ids"):
        client.logps_of([([1, 2], [9, 7])])


def test_an_answer_of_a_server_without_the_weights_is_thrown_away(stand_in: Any) -> None:
    server = stand_in(lambda _: (200, "{}"))
    client = client_of(server, timeout=5)
    client.instance = client.find_instance()
    server.paths.clear()
    assert client.ask(lambda: 1) == 1
    assert server.paths == ["/server_info"], "once a question, after it"
    server.instance = "b"
    with pytest.raises(ServerGone):
        client.ask(lambda: 1)
    client.instance = "b"

    def restart() -> int:
        server.instance = "c"
        return 1

    with pytest.raises(ServerGone):
        client.ask(restart)


def test_a_failed_request_finds_out_at_once_that_the_server_is_another(stand_in: Any) -> None:
    server = stand_in(lambda _: (500, "no weight-transfer engine"))
    client = client_of(server, timeout=60)
    client.instance = "an earlier one"
    with pytest.raises(ServerGone):
        client._post(f"{client.base_url}/update_weights", json={})


def test_a_call_that_tensors_go_with_is_not_repeated(stand_in: Any) -> None:
    server = stand_in(lambda _: (500, "shape mismatch"))
    client = client_of(server, timeout=60)
    with pytest.raises(ConnectionError, match=r"did not take the weights.*shape mismatch"):
        client._post(f"{client.base_url}/update_weights", json={})
    assert server.paths.count("/update_weights") == 1


def test_an_update_left_half_done_is_ended_before_the_next(stand_in: Any) -> None:
    active = [True]

    def answer(path: str) -> Answer:
        was, active[0] = active[0], path == "/start_weight_update"
        if was and active[0]:
            return 500, "start_weight_update called while a weight update is already active."
        return 200, ""

    server = stand_in(answer)
    client_of(server, timeout=20)._start_weight_update()
    assert server.paths[-3:] == ["/start_weight_update", "/finish_weight_update", "/start_weight_update"]


def sender(server: StandIn, *, timeout: float) -> Client:
    """A client whose weights have no way to go."""
    client = client_of(server, timeout=timeout)
    client.plane = SimpleNamespace(send=lambda *_: None)  # type: ignore[assignment]
    return client


def test_a_cache_of_old_weights_that_is_in_use_is_emptied_later(stand_in: Any) -> None:
    answers = iter(['{"success": false}', '{"success": false}', '{"success": true}'])
    server = stand_in(lambda _: (200, next(answers)))
    sender(server, timeout=20).send([], iter(()))
    assert server.paths.count("/reset_prefix_cache") == 3


def test_a_cache_that_stays_in_use_ends_the_run_in_time(stand_in: Any) -> None:
    client = sender(stand_in(lambda _: (200, '{"success": false}')), timeout=1)
    with pytest.raises(ConnectionError, match=r"vllm_server_timeout=1 .*hold its prefix cache, which has values"):
        client.send([], iter(()))


def test_a_server_without_a_way_for_weights_is_refused(stand_in: Any) -> None:
    server = stand_in(lambda _: (200, "{}"))
    server.backend = "nccl"
    with pytest.raises(ValueError, match="process_group"):
        client_of(server, timeout=5).find_instance()


class Engine:
    """Writes down what is asked of it."""

    def __init__(self, calls: list[str]):
        self.calls = calls
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")

    def load_weights(self, weights: Any) -> None:
        assert len(list(weights)) > 3
        self.calls.append("load")

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def generate(self, prompts: Any, parameters: Any, use_tqdm: Any) -> Any:
        self.calls.append("generate " + ",".join(str(p) for p in parameters))
        if use_tqdm:  # a bar of the prompts handed in, and one of the completions that have finished
            list(use_tqdm(prompts, desc="Adding requests"))
            bar = use_tqdm(total=len(prompts), desc="Processed prompts", dynamic_ncols=True, postfix="")
            for number in parameters:
                bar.update(number)
            bar.close()
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=-1.0)}], finish_reason="length"
                    )
                ]
                * number
            )
            for number in parameters
        ]


def colocated(model: Any, tokenizer: Any, args: SDPOConfig, *, report: Any = None) -> ColocatedGenerator:
    return ColocatedGenerator(
        lambda: model,
        accelerator=Accelerator(cpu=True),
        processing_class=tokenizer,
        settings=args.engine,
        sampling=args.sampling,
        eos_token_ids=[5],
        report=report,
    )


def test_the_engine_tells_how_many_completions_have_finished(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ColocatedGenerator, "_start", lambda *_: Engine([]))
    monkeypatch.setattr(ColocatedGenerator, "_parameters", lambda *arguments: arguments[-1])
    monkeypatch.setitem(__import__("sys").modules, "vllm", SimpleNamespace())
    args = SDPOConfig(output_dir=str(tmp_path), use_vllm=True, num_generations=2)
    told: list[tuple[int, int]] = []
    generator = colocated(make_model(tokenizer), tokenizer, args, report=lambda *counts: told.append(counts))
    generator.generate([[1, 2], [1, 2], [3]])
    assert told == [(2, 0), (3, 0)]  # two completions of the first prompt, one of the second
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("sleeps", [True, False])
def test_the_engine_wakes_is_loaded_and_generates_in_that_order(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, sleeps: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(ColocatedGenerator, "_start", lambda *_: Engine(calls))
    monkeypatch.setattr(ColocatedGenerator, "_parameters", lambda *arguments: arguments[-1])
    monkeypatch.setitem(__import__("sys").modules, "vllm", SimpleNamespace())
    args = SDPOConfig(output_dir=str(tmp_path), use_vllm=True, vllm_enable_sleep_mode=sleeps, num_generations=2)
    model = make_model(tokenizer)
    generator = colocated(model, tokenizer, args)
    prompts = [[1, 2], [1, 2], [3]]
    generator.sync(0)
    found = generator.generate(prompts)
    # Cut at the engine's context length, short of the limit: the engine says so.
    assert [completion.ids for completion in found] == [[5]] * 3 and found[0].is_truncated
    generator.sync(0)  # an evaluation at the same step
    generator.generate(prompts)
    generator.sync(1)
    generator.generate(prompts)
    model.load_state_dict(model.state_dict())  # such as the best checkpoint, at the same step
    generator.sync(1)
    generator.generate(prompts)
    push, draw = ["load", "reset"], ["generate 2,1"]
    if sleeps:
        use = ["wake weights", *push, "wake kv_cache", *draw, "sleep 2"]
        assert calls == ["sleep 2", *use, *use, *use, *use]
    else:
        assert calls == [*push, *draw, *draw, *push, *draw, *push, *draw]


def test_a_policy_without_its_adapter_is_another_policy(tokenizer: Any) -> None:
    """Such as an evaluation in `with model.disable_adapter():`, which writes to no parameter."""
    from peft import LoraConfig, get_peft_model

    from sdpo.generation.engine import weights_of

    model = get_peft_model(make_model(tokenizer), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted = weights_of(model, 3)
    with model.disable_adapter():
        assert weights_of(model, 3) != adapted
    assert weights_of(model, 3) == adapted
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("other")
    assert weights_of(model, 3) != adapted


def test_a_check_of_weights_that_differ_stops_the_run(tokenizer: Any) -> None:
    from sdpo.generation.engine import check_weights

    model = make_model(tokenizer)

    def right(ids: list[int]) -> list[float]:
        logps = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return [float(logps[i, token]) for i, token in enumerate(ids[1:])]

    accelerator = Accelerator(cpu=True)
    check_weights(model, right, accelerator=accelerator)
    with pytest.raises(RuntimeError, match="does not hold the policy"):
        check_weights(model, lambda ids: [logp + 0.1 for logp in right(ids)], accelerator=accelerator)


def test_the_trainers_random_numbers_do_not_depend_on_the_engine(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(ColocatedGenerator, "_start", lambda *_: Engine([]))
    args = SDPOConfig(output_dir=str(tmp_path), use_vllm=True)
    model = make_model(tokenizer)
    generator = colocated(model, tokenizer, args)

    def run(used: int) -> tuple[float, float]:
        torch.manual_seed(3)
        with generator._own_randomness():
            drawn = [float(torch.rand(())) for _ in range(used)]
        return drawn[0], float(torch.rand(()))

    assert run(1) == run(5)


def test_settings_of_the_engine_come_through(tmp_path: Any) -> None:
    args = SDPOConfig(
        output_dir=str(tmp_path),
        use_vllm=True,
        vllm_engine_kwargs='{"enforce_eager": true}',
        vllm_max_model_length=64,
        vllm_check_weights=True,
    )
    assert args.engine.engine_kwargs == {"enforce_eager": True}
    assert replace(args.engine, max_model_length=64) == args.engine and args.engine.check_weights
    with pytest.raises(ValueError, match="vllm_engine_kwargs"):
        SDPOConfig(output_dir=str(tmp_path), vllm_engine_kwargs={"enforce_eager": True})
    with pytest.raises(ValueError, match="decided by `vllm_max_model_length`"):
        SDPOConfig(output_dir=str(tmp_path), use_vllm=True, vllm_engine_kwargs={"max_model_len": 64})
