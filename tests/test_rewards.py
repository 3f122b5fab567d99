"""Reward functions of every kind: called, awaited, checked and weighed."""

import asyncio
import functools
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from sdpo.rewards import RewardScorer
from sdpo.types import Completion, Rollout, Score

STATE = SimpleNamespace(global_step=3)
NAN = float("nan")


def scorer(reward_funcs, *, weights=None, **kwargs):
    defaults = {"chat_template_kwargs": {}, "model_init_kwargs": None, "trust_remote_code": False, "device": "cpu"}
    return RewardScorer(reward_funcs, reward_weights=weights, **{**defaults, **kwargs})


def rollouts(num=4, prompt="Q"):
    return [Rollout(0, prompt, [1], Completion([5, i], is_truncated=False), f"answer {i}") for i in range(num)]


def score(reward_funcs, *, num=4, prompt="Q", examples=None, **kwargs):
    rows = rollouts(num, prompt)
    examples = [{"prompt": prompt} for _ in rows] if examples is None else examples
    return scorer(reward_funcs, **kwargs).score(rows, examples, trainer_state=STATE)


def returns(*values):
    def function(**_):
        return list(values)

    return function


def rewards_of(scored):
    return [row.reward for row in scored]


# --- what functions are given ----------------------------------------------------------------------------------------


def test_a_function_gets_strings_ids_columns_and_the_trainer_state():
    seen = {}

    def function(prompts, completions, completion_ids, answer, level, trainer_state):
        given = (prompts, completions, completion_ids, answer, level, trainer_state)
        seen.update(zip(names, given, strict=True))
        return [0] * len(prompts)

    names = ("prompts", "completions", "completion_ids", "answer", "level", "trainer_state")
    examples = [
        {"prompt": "Q", "answer": 1, "level": "a", "completion": "x"},
        {"prompt": "Q", "answer": 2, "completion_ids": [0]},
    ]
    score(function, num=2, examples=examples)
    assert seen == {
        "prompts": ["Q", "Q"],
        "completions": ["answer 0", "answer 1"],
        "completion_ids": [[5, 0], [5, 1]],
        "answer": [1, 2],
        "level": ["a", None],
        "trainer_state": STATE,
    }


def test_a_function_that_asks_is_told_which_completions_were_cut():
    rows = [Rollout(0, "Q", [1], Completion([5], is_truncated=cut), "A") for cut in (True, False)]

    class Counts:
        def __call__(self, completions, is_truncated=None, **columns):
            return [float(cut) for cut in is_truncated]

    def does_not(prompts, completions, completion_ids, trainer_state):
        return [0.0] * len(prompts)

    examples = [{"prompt": "Q"}] * 2
    scored = scorer([Counts(), does_not]).score(rows, examples, trainer_state=STATE)
    assert rewards_of(scored) == [1.0, 0.0]
    examples = [{"prompt": "Q", "is_truncated": 3}] * 2  # a column of that name stays what it is
    assert rewards_of(scorer(Counts()).score(rows, examples, trainer_state=STATE)) == [3.0, 3.0]


@pytest.mark.parametrize("prefill", [[], [{"role": "assistant", "content": "The"}]])
def test_completions_of_chats_are_assistant_turns_and_hold_the_continuation_only(prefill):
    seen = {}

    def function(**kwargs):
        seen.update(kwargs)
        return [0]

    prompt = [{"role": "user", "content": "Q"}, *prefill]
    score(function, num=1, prompt=prompt)
    assert seen["completions"] == [[{"role": "assistant", "content": "answer 0"}]]
    assert seen["prompts"] == [prompt]


def test_what_a_function_changes_stays_with_it():
    def vandal(prompts, completions, completion_ids, facts, **_):
        prompts[0][0]["content"] = "changed"
        completions[0][0]["content"] = "changed"
        completion_ids[0].append(99)
        facts[0]["deep"].append("changed")
        return [0]

    seen = {}

    def witness(**kwargs):
        seen.update(kwargs)
        return [1]

    prompt = [{"role": "user", "content": "Q"}]
    example = {"prompt": prompt, "facts": {"deep": ["x"]}}
    [row] = score([vandal, witness], num=1, prompt=prompt, examples=[example])
    assert prompt == [{"role": "user", "content": "Q"}]
    assert example == {"prompt": prompt, "facts": {"deep": ["x"]}}
    assert row.rollout.completion.ids == [5, 0]
    assert seen["prompts"] == [prompt] and seen["completion_ids"] == [[5, 0]] and seen["facts"] == [{"deep": ["x"]}]


@pytest.mark.parametrize("name", ["prompts", "completions", "trainer_state"])
def test_a_column_with_the_name_of_an_argument_is_refused(name):
    with pytest.raises(ValueError, match=name):
        score(returns(0), num=1, examples=[{"prompt": "Q", name: 1}])


# --- kinds of functions ----------------------------------------------------------------------------------------------


def plain(completions, **_):
    return [len(c) for c in completions]


async def awaited(completions, **_):
    await asyncio.sleep(0)
    return [len(c) for c in completions]


class Judge:
    def __init__(self, scale=1):
        self.scale = scale

    def __call__(self, completions, **_):
        return [self.scale * len(c) for c in completions]

    def method(self, completions, **_):
        return self(completions)


class NamedJudge(Judge):
    def __init__(self):
        super().__init__()
        self.__name__ = "strict"


class AsyncJudge:
    async def __call__(self, completions, **_):
        return await awaited(completions)


def hidden_async(completions, **_):
    return awaited(completions)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (plain, "plain"),
        (awaited, "awaited"),
        (hidden_async, "hidden_async"),
        (Judge(), "Judge"),
        (Judge().method, "method"),
        (NamedJudge(), "strict"),
        (AsyncJudge(), "AsyncJudge"),
        (functools.partial(plain, extra=1), "plain"),
        (functools.partial(functools.partial(awaited, extra=1), other=2), "awaited"),
        (functools.partial(AsyncJudge()), "AsyncJudge"),
    ],
)
def test_every_kind_of_function_gives_the_same_numbers_under_its_own_name(function, name):
    built = scorer(function)
    assert built.names == [name]
    scored = built.score(rollouts(2), [{}, {}], trainer_state=STATE)
    assert [row.rewards for row in scored] == [{name: 8.0}, {name: 8.0}]


def test_repeated_names_get_suffixes_that_are_free():
    def plain_1(**_):
        return []

    assert scorer([plain, plain, plain_1, plain]).names == ["plain", "plain_2", "plain_1", "plain_3"]
    assert scorer([Judge(), Judge(2)]).names == ["Judge", "Judge_1"]


def test_async_functions_wait_together():
    meeting = asyncio.Barrier(2)  # opens only when both are inside

    async def first(**_):
        await asyncio.wait_for(meeting.wait(), 5)
        return [1]

    async def second(**_):
        await asyncio.wait_for(meeting.wait(), 5)
        return [2]

    [row] = score([first, returns(4), second], num=1)
    assert row.reward == 7


def test_async_functions_work_inside_a_running_event_loop():
    async def notebook():
        return score([awaited, plain], num=1)

    [row] = asyncio.run(notebook())
    assert row.rewards == {"awaited": 8.0, "plain": 8.0}


def test_a_sync_function_may_start_a_loop_of_its_own():
    def function(completions, **_):
        return asyncio.run(awaited(completions))

    assert rewards_of(score([awaited, function], num=1)) == [16.0]


def test_what_an_async_function_keeps_open_is_usable_at_the_next_step():
    class Client:
        def __init__(self):
            self.loops = set()

        async def __call__(self, **_):
            self.loops.add(asyncio.get_running_loop())
            return [0]

    client = Client()
    built = scorer(client)
    for _ in range(2):
        built.score(rollouts(1), [{}], trainer_state=STATE)
    assert len(client.loops) == 1


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="reward function 1 is int 3"):
        scorer([plain, 3])


def test_weights_and_processing_classes_are_one_a_function():
    with pytest.raises(ValueError, match=r"reward_weights has 1 entries for 2 reward functions \['plain', 'Judge'\]"):
        scorer([plain, Judge()], weights=[1.0])
    with pytest.raises(ValueError, match="reward_processing_classes has 2 entries for 1"):
        scorer(plain, reward_processing_classes=[None, None])


def test_without_functions_there_is_no_reward_and_the_column_still_speaks():
    [row] = score(None, num=1, examples=[{"privileged_context": "hint"}])
    assert (row.rewards, row.reward, row.feedback) == ({}, None, "hint")


# --- what functions return -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (None, None),
        (NAN, None),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(NAN), None),
        (Score(2), 2.0),
        (Score(None, "f"), None),
        ({"reward": 3}, 3.0),
        ({"score": torch.tensor(4), "feedback": None}, 4.0),
        ({"score": 1, "feedback": "f", "accuracy": 0.0}, 1.0),
    ],
)
def test_allowed_values(value, number):
    [row] = score(returns(value), num=1)
    assert row.reward == number
    assert row.reward is None or type(row.reward) is float


@pytest.mark.parametrize("whole", [torch.tensor([1.0, NAN]), np.array([1, NAN]), (1, None), [1, NAN]])
def test_a_whole_return_may_be_a_list_tuple_tensor_or_array(whole):
    assert rewards_of(score(lambda **_: whole, num=2)) == [1.0, None]


def test_none_leaves_a_function_out_of_the_weighted_sum():
    scored = score([returns(1, None, None), returns(2, 3, NAN)], num=3, weights=[10, 0.5])
    assert rewards_of(scored) == [11.0, 1.5, None]
    assert [tuple(row.rewards.values()) for row in scored] == [(1, 2), (None, 3), (None, None)]


def test_a_weight_of_zero_keeps_the_reward_a_number():
    assert rewards_of(score(returns(7), num=1, weights=[0.0])) == [0.0]


@pytest.mark.parametrize("value", ["1", [1], (1, "f"), object(), {"feedback": "f"}, {"reward": 1, "score": 1}, 1j])
def test_other_values_are_refused_by_name_and_place(value):
    with pytest.raises(
        TypeError, match=r"`function`, completion 1: .*(Score\(reward, feedback\)|'reward' or 'score')"
    ):
        score(returns(0, value), num=2)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), Score(float("inf")), {"score": np.inf}])
def test_an_infinite_reward_is_refused(value):
    with pytest.raises(ValueError, match="`function`, completion 0: the reward is"):
        score(returns(value), num=1)


def test_a_wrong_number_of_rewards_is_refused():
    with pytest.raises(ValueError, match="`function` returned 1 rewards for 4 completions"):
        score(returns(1.0))


@pytest.mark.parametrize("whole", [None, 1.0, "11", {"reward": 1}, Score(1, "f"), {1, 2}])
def test_a_return_that_is_no_list_is_refused(whole):
    with pytest.raises(TypeError, match="a list with one value per completion is needed"):
        score(lambda **_: whole, num=2)


def test_an_array_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(4, 1\); \(4,\) is needed"):
        score(lambda **_: torch.zeros(4, 1))


# --- feedback --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "give", [Score, lambda r, f: {"reward": r, "feedback": f}, lambda r, f: {"score": r, "feedback": f}]
)
def test_feedback_belongs_to_its_attempt_and_wins_over_the_column(give):
    examples = [{"privileged_context": "column"}] * 3
    scored = score(returns(give(0, "mine"), give(0, None), give(0, " ")), num=3, examples=examples)
    assert [row.feedback for row in scored] == ["mine", "column", "column"]


def test_feedback_of_several_functions_is_joined_in_order():
    scored = score([returns(Score(1, "a")), returns(0), returns(Score(None, "b"))], num=1)
    assert (scored[0].feedback, scored[0].reward) == ("a\nb", 1.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (["a", "b"], "a\nb"),
        (["a", None], "a"),
        ({"got": "4", "score": 0.5, "hint": None}, "got: 4\nscore: 0.5"),
        ({"tests": ["one failed", "two failed"]}, "tests:\none failed\ntwo failed"),
        ([{"a": "b"}], "a: b"),
    ],
)
def test_lists_and_dicts_of_feedback_become_lines(value, text):
    assert score(returns(Score(0, value)), num=1)[0].feedback == text
    assert score(returns(0), num=1, examples=[{"privileged_context": value}])[0].feedback == text


@pytest.mark.parametrize("value", [3, 0.5, True, b"x", [3], {"a": object()}])
def test_other_feedback_is_refused(value):
    with pytest.raises(TypeError, match="`function`, completion 0: feedback must be text"):
        score(returns(Score(0, value)), num=1)


@pytest.mark.parametrize(("value", "text"), [(3, "3"), (0.5, "0.5"), (True, "True"), ([3, "b"], "3\nb")])
def test_a_number_in_the_feedback_column_is_text_since_the_column_names_it(value, text):
    assert score(returns(0), num=1, examples=[{"privileged_context": value}])[0].feedback == text


@pytest.mark.parametrize("value", [b"x", {"a": object()}])
def test_other_values_of_the_feedback_column_are_refused(value):
    with pytest.raises(TypeError, match="privileged_context of row 0: feedback must be text"):
        score(returns(0), num=1, examples=[{"privileged_context": value}])


# --- errors ----------------------------------------------------------------------------------------------------------


def failing(**_):
    raise KeyError("no such answer")


async def failing_later(**_):
    await asyncio.sleep(0)
    raise KeyError("no such answer")


@pytest.mark.parametrize("function", [failing, failing_later])
def test_an_error_names_the_function_and_the_step(function):
    with pytest.raises(
        RuntimeError, match=f"`{function.__name__}` raised KeyError at step 3.*no such answer"
    ) as caught:
        score([awaited, function], num=1)
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_waits_is_closed_when_a_later_function_fails():
    waiting = []

    def starting(**kwargs):
        waiting.append(awaited(**kwargs))
        return waiting[0]

    with pytest.raises(RuntimeError, match="`failing`"):
        score([starting, failing], num=1)
    assert inspect.getcoroutinestate(waiting[0]) == inspect.CORO_CLOSED


def test_the_others_stop_when_one_async_function_fails():
    stopped = []

    async def patient(**_):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.append(True)
            raise

    with pytest.raises(RuntimeError, match="failing_later"):
        score([patient, failing_later], num=1)
    assert stopped == [True]


def test_examples_are_one_a_rollout():
    with pytest.raises(ValueError, match="4 rollouts but 1 examples"):
        score(plain, examples=[{}])


# --- models ----------------------------------------------------------------------------------------------------------

CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if shout %}loud{% endif %}"
WORDS = ["[pad]", "[bos]", "[unk]", "<user>", "<assistant>", "Q", "The", "answer", "0", "1", "2", "3", "loud"]


@pytest.fixture
def tokenizer():
    built = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[unk]"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.post_processor = processors.TemplateProcessing(single="[bos] $A", special_tokens=[("[bos]", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token="[bos]", eos_token="[pad]", unk_token="[unk]", chat_template=CHAT
    )


def config(num_labels=1):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2Config(vocab_size=len(WORDS), num_labels=num_labels, initializer_range=1.0, **sizes, **heads)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Qwen2ForSequenceClassification(config()).train()


def expected_reward(model, words):
    ids = torch.tensor([[WORDS.index(word) for word in words.split()]])
    with torch.no_grad():
        return model.model(ids).last_hidden_state[0, -1] @ model.score.weight[0]


def test_a_reward_model_scores_prompt_and_completion(model, tokenizer):
    scored = score(model, prompt="Q ", reward_processing_classes=tokenizer)
    for i, row in enumerate(scored):
        assert row.rewards["Qwen2ForSequenceClassification"] == pytest.approx(
            expected_reward(model, f"[bos] Q answer {i}").item(), abs=1e-5
        )
    assert tokenizer.pad_token == "[pad]" and model.config.pad_token_id == 0 and not model.training


@pytest.mark.parametrize(
    ("turns", "answer"),
    [
        ([], "answer 0"),
        ([{"role": "assistant", "content": "The "}], "The answer 0"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "The "}]}], "The answer 0"),
    ],
)
def test_a_reward_model_reads_an_answer_and_its_prefill_as_one_turn(model, tokenizer, turns, answer):
    prompt = [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, *turns]
    kwargs = {"reward_processing_classes": [tokenizer], "chat_template_kwargs": {"shout": True}}
    [row] = score([model], num=1, prompt=prompt, **kwargs)
    expected = expected_reward(model, f"<user> Q <assistant> {answer} loud")
    assert row.reward == pytest.approx(expected.item(), abs=1e-5)


def test_a_reward_does_not_depend_on_its_neighbours(model, tokenizer):
    built = scorer(model, reward_processing_classes=tokenizer)
    rows = [
        Rollout(0, "Q ", [1], Completion([1], is_truncated=False), text) for text in ("answer", "answer 1 2 3 The Q")
    ]
    both = built.score(rows, [{}, {}], trainer_state=STATE)
    alone = built.score(rows[:1], [{}], trainer_state=STATE)
    assert both[0].reward == pytest.approx(alone[0].reward, abs=1e-6)
    assert both[0].reward != pytest.approx(both[1].reward, abs=1e-3)


def test_a_reward_model_loads_by_path_with_one_label_and_the_arguments_stay(tmp_path, tokenizer):
    path = tmp_path / "judge"
    Qwen2ForCausalLM(config(num_labels=2)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    init = {"dtype": torch.float32, "revision": "main"}
    built = scorer(str(path), model_init_kwargs=init)
    assert built.names == ["judge"] and init == {"dtype": torch.float32, "revision": "main"}
    assert isinstance(built.score(rollouts(1), [{}], trainer_state=STATE)[0].reward, float)


def test_the_tokenizer_of_a_reward_model_is_of_the_same_revision(monkeypatch, model, tokenizer):
    asked = []

    def load(result):
        return lambda path, **kwargs: asked.append((path, kwargs["revision"], kwargs["trust_remote_code"])) or result

    monkeypatch.setattr("sdpo.rewards.reward_model.AutoModelForSequenceClassification.from_pretrained", load(model))
    monkeypatch.setattr("sdpo.rewards.reward_model.AutoTokenizer.from_pretrained", load(tokenizer))
    scorer("org/judge", model_init_kwargs={"revision": "v2"}, trust_remote_code=True)
    assert asked == [("org/judge", "v2", True)] * 2


def test_a_reward_model_with_several_labels_is_refused(tokenizer):
    model = Qwen2ForSequenceClassification(config(num_labels=2))
    with pytest.raises(ValueError, match="has 2 labels"):
        scorer(model, reward_processing_classes=tokenizer)
