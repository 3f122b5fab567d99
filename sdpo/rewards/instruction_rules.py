"""Rules that a response can be asked to follow, by the ids of IFEval (Zhou et al., 2023, arXiv 2311.07911).

Each is a function of the response and of the rule's own arguments. It returns None where the rule is followed, else a
sentence with what was found and what was asked for. Ids and arguments have the names of IFEval's data, so that its
rows are read as they are; docs/rewards.md says where a verdict can differ from that of IFEval's own code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from sdpo.rewards.attempts import cut, need_package

Rule = Callable[..., str | None]

RELATIONS = ("at least", "less than")
_SHOWN = 60  # characters of what a sentence quotes
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|[A-Z])\.$")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _of(count: int, unit: str) -> str:
    """A count with its unit: "1 word", "2 words"."""
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


def _compared(count: int, asked: int, relation: str, found: str) -> str | None:
    """What is wrong with a count; `found` says it in words."""
    if count >= asked if relation == "at least" else count < asked:
        return None
    asked_for = f"{'at least' if relation == 'at least' else 'fewer than'} {asked}"
    return f"{found}; {asked_for} {'was' if asked == 1 else 'were'} asked for."


def _exactly(count: int, asked: int, found: str) -> str | None:
    return None if count == asked else f"{found}; exactly {asked} {'was' if asked == 1 else 'were'} asked for."


def _quoted(texts: Sequence[str]) -> str:
    return ", ".join(f'"{cut(text, _SHOWN)}"' for text in texts)


# --- length ----------------------------------------------------------------------------------------------------------


def number_words(text: str, *, num_words: int, relation: str) -> str | None:
    count = len(re.findall(r"\w+", text))
    return _compared(count, num_words, relation, f"The response has {_of(count, 'word')}")


def number_sentences(text: str, *, num_sentences: int, relation: str) -> str | None:
    count = len(split_sentences(text))
    return _compared(count, num_sentences, relation, f"The response has {_of(count, 'sentence')}")


def split_sentences(text: str) -> list[str]:
    """Pieces that end with a full stop, a question or exclamation mark before a blank, or with an empty line."""
    sentences: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        start, last = 0, len(paragraph.rstrip())
        for end in re.finditer(r"(?<![.!?])[.!?]++[\"')\]]*+(?=\s)|$", paragraph):
            if end.end() < last and _ABBREVIATION.search(paragraph, max(start, end.end() - 8), end.end()):
                continue
            piece = paragraph[start : end.end()].strip()
            start = end.end()
            if re.search(r"\w", piece):
                sentences.append(piece)
    return sentences


def number_paragraphs(text: str, *, num_paragraphs: int) -> str | None:
    """Paragraphs between dividers of three stars; what is empty before the first and after the last is none."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    parts = parts[(not parts[0]) :]
    parts = parts[: len(parts) - (bool(parts) and not parts[-1])]
    if not all(parts):
        return "A paragraph between two dividers *** is empty."
    return _exactly(len(parts), num_paragraphs, f"Dividers *** make {_of(len(parts), 'paragraph')}")


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> str | None:
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 0 < nth_paragraph <= len(paragraphs):
        return _exactly(len(paragraphs), num_paragraphs, f"Empty lines make {_of(len(paragraphs), 'paragraph')}")
    found = paragraphs[nth_paragraph - 1].split()[0].lstrip("\"'").rstrip(".,?!\"'")
    if found.casefold() == first_word.casefold():
        return None
    return f'Paragraph {nth_paragraph} starts with {_quoted([found])}; "{first_word}" was asked for.'


# --- words and letters -----------------------------------------------------------------------------------------------


def keywords_existence(text: str, *, keywords: Sequence[str]) -> str | None:
    missing = [word for word in keywords if word.casefold() not in text.casefold()]
    return f"The response lacks {_quoted(missing)}." if missing else None


def keywords_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> str | None:
    count = text.casefold().count(keyword.strip().casefold())
    return _compared(count, frequency, relation, f'"{keyword}" occurs {_of(count, "time")}')


def forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> str | None:
    found = [word for word in forbidden_words if re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)]
    return f"The response uses {_quoted(found)}, which it was to avoid." if found else None


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> str | None:
    count = text.casefold().count(letter.casefold())
    return _compared(count, let_frequency, let_relation, f'The letter "{letter}" occurs {_of(count, "time")}')


def no_comma(text: str) -> str | None:
    count = text.count(",")
    return f"The response has {_of(count, 'comma')}; none was to be used." if count else None


# --- case and language -----------------------------------------------------------------------------------------------


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> str | None:
    count = sum(word.isupper() for word in re.findall(r"\w+(?:[-'.]\w+)*", text))
    found = f"The response has {_of(count, 'word')} in all capitals"
    return _compared(count, capital_frequency, capital_relation, found)


def english_capital(text: str) -> str | None:
    return _case(text, str.islower, "capital")


def english_lowercase(text: str) -> str | None:
    return _case(text, str.isupper, "lowercase")


def _case(text: str, is_wrong: Callable[[str], bool], asked: str) -> str | None:
    wrong = [word for word in text.split() if any(is_wrong(letter) for letter in word)]
    if wrong:
        return f"{_of(len(wrong), 'word')} not in {asked} letters, the first {_quoted(wrong[:1])}."
    return None if any(letter.isalpha() for letter in text) else "The response has no letters."


def response_language(text: str, *, language: str) -> str | None:
    need_package("py3langid", extra="instructions", user="The rule language:response_language")
    import py3langid

    found = str(py3langid.classify(text)[0])
    asked = language.lower().split("-")[0]
    return None if found == asked else f'The language of the response is "{found}"; "{asked}" was asked for.'


# --- format ----------------------------------------------------------------------------------------------------------


def json_format(text: str) -> str | None:
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text.strip("`")
        text = text[4:] if text[:4].lower() == "json" else text
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"The response as a whole is no JSON: {cut(str(error), _SHOWN)}."
    return None


def number_bullet_lists(text: str, *, num_bullets: int) -> str | None:
    count = len(re.findall(r"^[ \t]*(?:\*(?!\*).|-).*$", text, re.MULTILINE))
    return _exactly(count, num_bullets, f"The response has {_of(count, 'bullet point')} (lines starting with * or -)")


def title(text: str) -> str | None:
    is_there = any(found.strip() for found in re.findall(r"<<([^\n<>]+)>>", text))
    return None if is_there else "The response has no title in double angle brackets, as in <<title>>."


def number_highlighted_sections(text: str, *, num_highlights: int) -> str | None:
    found = re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", text)
    count = sum(bool(part.strip("* \t")) for part in found)
    return _compared(count, num_highlights, "at least", f"The response has {_of(count, 'highlighted part')} (*text*)")


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> str | None:
    count = len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text))
    found = f'The response has {_of(count, "section")} (as in "{section_spliter} 1")'
    return _compared(count, num_sections, "at least", found)


def number_placeholders(text: str, *, num_placeholders: int) -> str | None:
    count = len(re.findall(r"\[[^\[\]\n]*\]", text))
    return _compared(count, num_placeholders, "at least", f"The response has {_of(count, 'placeholder')} like [name]")


def postscript(text: str, *, postscript_marker: str) -> str | None:
    # A blank may follow each dot within the marker: "P. S."
    marker = r"\s?".join(re.escape(part) for part in re.findall(r"[^.]*\.?", postscript_marker.strip()) if part)
    is_there = re.search(marker, text, re.IGNORECASE)
    return None if is_there else f'The response has no postscript that starts with "{postscript_marker}".'


def constrained_response(text: str) -> str | None:
    return (
        None
        if any(option in text for option in _CONSTRAINED)
        else f"The response has none of {_quoted(_CONSTRAINED)}."
    )


# --- start, end and combinations -------------------------------------------------------------------------------------


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> str | None:
    if text.strip().casefold().startswith(prompt_to_repeat.strip().casefold()):
        return None
    return f"The response starts with {_quoted([text.strip()])}; it was to repeat the request first, word for word."


def end_checker(text: str, *, end_phrase: str) -> str | None:
    found = text.strip().strip('"').casefold()
    if found.endswith(end_phrase.strip().casefold()):
        return None
    return f'The response ends with "{text.strip()[-_SHOWN:]}"; the last words were to be "{end_phrase.strip()}".'


def quotation(text: str) -> str | None:
    text = text.strip()
    is_quoted = len(text) > 1 and text[0] == text[-1] == '"'
    return None if is_quoted else "The response as a whole is not in double quotation marks."


def two_responses(text: str) -> str | None:
    parts = [part.strip() for part in text.split("******")]
    parts = [part for i, part in enumerate(parts) if part or 0 < i < len(parts) - 1]
    if len(parts) == 2 and all(parts):
        return None if parts[0] != parts[1] else "The two responses are the same."
    return _exactly(sum(map(bool, parts)), 2, f"Dividers ****** make {_of(sum(map(bool, parts)), 'response')}") or (
        "A response between two dividers ****** is empty."
    )


RULES: dict[str, Rule] = {
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "combination:repeat_prompt": repeat_prompt,
    "combination:two_responses": two_responses,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:json_format": json_format,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:title": title,
    "keywords:existence": keywords_existence,
    "keywords:forbidden_words": forbidden_words,
    "keywords:frequency": keywords_frequency,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_words": number_words,
    "punctuation:no_comma": no_comma,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
}
