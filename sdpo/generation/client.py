"""The client of a vLLM server: sampling, log-probs, and new weights over HTTP calls and a data plane.

TRL's client scores sequences, sends weights and knows the versions of vLLM; here are time limits, retries, restarts,
updates left half done, and how completions end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import requests
import torch
from torch import Tensor
from trl.generation.vllm_client import VLLMClient

from sdpo.generation.engine import completion_of
from sdpo.generation.vllm import DataPlane, data_plane
from sdpo.types import Completion

T = TypeVar("T")
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds between two tries, doubled each time
TRANSIENT = (500, 502, 503, 504)
BUSY = {"success": False}  # what comes with 200 where the prefix cache could not be emptied
IN_USE = "requests of somebody else hold its prefix cache, which has values of old weights; it has to be the trainer's"
CONCURRENCY = 10  # requests under way, as many as a session keeps connections
# softmax(logits), whatever the model's own generation_config says.
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Tensors go beside these calls, so one that has failed is not repeated by itself: the weights are sent anew.
ONCE = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
HALF_DONE = "weight update is already active"  # what the server says while an earlier update has not ended
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
                if answer.status_code != 200 and answer.status_code not in TRANSIENT:
                    self._raise_if_gone(url)
                    raise ValueError(f"The vLLM server refuses {url}: {said}")
            self._raise_if_gone(url)
            if url.endswith(ONCE):
                raise ConnectionError(
                    f"The vLLM server at {url} did not take the weights. It said: {said}. "
                    "If that repeats, start the server again."
                )
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

    def _start_weight_update(self) -> None:
        """Begins an update, and first ends one that has been left half done: by a trainer that died, or ran out of
        time while the server was still reading. All weights follow, so it does not matter which ones have arrived."""
        try:
            super()._start_weight_update()
        except ConnectionError as error:
            if HALF_DONE not in str(error):
                raise
            self._finish_weight_update()
            super()._start_weight_update()

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
