"""Prompts to token ids and ids to text. One object serves student and teacher, so both get the same template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from sdpo.reprompt import content_text
from sdpo.types import Message, Prompt

_PROBE = "question"
_RESERVED = ("add_generation_prompt", "continue_final_message", "tokenize")


def text_tokenizer(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer itself, or the one inside a processor."""
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


def ensure_pad_token(processing_class: Any) -> None:
    """Makes the end-of-sequence token the padding token where there is none.

    Raises:
        ValueError: the tokenizer has neither.
    """
    tokenizer = text_tokenizer(processing_class)
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{_name(tokenizer)} has neither a padding token nor an end-of-sequence token; set pad_token")
    tokenizer.pad_token = tokenizer.eos_token


def eos_token_ids(generation_config: Any, processing_class: Any) -> list[int]:
    """Ids that end a completion: those of the model's generation config, then the tokenizer's, each once.

    `generation_config` may be None (a model without one).

    Raises:
        ValueError: there is none at all, so that no completion could ever end.
    """
    tokenizer = text_tokenizer(processing_class)
    configured = None if generation_config is None else generation_config.eos_token_id
    ids = list(configured) if isinstance(configured, list | tuple) else [configured]
    found = [int(i) for i in dict.fromkeys([*ids, tokenizer.eos_token_id]) if i is not None]
    if not found:
        raise ValueError(
            f"neither the model's generation config nor {_name(tokenizer)} has an end-of-sequence token; set eos_token"
        )
    return found


class PromptTokenizer:
    """Tokenizes prompts of the dataset and of the teacher, and decodes completions.

    `max_prompt_length`: tokens of a student's prompt, None for no limit. `chat_template_kwargs`: variables of the chat
    template. `eos_token_ids`: what ends a completion.

    Raises:
        ValueError: `chat_template_kwargs` sets what the library sets itself.
    """

    def __init__(
        self,
        processing_class: Any,
        *,
        max_prompt_length: int | None,
        chat_template_kwargs: Mapping[str, Any],
        eos_token_ids: Sequence[int],
    ) -> None:
        reserved = [name for name in _RESERVED if name in chat_template_kwargs]
        if reserved:
            raise ValueError(f"chat_template_kwargs must not set {reserved}: they follow from the prompt's last turn")
        self.tokenizer = text_tokenizer(processing_class)
        self.max_prompt_length = max_prompt_length
        self.eos_token_ids = list(eos_token_ids)
        self._chat_template_kwargs = dict(chat_template_kwargs)
        # A processor's own template comes first; some have none and leave it to their tokenizer.
        self._renderer = processing_class if processing_class.chat_template is not None else self.tokenizer

    @property
    def has_chat_template(self) -> bool:
        return self._renderer.chat_template is not None or "chat_template" in self._chat_template_kwargs

    # --- prompts to ids ----------------------------------------------------------------------------------------------

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of each prompt, uncut, with at most one beginning-of-sequence token.

        A chat ends with the header of the answer, or with the open last turn where that is the assistant's.

        Raises:
            ValueError: a content part that is not text, or a chat template that cannot render the messages.
        """
        encoded: list[list[int]] = []
        for index, prompt in enumerate(prompts):
            # A group repeats its prompt, so consecutive prompts are mostly the same.
            is_repeated = index > 0 and prompt == prompts[index - 1]
            encoded.append(list(encoded[-1]) if is_repeated else self._encode_one(prompt))
        return encoded

    def remembering(self) -> Callable[[Prompt], list[int]]:
        """`encode` of one prompt at a time that reads each distinct prompt once; its ids are not to be changed."""
        known: dict[str, list[int]] = {}

        def ids_of(prompt: Prompt) -> list[int]:
            key = repr(prompt)  # messages are no dictionary's keys
            if key not in known:
                [known[key]] = self.encode([prompt])
            return known[key]

        return ids_of

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[tuple[list[int], bool]]:
        """(ids, whether they were cut) of each prompt: the last `max_prompt_length` tokens.

        A leading beginning-of-sequence token and the header of the answer stay.

        Raises:
            ValueError: `max_prompt_length` has no room for these two; a prompt without any token; and as `encode`
                does.
        """
        limit = self.max_prompt_length
        encoded = self.encode(prompts)
        for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            _check_some_ids(ids, prompt, index)
        return [
            (ids, False) if limit is None or len(ids) <= limit else (self._cut(prompt, ids, limit), True)
            for prompt, ids in zip(prompts, encoded, strict=True)
        ]

    @cached_property
    def generation_header_ids(self) -> list[int]:
        """Ids that the chat template puts before an answer; empty where it has none or there is no template."""
        if not self.has_chat_template:
            return []
        probe = [{"role": "user", "content": _PROBE}]
        opened = self._ids(self._render(probe, opens_answer=True))
        return opened[_common_prefix(opened, self._ids(self._render(probe, opens_answer=False))) :]

    def _encode_one(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, list):
            # The template writes the special tokens; the tokenizer would write its own once more.
            return self._ids(self._render(prompt, opens_answer=True))
        ids = self._ids(prompt)
        prefix = self._special_prefix
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]

    def _cut(self, prompt: Prompt, ids: list[int], limit: int) -> list[int]:
        """The last ids of an overlong prompt that fit, after its beginning-of-sequence token."""
        lead = self._lead(ids)
        header = self.generation_header_ids if isinstance(prompt, list) else []
        room = limit - len(lead)
        if room < max(len(header), 1):
            raise ValueError(
                f"max_prompt_length={limit} has no room for the {len(lead)} token(s) that begin every prompt and the "
                f"{max(len(header), 1)} that begin the answer; set it higher"
            )
        if isinstance(prompt, list) and _is_prefilled(prompt):
            before = self._ids(self._render(prompt[:-1], opens_answer=False))
            answer = ids[_common_prefix(ids, before) :]
            if len(answer) > room:
                num_header = _common_prefix(answer, header)
                return [*lead, *answer[:num_header], *answer[len(answer) - (room - num_header) :]]
        return [*lead, *ids[len(ids) - room :]]

    def _lead(self, ids: list[int]) -> list[int]:
        """The special tokens at the start of a prompt that must survive a cut."""
        prefix = self._special_prefix
        if prefix and ids[: len(prefix)] == prefix:
            return prefix
        return ids[:1] if ids[0] == self.tokenizer.bos_token_id else []

    @cached_property
    def _special_prefix(self) -> list[int]:
        """What the tokenizer puts before a plain text. What it puts behind is left out: the prompt goes on."""
        bare = self._ids(_PROBE)
        full = self.tokenizer(_PROBE, add_special_tokens=True)["input_ids"]
        start = next(n for n in range(len(full)) if full[n : n + len(bare)] == bare)
        return list(full[:start])

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # --- messages to text --------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], *, opens_answer: bool) -> str:
        """Text of a chat, with the start of the answer or without it."""
        return self._apply_template([self._with_known_content(m) for m in messages], opens_answer=opens_answer)

    def _apply_template(self, messages: list[Message], *, opens_answer: bool) -> str:
        is_continued = opens_answer and _is_prefilled(messages)
        return self._renderer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=opens_answer and not is_continued,
            continue_final_message=is_continued,
            **self._chat_template_kwargs,
        )

    def _with_known_content(self, message: Message) -> Message:
        """The message with its content in the form that the template renders."""
        content = message.get("content")
        if content is None:
            return message
        text = content_text(content)
        return {**message, "content": text if self._content_form == "string" else [{"type": "text", "text": text}]}

    @cached_property
    def _content_form(self) -> Literal["string", "parts"]:
        """What the template takes as content. Many print a list of parts as Python does, or fail on it."""
        if self._renders(_PROBE):
            return "string"
        if self._renders([{"type": "text", "text": _PROBE}]):
            return "parts"
        raise ValueError(f"the chat template of {_name(self.tokenizer)} renders no user turn, neither text nor parts")

    def _renders(self, content: Any) -> bool:
        try:
            return _PROBE in self._apply_template([{"role": "user", "content": content}], opens_answer=True)
        except (TemplateError, TypeError):  # what templates do with a kind of content that they were not written for
            return False

    # --- ids to text -------------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion without special tokens and without the tokens that end it."""
        kept = list(ids)
        while kept and kept[-1] in self.eos_token_ids:  # not every model's end token is marked as special
            kept.pop()
        # Cleaning up would change what the model wrote: "1 , 2" is not "1, 2" in code.
        return self.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of each."""
        return [self.decode(ids) for ids in batch]

    # --- checks ------------------------------------------------------------------------------------------------------

    def check_prompts(self, prompts: Iterable[Any]) -> None:
        """Checks the prompts of a dataset before anything is generated.

        One chat of every order of roles is rendered, so that what the template refuses is found here.

        Raises:
            TypeError: as `check_prompt`.
            ValueError: as `check_prompt`; strings and messages in one dataset; a template that refuses an order of
                roles; `max_prompt_length` without room for the header of the answer.
        """
        first: tuple[int, Any] | None = None
        orders: set[tuple[str, ...]] = set()
        for index, prompt in enumerate(prompts):
            self.check_prompt(prompt, index)
            first = first or (index, prompt)
            if isinstance(prompt, str) != isinstance(first[1], str):
                kinds = ("a string", "messages") if isinstance(first[1], str) else ("messages", "a string")
                raise ValueError(
                    f"the prompt of row {first[0]} is {kinds[0]} and that of row {index} is {kinds[1]}; "
                    "use one kind in the whole dataset"
                )
            if isinstance(prompt, str):
                continue
            order = tuple(message["role"] for message in prompt)
            if order not in orders:
                orders.add(order)
                self._check_rendering(prompt, index)

    def check_prompt(self, prompt: Any, index: int) -> None:
        """Checks the prompt of row `index`.

        Raises:
            TypeError: neither a string nor a list of messages.
            ValueError: nothing in it, or nothing that the tokenizer makes a token of; a message without role or
                content; content that is not text; no user turn; or messages for a tokenizer without a chat template.
        """
        if prompt is None or prompt == "" or prompt == []:
            raise ValueError(f"the prompt of row {index} is empty: {prompt!r}")
        if isinstance(prompt, str):
            if not prompt.strip():  # the likely one; whatever else has no token is found when it is encoded
                _check_some_ids(self._encode_one(prompt), prompt, index)
            return
        if not isinstance(prompt, list):
            raise TypeError(
                f"the prompt of row {index} is {type(prompt).__name__}, {prompt!r}; "
                "give a string or a list of messages"
            )
        for message in prompt:
            problem = _problem_of(message)
            if problem is not None:
                raise ValueError(f"the prompt of row {index} holds a message {problem}: {message!r}")
        if not any(message["role"] == "user" for message in prompt):
            raise ValueError(f"the prompt of row {index} has no user turn: {prompt!r}")
        if prompt[-1]["role"] == "assistant" and prompt[-1].get("content") is None:
            raise ValueError(
                f"the prompt of row {index} ends in an assistant turn without text to continue: {prompt!r}"
            )
        if not self.has_chat_template:
            raise ValueError(
                f"the prompt of row {index} is a list of messages, but {_name(self.tokenizer)} has no chat template; "
                "give strings, or set the tokenizer's chat_template"
            )

    def _check_rendering(self, prompt: list[Message], index: int) -> None:
        try:
            ids = self._encode_one(prompt)
        except (TemplateError, TypeError, ValueError) as error:
            roles = [message["role"] for message in prompt]
            raise ValueError(
                f"the chat template of {_name(self.tokenizer)} cannot render the prompt of row {index}, "
                f"roles {roles}: {error}"
            ) from error
        _check_some_ids(ids, prompt, index)
        limit = self.max_prompt_length
        if limit is not None and len(ids) > limit:
            self._cut(prompt, ids, limit)


def _check_some_ids(ids: Sequence[int], prompt: Prompt, index: int) -> None:
    if not ids:
        raise ValueError(f"the prompt of row {index} is empty: the tokenizer makes no token of {prompt!r}")


def _problem_of(message: Any) -> str | None:
    """What is wrong with a message, in words that follow "a message"; None where nothing is."""
    if not isinstance(message, Mapping):
        return f"that is {type(message).__name__} and not a dict with role and content"
    if not isinstance(message.get("role"), str):
        return "without a role"
    content = message.get("content")
    if content is None:
        return None if message.get("tool_calls") else "without content"
    if isinstance(content, str):
        return None
    if not isinstance(content, list):
        return f"with content of type {type(content).__name__}, which is neither a string nor a list of parts"
    for part in content:
        if not isinstance(part, Mapping) or "type" not in part:
            return f"with a content part that has no type ({part!r})"
        if part["type"] != "text":
            return f"with a content part of type {part['type']!r}; vision and other inputs are not supported"
        if not isinstance(part.get("text"), str):
            return "with a text part that has no text"
    return None


def _is_prefilled(messages: Sequence[Message]) -> bool:
    return messages[-1]["role"] == "assistant"


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading ids that two sequences share."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"{type(tokenizer).__name__}({tokenizer.name_or_path!r})"
