"""Token ids to one text a token, so that the texts joined are the text of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

MAX_WAIT = 64  # tokens that a text is put off for: a character takes fewer, and noise may go on to the end
_PARTIAL = "\ufffd"  # what a decoder writes for bytes that are not yet a character


class TokenTexts:
    """Texts of single tokens of one tokenizer; remembers those it has seen.

    A token's text depends on what stands before it: some decoders drop the blank that begins a text, and a character
    may be spread over several tokens. Then its last token has the character, and the ones before it are empty.
    In a run of more than MAX_WAIT tokens that are no text, a character at a multiple of it may stay unread.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """One text a token, special tokens included."""
        texts = [self.single(token) for token in ids]
        if not any(_PARTIAL in text for text in texts) and "".join(texts) == self.decode(ids):
            return texts
        return self._in_context(ids)

    def single(self, token: int) -> str:
        """Text of a token that stands alone."""
        if token not in self._known:
            self._known[token] = self.decode([token])
        return self._known[token]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _in_context(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text of the few before it."""
        texts: list[str] = []
        start = end = 0  # the tokens before `end` have their texts; `start` is where the ones before it began
        for position in range(len(ids)):
            before, now = self.decode(ids[start:end]), self.decode(ids[start : position + 1])
            is_last = position == len(ids) - 1
            if now.endswith(_PARTIAL) and not is_last and position - end < MAX_WAIT:
                texts.append("")
                continue
            texts.append(now[len(before) :])
            start, end = end, position + 1
        return texts
