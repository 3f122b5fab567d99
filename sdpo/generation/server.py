"""Sampling and scoring by a vLLM server, which is given the policy's weights, for all ranks.

Letters: T tokens of a completion, K support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from accelerate import Accelerator
from torch import Tensor, nn

from sdpo import distributed
from sdpo.generation.client import Client, ServerGone
from sdpo.generation.engine import State, check_weights, grouped, sampling_params, weights_of
from sdpo.generation.weights import check_engine_can_hold, describe, engine_weights
from sdpo.types import Completion, EngineSettings, SamplingSettings, ServedToken

T = TypeVar("T")
MAX_TRIES = 3  # of sending the weights, and of a question to a server that has been started again


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
        is_sent, failures = False, list[Exception]()
        while not is_sent:
            failure = distributed.from_main(self._join, self.accelerator)
            weights = engine_weights(policy)
            if failure is None and self.accelerator.is_main_process:
                failure = self._send(weights)
            for _ in weights:  # every rank takes part in gathering, also where sending has failed
                pass
            failures += [failure] if failure is not None else []
            is_sent = distributed.from_main(partial(_outcome, failure, failures), self.accelerator)
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


def _outcome(failure: Exception | None, failures: Sequence[Exception]) -> bool:
    """Whether the last try to send succeeded; the first of too many failures is the cause of the error.

    A server that was started again meanwhile is no failure, nor are the first ones.
    """
    if failure is None:
        return True
    if isinstance(failure, ServerGone) or (isinstance(failure, ConnectionError) and len(failures) < MAX_TRIES):
        return False
    raise failure from (failures[0] if failures[0] is not failure else None)
