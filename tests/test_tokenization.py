"""Prompts to ids and back, with small tokenizers that differ in what they do about special tokens and templates."""

import copy
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, ProcessorMixin

from sdpo.reprompt import teacher_prompt
from sdpo.tokenization import PromptTokenizer, ensure_pad_token, eos_token_ids, text_tokenizer
from sdpo.types import RepromptSettings, TeacherContext

SPECIAL = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
BOS, EOS, IM_END = 256, 257, 259

# Turns between markers, as ChatML has them. A finished thinking block of an answer is kept only in the last turn, and
# enable_thinking=false opens the answer with an empty block.
THINKING_TEMPLATE = """
{%- for m in messages -%}
{%- set text = m.content -%}
{%- if m.role == 'assistant' and '</think>' in text and not loop.last -%}
{%- set text = text.split('</think>')[-1].lstrip() -%}
{%- endif -%}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' + text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""
BOS_TEMPLATE = "{{ bos_token }}" + THINKING_TEMPLATE
# Prints whatever the content is, as many templates do.
PRINTING_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
PARTS_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% for p in m.content %}{{ p.text }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
FIRST_PART_TEMPLATE = "{% for m in messages %}{{ '> ' + m.content[0].text }}{% endfor %}"
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)


def byte_tokenizer(template=THINKING_TEMPLATE, *, adds_bos=False, adds_eos=False, bos_token="<bos>"):
    """One token a byte, plus special tokens; optionally puts <bos> before and <eos> behind what it tokenizes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    before, behind = "<bos> " * adds_bos, " <eos>" * adds_eos
    built.post_processor = processors.TemplateProcessing(
        single=f"{before}$A{behind}", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token=bos_token, eos_token="<eos>", chat_template=template, name_or_path="bytes"
    )


def prompt_tokenizer(tokenizer=None, *, limit=None, **template_kwargs):
    return PromptTokenizer(
        byte_tokenizer() if tokenizer is None else tokenizer,
        max_prompt_length=limit,
        chat_template_kwargs=template_kwargs,
        eos_token_ids=[EOS, IM_END],
    )


def text_of(tokenizer, ids):
    return tokenizer.tokenizer.decode(ids, skip_special_tokens=False)


def user(content="Hi"):
    return [{"role": "user", "content": content}]


HEADER = "<|im_start|>assistant\n"
SHORT = f"<|im_start|>user\nHi<|im_end|>\n{HEADER}"


# --- what a prompt becomes -------------------------------------------------------------------------------------------


def test_a_chat_ends_with_the_header_of_the_answer():
    tokenizer = prompt_tokenizer()
    [ids] = tokenizer.encode([user()])
    assert text_of(tokenizer, ids) == SHORT
    assert text_of(tokenizer, tokenizer.generation_header_ids) == HEADER


@pytest.mark.parametrize("content", ["", None])
def test_a_tool_turn_is_answered(content):
    template = THINKING_TEMPLATE.replace("m.content", "(m.content or '')")
    tokenizer = prompt_tokenizer(byte_tokenizer(template))
    calls = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    [ids] = tokenizer.encode([[*user(), calls, {"role": "tool", "content": "5"}]])
    assert text_of(tokenizer, ids).endswith(f"<|im_start|>user\n5<|im_end|>\n{HEADER}")


@pytest.mark.parametrize("content", ["The ", [{"type": "text", "text": "Th"}, {"type": "text", "text": "e "}]])
def test_a_prefilled_answer_is_continued(content):
    tokenizer = prompt_tokenizer()
    [ids] = tokenizer.encode([[*user(), {"role": "assistant", "content": content}]])
    assert text_of(tokenizer, ids) == SHORT + "The "


@pytest.mark.parametrize(("kwargs", "thought"), [({}, ""), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")])
def test_template_settings_reach_student_and_teacher_alike(kwargs, thought):
    tokenizer = prompt_tokenizer(**kwargs)
    student, teacher = tokenizer.encode([user(), user("Hi, and here is more")])
    header = tokenizer.generation_header_ids
    assert text_of(tokenizer, header) == HEADER + thought
    assert student[-len(header) :] == teacher[-len(header) :] == header


def test_template_settings_that_the_library_sets_itself_are_refused():
    with pytest.raises(ValueError, match=r"must not set \['add_generation_prompt'\]"):
        prompt_tokenizer(add_generation_prompt=False)


def test_a_template_may_come_with_the_settings():
    tokenizer = prompt_tokenizer(byte_tokenizer(None), chat_template=PRINTING_TEMPLATE)
    assert text_of(tokenizer, tokenizer.encode([user()])[0]) == "[user] Hi\n[assistant] "


def test_repeated_prompts_are_tokenized_once_and_not_shared(monkeypatch):
    tokenizer = prompt_tokenizer()
    rendered = []
    original = tokenizer._encode_one
    monkeypatch.setattr(tokenizer, "_encode_one", lambda prompt: rendered.append(prompt) or original(prompt))
    first, second, third, fourth = tokenizer.encode([user(), user(), user("B"), user()])
    assert rendered == [user(), user("B"), user()]
    assert first == second == fourth != third
    second.append(0)
    assert first == fourth


def test_prompts_are_not_changed():
    prompt = [*user([{"type": "text", "text": "Hi"}]), {"role": "assistant", "content": "The"}]
    before = copy.deepcopy(prompt)
    prompt_tokenizer(limit=40).encode_prompts([prompt])
    assert prompt == before


# --- beginning of sequence -------------------------------------------------------------------------------------------

REPROMPT = RepromptSettings(
    use_successful_as_teacher=True,
    demonstration_selection="first",
    demonstration_buffer_size=0,
    demonstration_column=None,
    success_reward_threshold=1.0,
    dont_reprompt_on_self_success=True,
    max_reprompt_len=10240,
    reprompt_template="{prompt}{solution}{feedback}\nSolve it.",
    solution_template="\n{successful_previous_attempt}",
    feedback_template="\n{feedback_raw}",
    include_environment_feedback=True,
    environment_feedback_only_without_solution=False,
    remove_thinking_from_demonstration=False,
)


@pytest.mark.parametrize(
    ("adds_bos", "template", "prompt"),
    [
        (True, BOS_TEMPLATE, "Hi"),
        (True, BOS_TEMPLATE, "<bos>Hi"),
        (True, BOS_TEMPLATE, user()),
        (True, BOS_TEMPLATE, [*user(), {"role": "assistant", "content": "The"}]),
        (False, BOS_TEMPLATE, user()),
        (False, BOS_TEMPLATE, "<bos>Hi"),
    ],
)
def test_student_and_teacher_have_exactly_one_bos(adds_bos, template, prompt):
    tokenizer = prompt_tokenizer(byte_tokenizer(template, adds_bos=adds_bos), limit=33)
    long = prompt * 40 if isinstance(prompt, str) and "bos" not in prompt else prompt
    teacher = teacher_prompt(prompt, TeacherContext(feedback="wrong"), REPROMPT)
    cut = [ids for ids, _ in tokenizer.encode_prompts([prompt, long, teacher])]
    for ids in [*tokenizer.encode([prompt, long, teacher]), *cut]:
        assert (ids[0], ids.count(BOS)) == (BOS, 1)


@pytest.mark.parametrize(("prompt", "num"), [("Hi", 0), (user(), 0)])
def test_a_tokenizer_that_adds_no_bos_is_left_so(prompt, num):
    [ids] = prompt_tokenizer().encode([prompt])
    assert ids.count(BOS) == num


def test_a_prompt_stays_open_with_a_tokenizer_that_adds_an_end():
    [ids] = prompt_tokenizer(byte_tokenizer(adds_bos=True, adds_eos=True)).encode(["Hi"])
    assert (len(ids), ids[0], EOS in ids) == (3, BOS, False)


# --- length ----------------------------------------------------------------------------------------------------------


def test_a_prompt_of_exactly_the_limit_is_not_cut():
    tokenizer = prompt_tokenizer(byte_tokenizer(adds_bos=True), limit=6)
    assert tokenizer.encode_prompts(["12345"]) == [(tokenizer.encode(["12345"])[0], False)]
    [(ids, was_cut)] = tokenizer.encode_prompts(["123456"])
    assert (text_of(tokenizer, ids), was_cut) == ("<bos>23456", True)


def test_without_a_limit_nothing_is_cut():
    tokenizer = prompt_tokenizer()
    assert tokenizer.encode_prompts(["1" * 9999])[0][1] is False


def test_a_chat_is_cut_from_the_left_behind_its_bos():
    tokenizer = prompt_tokenizer(byte_tokenizer(BOS_TEMPLATE, adds_bos=True), limit=20)
    [(ids, was_cut)] = tokenizer.encode_prompts([user("a long question")])
    # <bos> 1, header 11, "<|im_end|>\n" 2, which leaves 6
    assert (text_of(tokenizer, ids), was_cut, len(ids)) == (f"<bos>estion<|im_end|>\n{HEADER}", True, 20)


def test_a_limit_that_only_the_header_fits_keeps_the_header_and_one_less_is_refused():
    tokenizer = byte_tokenizer(BOS_TEMPLATE)
    [(ids, _)] = prompt_tokenizer(tokenizer, limit=12).encode_prompts([user()])
    assert ids == [BOS, *prompt_tokenizer(tokenizer).generation_header_ids]
    for act in ("encode_prompts", "check_prompts"):
        with pytest.raises(ValueError, match=r"max_prompt_length=11 has no room for the 1 token.* and the 11"):
            getattr(prompt_tokenizer(tokenizer, limit=11), act)([user()])


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(20, f"Hi<|im_end|>\n{HEADER}prefi"), (16, f"{HEADER}prefi"), (14, f"{HEADER}efi"), (11, HEADER)],
)
def test_a_prefilled_prompt_keeps_the_header_and_the_end_of_the_prefill(limit, expected):
    tokenizer = prompt_tokenizer(limit=limit)
    [(ids, was_cut)] = tokenizer.encode_prompts([[*user(), {"role": "assistant", "content": "prefi"}]])
    assert (text_of(tokenizer, ids), was_cut) == (expected, True)


# --- content in parts ------------------------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize("template", [THINKING_TEMPLATE, PRINTING_TEMPLATE, PARTS_TEMPLATE, FIRST_PART_TEMPLATE])
def test_text_parts_are_joined_without_anything_between_them(template):
    tokenizer = prompt_tokenizer(byte_tokenizer(template))
    parts, string = tokenizer.encode([user(PARTS), user("onetwo")])
    assert parts == string
    assert "onetwo" in text_of(tokenizer, parts)
    assert "'type'" not in text_of(tokenizer, parts)


def test_a_template_that_renders_no_user_turn_is_refused():
    with pytest.raises(ValueError, match="renders no user turn"):
        prompt_tokenizer(byte_tokenizer("{{ bos_token }}")).encode([user()])


def test_the_teachers_turn_in_parts_is_one_text():
    tokenizer = prompt_tokenizer()
    prompt = teacher_prompt(user(PARTS), TeacherContext(feedback="wrong"), REPROMPT)
    assert isinstance(prompt[0]["content"], list)
    assert "user\nonetwo\nwrong\nSolve it.<|im_end|>" in text_of(tokenizer, tokenizer.encode([prompt])[0])


def test_an_image_is_refused_by_its_type():
    prompt = user([{"type": "image", "image": "x.png"}, *PARTS])
    with pytest.raises(ValueError, match="type 'image'"):
        prompt_tokenizer().encode([prompt])
    with pytest.raises(ValueError, match=r"row 4 .*type 'image'; vision and other inputs are not supported"):
        prompt_tokenizer().check_prompt(prompt, 4)


class Processor(ProcessorMixin):
    """A processor of text only."""

    def __init__(self, tokenizer, chat_template=None):
        self.tokenizer = tokenizer
        self.chat_template = chat_template


@pytest.mark.parametrize(("template", "expected"), [(PARTS_TEMPLATE, "[user] Hi[assistant] "), (None, SHORT)])
def test_a_processor_renders_with_its_own_template_if_it_has_one(template, expected):
    processor = Processor(byte_tokenizer(), template)
    tokenizer = prompt_tokenizer(processor)
    assert text_tokenizer(processor) is processor.tokenizer is tokenizer.tokenizer
    assert text_of(tokenizer, tokenizer.encode([user()])[0]) == expected


# --- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "Hi",
        user(),
        user(PARTS),
        [{"role": "system", "content": "Be brief."}, *user(), {"role": "assistant", "content": "The"}],
        [*user(), {"role": "assistant", "content": None, "tool_calls": [1]}, {"role": "tool", "content": "5"}],
    ],
)
def test_good_prompts_pass(prompt):
    prompt_tokenizer().check_prompt(prompt, 0)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (None, ValueError, "row 7 is empty: None"),
        ("", ValueError, "row 7 is empty: ''"),
        ([], ValueError, r"row 7 is empty: \[\]"),
        (5, TypeError, "row 7 is int, 5"),
        ({"role": "user", "content": "Hi"}, TypeError, "row 7 is dict"),
        (["Hi"], ValueError, "row 7 holds a message that is str"),
        ([{"content": "Hi"}], ValueError, "row 7 holds a message without a role"),
        ([{"role": "user"}], ValueError, "row 7 holds a message without content"),
        (user(None), ValueError, "row 7 holds a message without content"),
        (user(5), ValueError, "row 7 holds a message with content of type int"),
        (user(["Hi"]), ValueError, r"row 7 .* a content part that has no type \('Hi'\)"),
        (user([{"type": "text"}]), ValueError, "row 7 .* a text part that has no text"),
        ([{"role": "system", "content": "Hi"}], ValueError, "row 7 has no user turn"),
        (
            [*user(), {"role": "assistant", "tool_calls": [1]}],
            ValueError,
            "row 7 ends in an assistant turn without text to continue",
        ),
    ],
)
def test_bad_prompts_are_named_by_row_and_value(prompt, error, message):
    with pytest.raises(error, match=message):
        prompt_tokenizer().check_prompt(prompt, 7)


def test_messages_need_a_chat_template_and_strings_do_not():
    tokenizer = prompt_tokenizer(byte_tokenizer(None))
    tokenizer.check_prompts(["Hi"])
    assert tokenizer.generation_header_ids == []
    with pytest.raises(ValueError, match=r"row 0 .*\('bytes'\) has no chat template"):
        tokenizer.check_prompts([user()])


@pytest.mark.parametrize(("first", "second"), [("Hi", user()), (user(), "Hi")])
def test_strings_and_messages_do_not_mix(first, second):
    with pytest.raises(ValueError, match=r"row 0 is .* and that of row 2 is"):
        prompt_tokenizer().check_prompts([first, first, second])


def test_an_order_of_roles_that_the_template_refuses_is_found_early():
    tokenizer = prompt_tokenizer(byte_tokenizer(STRICT_TEMPLATE))
    tokenizer.check_prompts([user(), user("B")])
    with pytest.raises(ValueError, match=r"row 1, roles \['user', 'user'\]: roles must alternate"):
        tokenizer.check_prompts([user(), user() + user()])


# --- the end of a completion -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "expected"), [(259, [259, 257]), ([259, 257, 259], [259, 257]), (None, [257]), (257, [257])]
)
def test_every_end_id_is_found_once(configured, expected):
    assert eos_token_ids(SimpleNamespace(eos_token_id=configured), byte_tokenizer()) == expected


def test_a_model_without_a_generation_config_has_the_tokenizers_end():
    assert eos_token_ids(None, Processor(byte_tokenizer())) == [EOS]


def test_no_end_at_all_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has an end-of-sequence token"):
        eos_token_ids(SimpleNamespace(eos_token_id=None), tokenizer)
    with pytest.raises(ValueError, match="neither a padding token nor"):
        ensure_pad_token(tokenizer)


def test_the_pad_token_is_the_end_only_where_there_is_none():
    tokenizer = byte_tokenizer()
    ensure_pad_token(tokenizer)
    assert tokenizer.pad_token_id == EOS
    tokenizer.pad_token = "<|im_end|>"
    ensure_pad_token(Processor(tokenizer))
    assert tokenizer.pad_token_id == IM_END


def test_decoding_leaves_the_text_as_it_was_written_without_special_tokens():
    tokenizer = prompt_tokenizer()
    tokenizer.tokenizer.clean_up_tokenization_spaces = True
    tokenizer.tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = tokenizer.encode(["a = [1 , 2] ; do n't"])[0]
    assert tokenizer.decode([*ids, IM_END]) == "a = [1 , 2] ; do n't"
    assert tokenizer.decode_batch([[BOS, *ids, EOS], []]) == ["a = [1 , 2] ; do n't", ""]


def test_an_end_token_that_is_not_marked_as_special_is_no_text():
    built = byte_tokenizer()
    [stop] = built("!")["input_ids"]
    tokenizer = PromptTokenizer(built, max_prompt_length=None, chat_template_kwargs={}, eos_token_ids=[stop])
    assert tokenizer.decode(tokenizer.encode(["a!b!"])[0]) == "a!b"


def dropping_tokenizer(template=THINKING_TEMPLATE, **settings):
    """A tokenizer that makes no token of blanks, as those do that split at them."""
    tokenizer = byte_tokenizer(template, **settings)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def test_a_prompt_without_a_token_is_refused_with_its_row():
    tokenizer = prompt_tokenizer(dropping_tokenizer())
    for check in (tokenizer.check_prompts, tokenizer.encode_prompts):
        with pytest.raises(ValueError, match=r"the prompt of row 1 is empty: .* no token of '   '"):
            check(["Hi", "   "])


def test_a_chat_that_the_template_makes_nothing_of_is_refused_with_its_row():
    template = "{% for m in messages if m.content != 'no' %}{{ m.content }}{% endfor %}"
    tokenizer = prompt_tokenizer(byte_tokenizer(template))
    for check in (tokenizer.check_prompts, tokenizer.encode_prompts):
        with pytest.raises(ValueError, match="the prompt of row 0 is empty"):
            check([user("no")])


def test_blanks_that_are_tokens_or_stand_behind_a_special_token_are_a_prompt():
    [(ids, _)] = prompt_tokenizer().encode_prompts(["   "])
    assert len(ids) == 3
    tokenizer = prompt_tokenizer(dropping_tokenizer(adds_bos=True))
    tokenizer.check_prompts(["   "])
    assert tokenizer.encode_prompts(["   "]) == [([BOS], False)]
