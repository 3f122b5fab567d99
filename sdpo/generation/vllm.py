"""vLLM in the trainer's process, and the ways to send weights to its server; the only module that imports vllm.

Letters: T tokens of a completion.
"""

from __future__ import annotations

import io
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, get_args

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.std import tqdm

from sdpo import distributed
from sdpo.generation.engine import State, check_weights, completion_of, grouped, sampling_params, weights_of
from sdpo.generation.weights import check_engine_can_hold, engine_weights, lora_factors
from sdpo.sharding import done_together, is_sharded
from sdpo.types import Completion, EngineSettings, Report, SamplingSettings

SEED_STRIDE = 1_000_003  # between the seeds of two engines

Announced = tuple[str, str, list[int]]
"""Name, dtype without "torch.", and shape of a tensor that is sent."""


class ColocatedGenerator:
    """Samples with an engine in this process, which is given the policy's weights whenever they have changed.

    The engine starts with no weights of its own: its folder holds the policy's configuration and tokenizer, and what
    it samples with comes from the policy in memory.
    """

    def __init__(
        self,
        get_model: Callable[[], nn.Module],
        *,
        accelerator: Accelerator,
        processing_class: Any,
        settings: EngineSettings,
        sampling: SamplingSettings,
        eos_token_ids: Sequence[int],
        report: Report | None = None,
    ):
        self.get_model, self.accelerator, self.settings = get_model, accelerator, settings
        self.sampling, self.eos_token_ids = sampling, frozenset(eos_token_ids)
        self.report = report
        policy = accelerator.unwrap_model(get_model())
        check_engine_can_hold(policy)
        self._lora = Lora(policy) if settings.lora_as_adapter else None
        self._tp_group = _tensor_parallel_group(accelerator, settings.tensor_parallel_size)
        with self._own_randomness():
            self.engine = self._start(policy, processing_class)
        self._pushed: State | None = None
        if settings.enable_sleep_mode:
            self.engine.sleep(level=2)
        distributed.wait(accelerator)

    def _start(self, policy: Any, processing_class: Any) -> Any:
        processes, settings = self.accelerator.num_processes, self.settings
        if processes == 1:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's model has to be in reach
        else:
            for name, value in (
                ("RANK", self.accelerator.process_index),
                ("LOCAL_RANK", self.accelerator.local_process_index),
                ("WORLD_SIZE", processes),
            ):
                os.environ[name] = str(value)
        import vllm

        with tempfile.TemporaryDirectory() as folder:
            policy.config.save_pretrained(folder)
            processing_class.save_pretrained(folder)
            arguments: dict[str, Any] = {
                "model": policy.config._name_or_path if settings.trust_remote_code else folder,
                "load_format": "dummy",
                "dtype": str(policy.dtype).removeprefix("torch."),
                "tensor_parallel_size": settings.tensor_parallel_size,
                "gpu_memory_utilization": settings.gpu_memory_utilization,
                "max_model_len": settings.max_model_length,
                "enable_sleep_mode": settings.enable_sleep_mode,
                "model_impl": settings.model_impl,
                "trust_remote_code": settings.trust_remote_code,
                "logprobs_mode": "processed_logprobs",  # of the distribution that is drawn from
                "seed": self.accelerator.process_index // settings.tensor_parallel_size,
            }
            if processes > 1:
                arguments["distributed_executor_backend"] = "external_launcher"
            if self._lora is not None:
                arguments |= self._lora.arguments()
            return vllm.LLM(**{**arguments, **settings.engine_kwargs})

    def sync(self, step: int) -> None:
        model = self.get_model()
        policy = self.accelerator.unwrap_model(model)
        weights = weights_of(policy, step)
        if self._pushed == weights:
            return
        if self.settings.enable_sleep_mode:
            self.engine.wake_up(tags=["weights"])
        with done_together(is_sharded(policy)):
            if self._lora is None:
                _model_of(self.engine).load_weights(engine_weights(policy))
            else:
                self._lora.push(self.engine, policy)
        self.engine.reset_prefix_cache()
        self._pushed = weights
        if self.settings.check_weights:
            if self.settings.enable_sleep_mode:
                self.engine.wake_up(tags=["kv_cache"])
            with done_together(self._tp_group is not None):  # its other ranks would go on to sample
                check_weights(model, self._prompt_logps, accelerator=self.accelerator)

    def generate(self, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        # All ranks of a tensor-parallel engine work on the prompts of all of them, and each keeps its own.
        world, first = distributed.gather_in(prompt_ids, self._tp_group)
        groups = grouped(world)
        if self.settings.enable_sleep_mode:
            self.engine.wake_up(tags=["kv_cache"])
        import vllm

        parameters = [self._parameters(vllm, number) for _, number in groups]
        prompts = [{"prompt_token_ids": ids} for ids, _ in groups]
        with self._own_randomness(), done_together(self._tp_group is not None):
            outputs = self._run(prompts, parameters, bar=self._bar(len(prompt_ids), of=len(world))) if prompts else []
        if self.settings.enable_sleep_mode:
            self.engine.sleep(level=2)
            self._pushed = None  # the weights are gone
        drawn = [output for request in outputs for output in request.outputs]
        return [
            completion_of(
                list(output.token_ids),
                [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)],
                is_truncated=output.finish_reason == "length",
            )
            for output in drawn[first : first + len(prompt_ids)]
        ]

    def _bar(self, num_own: int, *, of: int) -> Any:
        """What makes the engine's bars, for this rank's share of the completions; False where nobody listens."""
        return False if self.report is None else partial(_ReportingBar, self.report, num_own / of)

    def _run(self, prompts: Any, parameters: Any, *, bar: Any = False) -> Any:
        """`bar`: what the engine makes its bars with; False for none."""
        adapter = {} if self._lora is None else {"lora_request": self._lora.request()}
        return self.engine.generate(prompts, parameters, use_tqdm=bar, **adapter)

    def _parameters(self, vllm: Any, number: int) -> Any:
        values = sampling_params(self.sampling, number=number, eos_token_ids=self.eos_token_ids)
        if values.get("seed") is not None:  # ranks may share a group, whose completions are to differ
            values["seed"] += SEED_STRIDE * (self.accelerator.process_index // self.settings.tensor_parallel_size)
        structure = values.get("structured_outputs")
        if isinstance(structure, dict):
            values["structured_outputs"] = vllm.sampling_params.StructuredOutputsParams(**structure)
        return vllm.SamplingParams(**values)

    def _prompt_logps(self, ids: list[int]) -> list[float]:
        """Log-probs of ids[1:], each given those before it."""
        import vllm

        parameters = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        with torch.random.fork_rng(devices=self._cuda()):
            [output] = self._run([{"prompt_token_ids": ids}], parameters)
        return [step[token].logprob for token, step in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]

    def _cuda(self) -> list[torch.device]:
        return [self.accelerator.device] if self.accelerator.device.type == "cuda" else []

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Inside, random numbers of a seed drawn from the trainer's; the engine seeds and uses the process's own.

        So what is drawn depends on the state of the run alone, and the trainer's numbers on nothing the engine does.
        Ranks of one engine draw the same.
        """
        drawn = int(torch.randint(2**31, ()).item()) + self.accelerator.process_index
        [seed, *_], _ = distributed.gather_in([drawn], self._tp_group)
        with torch.random.fork_rng(devices=self._cuda()):
            torch.manual_seed(seed)
            yield


class _ReportingBar(tqdm):
    """The bar that an engine moves when a request has finished; it draws nothing and reports `share` of it."""

    def __init__(self, report: Report, share: float, *args: Any, **kwargs: Any):
        self.report, self.share = report, share
        super().__init__(*args, **kwargs, file=io.StringIO())

    def update(self, n: float | None = 1) -> bool | None:
        is_drawn = super().update(n)
        if self.iterable is None:  # the other one counts the requests that are handed in
            self.report(round(self.share * self.n), 0)
        return is_drawn


def _model_of(engine: Any) -> Any:
    return engine.llm_engine.model_executor.driver_worker.model_runner.model


class Lora:
    """The policy's adapter beside the engine's weights: the model under it is sent once, its factors at each push."""

    def __init__(self, policy: Any):
        factors = lora_factors(policy)
        self.layers = sorted({name.split(".")[-3] for name in factors})
        self.rank = max(min(factor.shape) for factor in factors.values())
        self._base: int | None = None

    def arguments(self) -> dict[str, Any]:
        """Of the engine."""
        from vllm.config.lora import MaxLoRARanks

        limits = [limit for limit in get_args(MaxLoRARanks) if limit >= self.rank]
        if not limits:
            raise ValueError(
                f"vllm_lora_as_adapter=True takes ranks up to {max(get_args(MaxLoRARanks))}, and the adapter has "
                f"{self.rank}. Set it to False to send the merged weights."
            )
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": min(limits),
            "lora_target_modules": self.layers,
        }

    def request(self, folder: str = "loaded already", *, is_new: bool = False) -> Any:
        """What the engine calls the adapter; it reads `folder` where that is new."""
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", 1, folder, load_inplace=is_new)

    def push(self, engine: Any, policy: Any) -> None:
        base = sum(parameter._version for parameter in policy.parameters() if not parameter.requires_grad)
        if base != self._base:
            _model_of(engine).load_weights(engine_weights(policy, is_merged=False))
            self._base = base
        config = {"r": self.rank, "lora_alpha": self.rank, "target_modules": self.layers}  # the scale is in B
        with tempfile.TemporaryDirectory() as folder:
            save_file(lora_factors(policy), f"{folder}/adapter_model.safetensors")
            Path(folder, "adapter_config.json").write_text(json.dumps(config))
            engine.llm_engine.add_lora(self.request(folder, is_new=True))


def _tensor_parallel_group(accelerator: Accelerator, size: int) -> Any:
    if size == 1:
        return None
    if accelerator.num_processes % size:
        raise ValueError(
            f"vllm_tensor_parallel_size={size} does not divide the {accelerator.num_processes} processes. Choose a "
            "divisor, or start another number of processes."
        )
    return distributed.subgroup(accelerator, size)


class DataPlane(Protocol):
    """How tensors reach a server's workers, beside the HTTP calls that announce them."""

    backend: str
    """What the server calls it."""

    def open(self, client: Any, device: torch.device) -> None:
        """Joins the workers in a group, the trainer being its first member."""

    def send(self, client: Any, metadata: list[Announced], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Announces and sends the weights, in the same order."""


def data_plane(device: torch.device) -> DataPlane:
    """The plane for a trainer on this device."""
    return NcclPlane() if device.type == "cuda" else ProcessGroupPlane()


class NcclPlane:
    """NCCL, by TRL's client, which knows the differences between the versions of vLLM."""

    backend = "nccl"

    def open(self, client: Any, device: torch.device) -> None:
        client.init_communicator(device)

    def send(self, client: Any, metadata: list[Announced], weights: Iterator[tuple[str, Tensor]]) -> None:
        client.update_named_params(metadata, weights)


class ProcessGroupPlane:
    """The same calls with the tensors over vLLM's group of processes on CPUs, a store of messages.

    vLLM's own backends need CUDA: the server needs a plugin that registers this one.
    """

    backend = "process_group"

    def open(self, client: Any, device: torch.device) -> None:
        from vllm.distributed.utils import StatelessProcessGroup, create_tcp_store
        from vllm.utils.network_utils import get_ip

        size, host, port = client.get_world_size() + 1, get_ip(), client.group_port
        store = create_tcp_store(
            host,
            port,
            listen_socket=socket.create_server((host, port)),
            world_size=size,
            is_master=True,
            wait_for_workers=False,  # the server answers when they have joined, or at once that they cannot
            timeout=timedelta(seconds=client.timeout),
            use_libuv=False,
        )
        info = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": size, "packed": True}
        client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": info})
        group = StatelessProcessGroup(rank=0, world_size=size, store=store, data_expiration_seconds=60)
        client.communicator = SimpleNamespace(group=group)

    def send(self, client: Any, metadata: list[Announced], weights: Iterator[tuple[str, Tensor]]) -> None:
        names, dtypes, shapes = (list(column) for column in zip(*metadata, strict=True))
        info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        client._start_weight_update()
        with ThreadPoolExecutor(1) as executor:
            answer = executor.submit(client._post, f"{client.base_url}/update_weights", json={"update_info": info})
            for _, weight in weights:
                client.communicator.group.broadcast(weight.cpu().contiguous(), src=0)
            answer.result()
        client._finish_weight_update()
