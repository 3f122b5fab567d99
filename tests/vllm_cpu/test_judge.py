"""A judge behind a real server of vLLM: what it says is read, and what it refuses is told apart."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from conftest import Server

from sdpo.rewards import JudgeReward
from sdpo.types import Score

pytestmark = pytest.mark.vllm

TEMPLATE = "w1 {completion} w2"


def judge(server: Server, model: str, **settings: Any) -> JudgeReward:
    settings = {"template": TEMPLATE, "max_tokens": 8, "num_retries": 0, **settings}
    return JudgeReward(f"{server.url}/v1", model, **settings)


def score(function: JudgeReward, *texts: str) -> list[Score]:
    return asyncio.run(function(["Q"] * len(texts), list(texts)))


def test_what_the_model_says_is_read(server: Server, policy_folders: dict[bool, Path], caplog: Any) -> None:
    # A model of random weights gives no score; its words, which it finds by greedy search, are those of the log.
    model = str(policy_folders[True])
    body = {"model": model, "max_tokens": 8, "temperature": 0.0}
    message = {"role": "user", "content": TEMPLATE.format(completion="w5 w6")}
    answer = server.post("/v1/chat/completions", {**body, "messages": [message]})
    said = answer["choices"][0]["message"]["content"]
    function = judge(server, model)
    with caplog.at_level(logging.WARNING):
        assert score(function, "w5 w6", "w7") == [Score(None)] * 2
    assert said and f"no score in {said!r}" in caplog.text
    assert function.num_failed == 2


def test_a_request_that_is_too_long_costs_its_own_reward_alone(
    server: Server, policy_folders: dict[bool, Path], caplog: Any
) -> None:
    function = judge(server, str(policy_folders[True]))
    assert score(function, "w5 " * 300, "w7") == [Score(None)] * 2
    assert "no answer (status 400" in caplog.text
    with pytest.raises(RuntimeError, match="answered none of 1 requests: status 400"):
        score(function, "w5 " * 300)


def test_an_unknown_model_is_an_error(server: Server) -> None:
    with pytest.raises(RuntimeError, match="refuses: status 404"):
        score(judge(server, "no-such-model"), "w5")
