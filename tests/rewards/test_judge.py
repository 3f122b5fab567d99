"""A judge behind an endpoint: what it is sent, what is read from its answer, and what its faults do."""

import asyncio
import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sdpo.rewards import JudgeReward, RewardScorer
from sdpo.rewards.judge import read_judgement
from sdpo.types import Completion, Rollout, Score


class Endpoint:
    """A server on this machine whose answers a function decides: (status, text of the body) by the request."""

    def __init__(self, answer):
        self.requests, self.headers, self.num_now, self.num_most = [], [], 0, 0
        lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    endpoint.requests.append(request)
                    endpoint.headers.append({"path": self.path, **self.headers})
                    endpoint.num_now += 1
                    endpoint.num_most = max(endpoint.num_most, endpoint.num_now)
                    number = len(endpoint.requests)
                status, body = answer(request["messages"][-1]["content"], number)
                with lock:
                    endpoint.num_now -= 1
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


def said(text):
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.fixture
def endpoint():
    made = []

    def make(answer):
        made.append(Endpoint(answer))
        return made[-1]

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def judge(endpoint, **settings):
    return JudgeReward(endpoint.url, "judge-model", **{"backoff": 0.01, "timeout": 5.0, **settings})


def score(function, *texts, prompts=None, **columns):
    return asyncio.run(function(prompts or ["Q"] * len(texts), list(texts), [[1]] * len(texts), **columns))


def test_the_judges_score_is_the_reward_and_its_words_the_feedback(endpoint):
    server = endpoint(lambda text, _: said('{"feedback": "Too short.", "score": 7}'))
    assert score(judge(server), "An answer") == [Score(0.7, "Too short.")]
    [request], [headers] = server.requests, server.headers
    assert (headers["path"], "Authorization" in headers) == ("/v1/chat/completions", False)
    assert request.keys() == {"model", "messages", "max_tokens", "temperature"}
    assert (request["model"], request["temperature"]) == ("judge-model", 0.0)
    [message] = request["messages"]
    assert "<question>\nQ\n</question>\n\n<answer>\nAn answer\n</answer>" in message["content"]
    assert '{"feedback": ' in message["content"] and "number from 0 to 10}" in message["content"]


def test_key_template_and_fields_are_sent(endpoint, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server = endpoint(lambda text, _: said("Score: 4"))
    function = judge(
        server,
        template="{rubric} {{}} {prompt} | {completion}",
        api_key_env="JUDGE_KEY",
        max_score=5,
        body={"seed": 1, "max_tokens": 9},
    )
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Q {x}"}]}]
    completion = [{"role": "assistant", "content": "<think>hm</think> A {completion}"}]
    result = score(function, completion, prompts=[prompt], rubric=["R {y}"])
    assert result == [Score(0.8)]
    assert server.requests[0]["messages"][0]["content"] == "R {y} {} system: S\n\nuser: Q {x} | A {completion}"
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert (server.requests[0]["seed"], server.requests[0]["max_tokens"]) == (1, 9)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"score": 7, "feedback": "x"}', Score(0.7, "x")),
        ('Well:\n```json\n{"explanation": "x", "score": "8/10"}\n```', Score(0.8, "x")),
        ("Too short.\nScore: 3/10", Score(0.3, "Too short.")),
        ("**Score:** 4/5", Score(0.8)),
        ("I give a score of 7 out of 10", Score(0.7, "I give a")),
        ("Score: 1/10 at first. Score: 9/10", Score(0.9, "Score: 1/10 at first.")),
        ('<think>Score: 1/10</think> {"score": 10}', Score(1.0)),
        ('{"score": 2} or {"score": 3}', Score(0.3)),
        ('{"score": 8, "parts": {"style": {"score": 2}}}', Score(0.8)),  # a part's score is not the answer's
        ('{"judgement": {"score": 8}}', Score(0.8)),
        ('{"score": 0.0}', Score(0.0)),
        ("good", None),
        ("Score: 12", None),
        ("Score: 4/0", None),
        ('{"score": -1}', None),
        ('{"score": true}', None),
        ('{"a":' * 2000, None),
        ("", None),
    ],
)
def test_a_score_is_read_from_json_or_from_a_line(text, expected):
    assert read_judgement(text, max_score=10) == expected


def test_an_answer_without_a_score_is_no_reward_is_counted_and_said_once(endpoint, caplog):
    server = endpoint(lambda text, _: said("Score: 5" if "B1" in text else "Nice!"))
    function = judge(server)
    with caplog.at_level(logging.WARNING):
        assert score(function, "B1", "B2", "B3") == [Score(0.5), Score(None), Score(None)]
        assert score(function, "B2") == [Score(None)]
    assert function.num_failed == 3
    [record] = caplog.records
    assert record.getMessage() == (
        "The judge gave no score in 'Nice!'. Such completions have no reward; num_failed counts them."
    )


@pytest.mark.parametrize(
    "fault",
    [
        (500, "down"),
        (429, "slow"),
        (200, "<html>"),
        (200, "{}"),
        (200, '{"choices": [{"message": {"content": null}}]}'),
    ],
)
def test_faults_that_pass_are_tried_again(endpoint, fault):
    server = endpoint(lambda text, number: fault if number <= 2 else said("Score: 5"))
    assert score(judge(server), "A") == [Score(0.5)]
    assert len(server.requests) == 3


def test_tries_wait_twice_as_long_each_time_and_end(endpoint):
    server = endpoint(lambda text, _: (503, "down"))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="answered none of 2 requests: status 503: down"):
        score(judge(server, backoff=0.1, num_retries=2), "A", "B")
    assert 0.3 <= time.monotonic() - start < 3  # 0.1 + 0.2
    assert len(server.requests) == 2 * 3


def test_a_stall_is_given_up_and_the_others_have_their_rewards(endpoint, caplog):
    def answer(text, _):
        if "slow" in text:
            time.sleep(1.5)
        return said("Score: 5")

    start = time.monotonic()
    function = judge(endpoint(answer), timeout=0.4, num_retries=1)
    assert score(function, "quick", "slow", "quick") == [Score(0.5), Score(None), Score(0.5)]
    assert time.monotonic() - start < 1.4
    assert "no answer (none in 0.4 s)" in caplog.text


def test_one_request_that_is_refused_costs_its_own_reward_and_is_not_repeated(endpoint):
    server = endpoint(lambda text, _: (400, "too long") if "long" in text else said("Score: 5"))
    assert score(judge(server), "long", "short") == [Score(None), Score(0.5)]
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [401, 404])
def test_a_refused_key_or_model_ends_the_run(endpoint, status):
    server = endpoint(lambda text, _: (status, "no such model"))
    with pytest.raises(RuntimeError, match=f"refuses: status {status}: no such model"):
        score(judge(server), "A")
    assert len(server.requests) == 1


def test_an_endpoint_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match=r"the judge at http://127.0.0.1:1/v1/chat/completions answered none of 1"):
        score(JudgeReward("http://127.0.0.1:1/v1/", "m", backoff=0.0, num_retries=1), "A")


def test_requests_run_at_once_up_to_the_limit_and_answers_keep_their_order(endpoint):
    def answer(text, _):
        time.sleep(0.1)
        return said(f"Score: {text.split('A')[1].split()[0]}/20")

    server = endpoint(answer)
    # 10 rounds of 0.1 s: the time limit is of a request alone, not of its waiting for others.
    function = judge(server, template="A{completion} ", num_concurrent=2, timeout=0.8, num_retries=0)
    start = time.monotonic()
    assert [s.reward for s in score(function, *map(str, range(20)))] == [i / 20 for i in range(20)]
    assert server.num_most == 2
    assert time.monotonic() - start < 20 * 0.1  # what one at a time takes


def test_an_empty_answer_is_judged_without_the_judge(endpoint):
    server = endpoint(lambda text, _: said("Score: 5"))
    given = {"is_truncated": [False, True, False]}
    assert score(judge(server), " ", "<think>hm", "A", **given) == [
        Score(0.0, "The answer is empty."),
        Score(0.0, "The answer was cut off at the length limit before it came to an answer."),
        Score(0.5),
    ]
    assert len(server.requests) == 1


def test_feedback_has_a_budget(endpoint):
    server = endpoint(lambda text, _: said("x" * 5000 + " Score: 5"))
    [result] = score(judge(server, max_feedback=100), "A")
    assert len(result.feedback) <= 100 and "[...]" in result.feedback


def test_it_is_a_reward_function_for_step_after_step(endpoint):
    server = endpoint(lambda text, _: said("Score: 5"))
    arguments = {"chat_template_kwargs": {}, "model_init_kwargs": None, "trust_remote_code": False, "device": "cpu"}
    scorer = RewardScorer(judge(server), reward_weights=None, **arguments)
    rows = [Rollout(0, "Q", [1], Completion([1], is_truncated=False), "A")]
    for step in range(2):
        state = type("State", (), {"global_step": step})
        assert scorer.score(rows, [{"prompt": "Q"}], trainer_state=state)[0].rewards == {"judge_reward": 0.5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{prompt}"}, "lacks {completion}"),
        ({"template": "{completion} {"}, "unmatched brace"),
        ({"template": "{completion} {a.b}"}, "placeholder 'a.b', which is no name"),
        ({"template": "{completion:3}"}, "placeholder 'completion', which is no name"),
        ({"api_key_env": "NO_SUCH_KEY"}, "environment variable NO_SUCH_KEY"),
        ({"timeout": 0}, "timeout above 0"),
        ({"max_feedback": 9}, "max_feedback is 9"),
    ],
)
def test_settings_that_cannot_work_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        JudgeReward("http://127.0.0.1:1/v1", "m", **settings)
    with pytest.raises(ValueError, match="a URL like"):
        JudgeReward("127.0.0.1:1", "m")


def test_a_column_that_the_template_names_must_be_there(endpoint):
    server = endpoint(lambda text, _: said("Score: 5"))
    with pytest.raises(ValueError, match="no column 'rubric', where a value of the judge's template is looked for"):
        score(judge(server, template="{rubric}{completion}"), "A")
    assert not server.requests
