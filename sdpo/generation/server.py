"""Sampling and scoring by a vLLM server, which is given the policy's weights over HTTP calls and a data plane.

TRL's client scores sequences, sends weights and knows the versions of vLLM; here are time limits, retries, restarts,
how completions end, and the ranks. Letters: T tokens of a completion, K support.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import requests
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from trl.generation.vllm_client import VLLMClient

from sdpo import distributed
from sdpo.generation.engine import State, check_weights, completion_of, grouped, sampling_params, weights_of
from sdpo.generation.vllm import DataPlane, data_plane
from sdpo.generation.weights import check_engine_can_hold, describe, engine_weights
from sdpo.types import Completion, EngineSettings, SamplingSettings, ServedToken

T = TypeVar("T")
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds between two tries, doubled each time
MAX_TRIES = 3  # of sending the weights, and of a question to a server that has been started again
TRANSIENT = (200, 500, 502, 503, 504)
BUSY = {"success": False}  # what comes with 200 where the prefix cache could not be emptied
IN_USE = "requests of somebody else hold its prefix cache, which has values of old weights; it has to be the trainer's"
CONCURRENCY = 10  # requests under way, as many as a session keeps connections
# softmax(logits), whatever the model's own generation_config says.
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Tensors go beside these calls, so one that has failed is not repeated by itself: the weights are sent anew.
ONCE = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
DEV_MODE = "Start it with VLLM_SERVER_DEV_MODE=1 in its environment"


class ServerGone(RuntimeError):
    """The server that answers is not the one that was given the weights."""


class Client(VLLMClient):
    """TRL's client with a time limit on every request, retries with backoff, and the server's own words in errors."""

    def __init__(self, base_url: str, *, group_port: int, timeout: float, device: torch.device):
        # Not TRL's: its session retries by itself, without a limit in time, and its first check has none either.
        self.base_url, self.group_port, self.timeout = base_url.rstrip("/"), group_port, timeout
        self.device, self.session = device, requests.Session()
        self.plane: DataPlane | None = None
        self.communicator: Any = None
        self._updating_weights = False
        self.instance: str | None = None
        self.check_server(timeout)
        self.model = self._get(f"{self.base_url}/v1/models")["data"][0]["id"]

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = FIRST_WAIT) -> None:
        self._request("GET", f"{self.base_url}/health")

    def get_server_info(self) -> Any:
        return self._get(f"{self.base_url}/server_info", params={"config_format": "json"})["vllm_config"]

    def _get(self, url: str, **arguments: Any) -> Any:
        return self._request("GET", url, **arguments)

    def _post(self, url: str, **arguments: Any) -> Any:
        return self._request("POST", url, **arguments)

    def _request(self, method: str, url: str, **arguments: Any) -> Any:
        """The answer's JSON, None for an empty one; tries again until the time is up.

        Raises:
            ConnectionError: no good answer within the time limit.
            ValueError: the server refuses the request.
        """
        end, wait, said = time.monotonic() + self.timeout, FIRST_WAIT, "nothing"
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise ConnectionError(
                    f"No good answer from the vLLM server at {url} within vllm_server_timeout={self.timeout:g} "
                    f"seconds. It said last: {said}. See that the server runs (`vllm serve`), or raise the limit."
                )
            try:
                answer = self.session.request(method, url, timeout=(min(left, 10.0), left), **arguments)
            except requests.RequestException as error:
                if isinstance(error, ValueError):  # no address, so that no time helps
                    raise ValueError(f"{self.base_url} is no address of a vLLM server: {error}.") from error
                said = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == 200 and (content := self._content(answer)) != BUSY:
                    return content
                said = IN_USE if answer.status_code == 200 else f"{answer.status_code}, {answer.text[:2000]}"
                if answer.status_code not in TRANSIENT:
                    self._raise_if_gone(url)
                    raise ValueError(f"The vLLM server refuses {url}: {said}")
            self._raise_if_gone(url)
            if url.endswith(ONCE):
                raise ConnectionError(f"The vLLM server at {url} did not take the weights. It said: {said}.")
            time.sleep(max(0.0, min(wait, end - time.monotonic())))
            wait = min(2 * wait, LONGEST_WAIT)

    def _content(self, answer: requests.Response) -> Any:
        try:
            return answer.json() if answer.content else None
        except requests.JSONDecodeError as error:
            raise ValueError(
                f"{answer.url} answers with what is not JSON, so it is no vLLM server: {answer.text[:200]!r}. "
                "Check vllm_server_base_url, or vllm_server_host and vllm_server_port."
            ) from error

    def _raise_if_gone(self, url: str) -> None:
        """Ends a request that has failed where another server answers by now."""
        if self.instance is None or url.endswith("/server_info"):
            return
        try:
            answer = self.session.get(f"{self.base_url}/server_info", params={"config_format": "json"}, timeout=5.0)
            instance = answer.json()["vllm_config"]["instance_id"]
        except (requests.RequestException, ValueError, KeyError):
            return  # none answers yet
        if str(instance) != self.instance:
            raise ServerGone

    def find_instance(self) -> str:
        """A name that a server keeps while it lives."""
        try:
            config = self.get_server_info()
        except ValueError as error:
            raise ValueError(
                f"The vLLM server at {self.base_url} has no development endpoints. {DEV_MODE}."
            ) from error
        self._check(config)
        return str(config["instance_id"])

    def _check(self, config: Any) -> None:
        transfer = config.get("weight_transfer_config") or {}
        self.plane = data_plane(self.device)
        if transfer.get("backend") != self.plane.backend:
            raise ValueError(
                f"The vLLM server at {self.base_url} transfers weights by {transfer.get('backend')!r}, and the "
                f"trainer on {self.device.type} by {self.plane.backend!r}. Start it with "
                f"""--weight-transfer-config '{{"backend": "{self.plane.backend}"}}'."""
            )
        mode = (config.get("model_config") or {}).get("logprobs_mode", "processed_logprobs")
        if mode != "processed_logprobs":
            raise ValueError(
                f"The vLLM server at {self.base_url} reports {mode!r}, which are not those of the distribution it "
                "draws from. Start it with --logprobs-mode processed_logprobs."
            )

    def connect(self) -> None:
        """Joins the server's workers in a group for weights, anew where there was one before."""
        self.instance = None
        instance = self.find_instance()
        self.close_communicator()
        assert self.plane is not None
        self.plane.open(self, self.device)
        self.instance = instance

    def send(self, metadata: list[tuple[str, str, list[int]]], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Weights to all workers."""
        assert self.plane is not None
        self.plane.send(self, metadata, weights)
        self._post(f"{self.base_url}/reset_prefix_cache")

    def complete(self, prompts: Sequence[list[int]], values: Mapping[str, Any]) -> list[Completion]:
        """Completions of the prompts under these sampling parameters, those of a prompt one after the other.

        Not TRL's `generate`, which does not tell how a completion has ended.
        """
        body = {"model": self.model, "prompt": list(prompts), "return_token_ids": True, **values}
        choices = self._post(f"{self.base_url}/v1/completions", json=body)["choices"]
        return [
            completion_of(
                choice["token_ids"],
                choice["logprobs"]["token_logprobs"],
                is_truncated=choice["finish_reason"] == "length",
            )
            for choice in choices
        ]

    def logps_of(self, asked: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Of each (sequence, ids), the log-probs of those ids as its next token, at temperature 1.

        A request each, since a request names its ids once. The server need not read a sequence again that it has just
        scored: the beginnings of it are in its prefix cache.

        Raises:
            ValueError: the server's vLLM does not know how to give log-probs of chosen ids.
        """

        def logps(item: tuple[list[int], list[int]]) -> list[float]:
            sequence, ids = item
            chosen = {"logprobs": len(ids), "logprob_token_ids": ids, "return_tokens_as_token_ids": True}
            body = {"model": self.model, "prompt": sequence, "max_tokens": 1, **PLAIN, **chosen}
            [choice] = self._post(f"{self.base_url}/v1/completions", json=body)["choices"]
            found = choice["logprobs"]["top_logprobs"][0]
            try:
                return [found[f"token_id:{token}"] for token in ids]
            except KeyError as error:
                raise ValueError(
                    f"The vLLM server at {self.base_url} does not know `logprob_token_ids`, log-probs of chosen ids, "
                    "which vLLM 0.31 does. Update it, or set teacher_server_support='teacher'."
                ) from error

        with ThreadPoolExecutor(CONCURRENCY) as executor:
            return list(executor.map(logps, asked))

    def ask(self, question: Callable[[], T]) -> T:
        """The answer of the server that has the weights.

        Raises:
            ServerGone: it was started again; the answer, if any, is thrown away.
        """
        answer = question()
        if self.find_instance() != self.instance:
            raise ServerGone
        return answer


class ServerGenerator:
    """Samples with a vLLM server; the main process talks to it for all ranks.

    The server is given the weights when they have changed, and again when it has been started anew.
    """

    def __init__(
        self,
        get_model: Callable[[], nn.Module],
        *,
        accelerator: Accelerator,
        settings: EngineSettings,
        sampling: SamplingSettings,
        eos_token_ids: Sequence[int],
    ):
        self.get_model, self.accelerator, self.settings = get_model, accelerator, settings
        self.sampling, self.eos_token_ids = sampling, frozenset(eos_token_ids)
        check_engine_can_hold(accelerator.unwrap_model(get_model()))
        self._metadata: list[tuple[str, str, list[int]]] | None = None
        self._pushed: State | None = None
        self._step = 0
        self._client: Client | None = None
        distributed.from_main(self._connect, accelerator)

    @property
    def client(self) -> Client:
        assert self._client is not None, "only the main process talks to the server"
        return self._client

    def _connect(self) -> None:
        settings = self.settings
        self._client = Client(
            settings.server_url,
            group_port=settings.group_port,
            timeout=settings.server_timeout,
            device=self.accelerator.device,
        )
        self._client.connect()

    def sync(self, step: int) -> None:
        self._step = step
        if self._pushed != weights_of(self.accelerator.unwrap_model(self.get_model()), step):
            self._push()

    def _push(self) -> None:
        """The policy's weights to the server, joined anew where it has been started again. On every rank."""
        policy = self.accelerator.unwrap_model(self.get_model())
        if self._metadata is None:  # all are announced before the first is sent
            self._metadata = describe(engine_weights(policy))
        is_sent, num_tries = False, 0
        while not is_sent:
            failure = distributed.from_main(self._join, self.accelerator)
            weights = engine_weights(policy)
            if failure is None and self.accelerator.is_main_process:
                failure = self._send(weights)
            for _ in weights:  # every rank takes part in gathering, also where sending has failed
                pass
            num_tries += 1
            is_sent = distributed.from_main(partial(_outcome, failure, num_tries), self.accelerator)
        self._pushed = weights_of(policy, self._step)
        if self.settings.check_weights:
            check_weights(self.get_model(), self._prompt_logps, accelerator=self.accelerator)

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> Exception | None:
        try:
            self.client.send(self._metadata or [], weights)
        except Exception as error:
            self.client.instance = None  # joined anew before the next try
            return error
        return None

    def _join(self) -> Exception | None:
        """What has kept the server's workers from joining, where they had to; it may have gone down meanwhile.

        Raises:
            ConnectionError: no server within the time limit.
        """
        if self.client.find_instance() != self.client.instance:
            try:
                self.client.connect()
            except ConnectionError as error:
                return error.with_traceback(None)  # its frames hold the port that the next try listens on
        return None

    def _ask(self, question: Callable[[], T]) -> T:
        """The main process's question to a server that has the weights; the answer is known to all ranks."""
        for _ in range(MAX_TRIES):
            answer: T | None = distributed.from_main(lambda: self._try(question), self.accelerator)
            if answer is not None:
                return answer
            self._push()
        raise ConnectionError(
            f"The vLLM server at {self.settings.server_url} was another one {MAX_TRIES} times in a row. If it keeps "
            "crashing, see its log; if several processes answer at this address, start it with --api-server-count 1."
        )

    def _try(self, question: Callable[[], T]) -> T | None:
        try:
            return self.client.ask(question)
        except ServerGone:
            return None

    def generate(self, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        world, first = distributed.gather_rows(list(prompt_ids), self.accelerator)
        groups = grouped(world)
        if not groups:
            return []
        drawn = self._ask(lambda: self._draw(groups))
        return drawn[first : first + len(prompt_ids)]

    def _draw(self, groups: Sequence[tuple[list[int], int]]) -> list[Completion]:
        """Completions of every group; those of the same size in one request."""
        found: dict[int, list[Completion]] = {}
        for size in {size for _, size in groups}:
            chosen = [i for i, group in enumerate(groups) if group[1] == size]
            values = sampling_params(self.sampling, number=size, eos_token_ids=self.eos_token_ids)
            completions = self.client.complete([groups[i][0] for i in chosen], values)
            for place, i in enumerate(chosen):
                found[i] = completions[place * size : (place + 1) * size]
        return [completion for i in range(len(groups)) for completion in found[i]]

    def score(
        self,
        sequences: Sequence[tuple[list[int], list[int]]],
        *,
        topk: int,
        support: Sequence[list[list[int]]] | None = None,
    ) -> list[list[ServedToken]]:
        """Of each (prompt, completion), the engine's values of each completion token, for this rank's sequences.

        At temperature 1: prompt log-probs of vLLM ignore it. `topk` 0: of the token itself only. `support`: for each
        token the ids to give values of, in place of the engine's own top k.
        """
        world, first = distributed.gather_rows(list(sequences), self.accelerator)
        chosen = None if support is None else distributed.gather_rows(list(support), self.accelerator)[0]
        scored = self._ask(lambda: self._score(world, topk, chosen)) if world else []
        return scored[first : first + len(sequences)]

    def _score(
        self,
        sequences: Sequence[tuple[list[int], list[int]]],
        topk: int,
        support: Sequence[list[list[int]]] | None = None,
    ) -> list[list[ServedToken]]:
        output = self.client.get_sequence_logprobs(
            [[*prompt, *completion] for prompt, completion in sequences],
            [len(prompt) for prompt, _ in sequences],
            top_logprobs=topk if support is None else 0,
            chunk_size=8,
        )
        own, ids, logps = output["actual_logprobs"], output["logprob_token_ids"], output["logprobs"]
        if support is not None:
            asked = [
                ([*prompt, *completion[:i]], chosen[i])
                for (prompt, completion), chosen in zip(sequences, support, strict=True)
                for i in range(len(completion))
            ]
            answers = iter(self.client.logps_of(asked))
            ids, logps = support, [[next(answers) for _ in chosen] for chosen in support]
        return [
            [ServedToken(logp[0], *token) for logp, *token in zip(*row, strict=True)]
            for row in zip(own, ids, logps, strict=True)
        ]

    def _prompt_logps(self, ids: list[int]) -> list[float]:
        [row] = self._ask(lambda: self._score([(ids[:1], ids[1:])], 0))
        return [token.logp for token in row]


def _outcome(failure: Exception | None, num_tries: int) -> bool:
    """Whether sending succeeded. A server that was started again meanwhile is no failure, nor are the first ones."""
    is_retried = isinstance(failure, ServerGone) or (isinstance(failure, ConnectionError) and num_tries < MAX_TRIES)
    if failure is not None and not is_retried:
        raise failure
    return failure is None
