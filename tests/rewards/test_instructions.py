"""Verifiable instructions: which rules a response breaks, by the definitions of IFEval, and by how much."""

import json
import time

import pytest

from sdpo.rewards import InstructionReward, instruction_reward
from sdpo.rewards.instruction_rules import RULES, split_sentences
from sdpo.types import Score

AT_LEAST, LESS = {"relation": "at least"}, {"relation": "less than"}


def problem(rule, text, **kwargs):
    [name] = [known for known in RULES if known.endswith(f":{rule}")]
    [result] = instruction_reward(["Q"], [text], [[1]], instructions=[[{"id": name, "kwargs": kwargs}]])
    assert result.reward == (result.feedback is None)
    return result.feedback


@pytest.mark.parametrize(
    ("rule", "kwargs", "followed", "broken", "feedback"),
    [
        (
            "number_words",
            {"num_words": 3, **AT_LEAST},
            "one, two three",
            "one two",
            "The response has 2 words; at least 3 were asked for.",
        ),
        (
            "number_words",
            {"num_words": 3, **LESS},
            "one two",
            "one two three",
            "The response has 3 words; fewer than 3 were asked for.",
        ),
        (
            "number_sentences",
            {"num_sentences": 2, **AT_LEAST},
            "Dr. No is in. Run!",
            "Dr. No is in",
            "The response has 1 sentence; at least 2 were asked for.",
        ),
        (
            "number_paragraphs",
            {"num_paragraphs": 2},
            "a\n***\nb\n***",
            "a\n\nb",
            "Dividers *** make 1 paragraph; exactly 2 were asked for.",
        ),
        (
            "number_paragraphs",
            {"num_paragraphs": 3},
            "a *** b *** c",
            "a *** *** c",
            "A paragraph between two dividers *** is empty.",
        ),
        (
            "nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "two"},
            'One.\n\n"Two, he',
            "One.\n\nOne",
            'Paragraph 2 starts with "One"; "two" was asked for.',
        ),
        (
            "nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "two"},
            "One.\n\nTwo!",
            "One",
            "Empty lines make 1 paragraph; exactly 2 were asked for.",
        ),
        ("existence", {"keywords": ["cat", "dog"]}, "Cats and dogs", "a cat", 'The response lacks "dog".'),
        (
            "frequency",
            {"keyword": "cat", "frequency": 2, **AT_LEAST},
            "Cats, cat",
            "cat",
            '"cat" occurs 1 time; at least 2 were asked for.',
        ),
        (
            "forbidden_words",
            {"forbidden_words": ["cat", "dog"]},
            "cats",
            "a Cat",
            'The response uses "cat", which it was to avoid.',
        ),
        (
            "letter_frequency",
            {"letter": "a", "let_frequency": 3, "let_relation": "less than"},
            "aA",
            "aaA",
            'The letter "a" occurs 3 times; fewer than 3 were asked for.',
        ),
        (
            "capital_word_frequency",
            {"capital_frequency": 2, "capital_relation": "at least"},
            "NATO and U.S. men",
            "NATO men",
            "The response has 1 word in all capitals; at least 2 were asked for.",
        ),
        ("english_capital", {}, "HELLO, 2 YOU", "HELLO You", '1 word not in capital letters, the first "You".'),
        ("english_lowercase", {}, "hello, 2 you", "Hello You", '2 words not in lowercase letters, the first "Hello".'),
        (
            "json_format",
            {},
            '```json\n{"a": [1]}\n```',
            "so {}",
            "The response as a whole is no JSON: Expecting value: line 1 column 1 (char 0).",
        ),
        (
            "number_bullet_lists",
            {"num_bullets": 2},
            "So:\n* a\n - b\n**c**",
            "* a",
            "The response has 1 bullet point (lines starting with * or -); exactly 2 were asked for.",
        ),
        (
            "title",
            {},
            "<<A title>>\ntext",
            "<< >>",
            "The response has no title in double angle brackets, as in <<title>>.",
        ),
        (
            "number_highlighted_sections",
            {"num_highlights": 2},
            "*a* and **b**",
            "*a* and ** **",
            "The response has 1 highlighted part (*text*); at least 2 were asked for.",
        ),
        (
            "multiple_sections",
            {"section_spliter": "SECTION", "num_sections": 2},
            "SECTION 1\na\nSECTION 2",
            "SECTION 1",
            'The response has 1 section (as in "SECTION 1"); at least 2 were asked for.',
        ),
        (
            "number_placeholders",
            {"num_placeholders": 2},
            "[name] of [town]",
            "[name] of",
            "The response has 1 placeholder like [name]; at least 2 were asked for.",
        ),
        (
            "postscript",
            {"postscript_marker": "P.S."},
            "x\np. s. y",
            "ps y",
            'The response has no postscript that starts with "P.S.".',
        ),
        (
            "postscript",
            {"postscript_marker": "P.P.S"},
            "x\nP.P.S y",
            "P.S. y",
            'The response has no postscript that starts with "P.P.S".',
        ),
        (
            "constrained_response",
            {},
            "My answer is no.",
            "no",
            'The response has none of "My answer is yes.", "My answer is no.", "My answer is maybe.".',
        ),
        (
            "repeat_prompt",
            {"prompt_to_repeat": "Do it."},
            "do it. Done",
            "Done",
            'The response starts with "Done"; it was to repeat the request first, word for word.',
        ),
        ("two_responses", {}, "a\n******\nb", "a\n******\na", "The two responses are the same."),
        ("two_responses", {}, "a******b", "a", "Dividers ****** make 1 response; exactly 2 were asked for."),
        ("no_comma", {}, "a b", "a, b", "The response has 1 comma; none was to be used."),
        (
            "end_checker",
            {"end_phrase": "the end."},
            'So. "The End."',
            "The end is near",
            'The response ends with "The end is near"; the last words were to be "the end.".',
        ),
        ("quotation", {}, '"a"', 'a"', "The response as a whole is not in double quotation marks."),
    ],
)
def test_a_rule_is_followed_or_the_measure_is_said(rule, kwargs, followed, broken, feedback):
    assert problem(rule, followed, **kwargs) is None
    assert problem(rule, broken, **kwargs) == feedback


def test_the_language_of_a_response():
    pytest.importorskip("py3langid")
    german = "Der Hund ist nicht zu Hause, sondern im Wald."
    assert problem("response_language", german, language="de") is None
    assert problem("response_language", german, language="en") == (
        'The language of the response is "de"; "en" was asked for.'
    )


def test_every_rule_of_ifeval_is_there():
    assert len(RULES) == 25


RULES_OF_ROW = [
    {"id": "punctuation:no_comma", "kwargs": {}},
    {"id": "length_constraints:number_words", "kwargs": {"num_words": 3, "relation": "at least"}},
    {"id": "keywords:existence", "kwargs": {"keywords": ["cat"]}},
    {"id": "startend:quotation"},
]
BROKEN = "The response has 1 comma; none was to be used.\nThe response has 2 words; at least 3 were asked for."


def test_the_reward_is_the_share_of_rules_or_all_or_nothing():
    # 2 of 4 are followed.
    given = {"instructions": [RULES_OF_ROW], "is_truncated": [False]}
    assert instruction_reward(["Q"], ['"cat, dog"'], **given) == [Score(0.5, BROKEN)]
    assert InstructionReward(is_strict=True)(["Q"], ['"cat, dog"'], **given) == [Score(0.0, BROKEN)]
    assert instruction_reward(["Q"], ['<think>a, b</think>"cat dog mouse"'], **given) == [Score(1.0)]


def test_what_was_cut_is_said():
    given = {"instructions": [RULES_OF_ROW], "is_truncated": [True]}
    [result] = instruction_reward(["Q"], ['"cat, dog"'], **given)
    assert result.feedback == f"{BROKEN}\nThe answer was cut off at the length limit."
    [result] = instruction_reward(["Q"], ["<think>so"], **given)
    assert result == Score(0.0, "The answer was cut off at the length limit before the response began.")
    assert instruction_reward(["Q"], [" "], instructions=[RULES_OF_ROW]) == [Score(0.0, "The response is empty.")]


def test_rows_as_json_as_ifeval_has_them_and_none():
    ids = [rule["id"] for rule in RULES_OF_ROW]
    # A column of dicts gives every dict the keys of all, and whole numbers beside missing ones are fractions.
    kwargs = [
        {"num_words": None, "relation": None, "keywords": None},
        {"num_words": 3.0, "relation": "at least", "keywords": None},
        {"num_words": None, "relation": None, "keywords": ["cat"]},
        {"num_words": None, "relation": None, "keywords": None},
    ]
    for columns in (
        {"instructions": [json.dumps(RULES_OF_ROW)]},
        {"instruction_id_list": [ids], "kwargs": [kwargs]},
    ):
        assert instruction_reward(["Q"], ['"cat, dog"'], **columns) == [Score(0.5, BROKEN)]
    assert instruction_reward(["Q"], ["x"], instructions=[None]) == [Score(None)]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"id": "punctuation:no_coma"}], "no rule 'punctuation:no_coma'. Did you mean 'punctuation:no_comma'?"),
        ([{"id": "punctuation:no_comma", "kwargs": {"x": 1}}], r"punctuation:no_comma takes \[\], got \['x'\]"),
        ([{"id": "length_constraints:number_words", "kwargs": {"num_words": 1}}], r"got \['num_words'\]"),
        (
            [{"id": "length_constraints:number_words", "kwargs": {"num_words": 1, "relation": "most"}}],
            r"relation of length_constraints:number_words is 'most'; one of \['at least', 'less than'\]",
        ),
        ([{"id": "keywords:existence", "kwargs": {"keywords": "cat"}}], "keywords of keywords:existence is 'cat'"),
        ([{"id": "detectable_format:number_bullet_lists", "kwargs": {"num_bullets": "3"}}], "value of type int"),
        ([], "a list of dicts with 'id' and 'kwargs' is needed"),
        ({"id": "punctuation:no_comma"}, "a list of dicts"),
        ("{", "no JSON"),
    ],
)
def test_rules_that_cannot_be_read_are_errors_before_anything_is_scored(rules, message):
    with pytest.raises(ValueError, match=f"instructions of row 1.*{message}"):
        instruction_reward(["Q"] * 2, ["x"] * 2, instructions=[RULES_OF_ROW, rules])


def test_sentences_end_where_a_reader_says():
    text = 'Dr. Smith, e.g., said "Stop!" Then 3.5 apples... fell? Yes\n\n- a\n- b'
    assert split_sentences(text) == ['Dr. Smith, e.g., said "Stop!"', "Then 3.5 apples...", "fell?", "Yes", "- a\n- b"]


@pytest.mark.parametrize(
    "piece", ["[", "<<", "*", ".", "A. ", " ", "\n", " \n", "-", '"', "P.", "**x", "`", "{", "***"]
)
def test_no_response_makes_a_rule_slow(piece):
    # 40,000 characters; where time grew with their square this would take from one to thirty seconds.
    text = "x" + piece * (40_000 // len(piece)) + "x"
    values = {"num_paragraphs": 1, "nth_paragraph": 1, "letter": "x", "keywords": ["y"], "forbidden_words": ["y"]}
    start = time.monotonic()
    for name, rule in RULES.items():
        if name != "language:response_language":
            names = [n for n in rule.__annotations__ if n not in ("text", "return")]
            rule(
                text,
                **{
                    n: values.get(n, "at least" if "relation" in n else 1 if "num" in n or "freq" in n else "y")
                    for n in names
                },
            )
    assert time.monotonic() - start < 1.0
