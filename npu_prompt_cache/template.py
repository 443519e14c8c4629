"""Prompts that begin alike: static text first, variables last, and a token boundary between them that stays."""

from __future__ import annotations

import string
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from npu_prompt_cache.cache import PromptCache

#: Beginnings of values, as far as tokenizers tell them apart: a token that all of them leave alone may stay.
_BEGINNINGS = ("", "a", "s", "A", "1", ".", "'", "-", "(", " a", " 1", "  a", "\n", "\n\n", "é", "中", "😀")
#: Put before a text whose first token shall be what it is in the middle of a text: some tokenizers begin every text
#: with a space. The first one that gives the text back is taken.
_ANCHORS = ("", "\n", ".", "x")
#: Static tokens behind a variable that are worth a warning, if they are more than those before it.
_MANY_LATE_TOKENS = 32


class Prompt(NamedTuple):
    """A rendered `PromptTemplate`."""

    text: str
    #: Ids of the text, special tokens included.
    token_ids: list[int]
    #: Tokens ``[0, static_tokens)`` are those of every prompt of the template.
    static_tokens: int

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask``, int64 ``[1, tokens]``, for ``model.generate(**prompt.inputs())``."""
        ids = torch.tensor([self.token_ids], device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class PromptTemplate:
    """A text, or a chat, with named variables; its prompts begin with the same token ids whatever the values are.

    Only what stands before the first variable can hit for other values: put first what stays, and last what changes.
    Static text behind a variable counts as variable; a warning says so where it is the larger part.

    Tokens may reach across the place where text and value meet (``"Name: "`` and ``"Bo"`` make the tokens ``Name``,
    ``:`` and ``␣Bo``). The static part ends before such a token: a few characters before the variable, at most. So a
    prompt has the ids that the tokenizer gives to the whole text. Only where a value would change a static token even
    so, text and value are tokenized apart.

    Args:
        template: a string, or the messages of a chat. ``{name}`` is a variable, ``{{`` and ``}}`` are braces. In a
            message, ``content`` is read so: a string, or a list of parts, of which ``text`` is.
        tokenizer: of the model, from transformers. It writes the special tokens of a text; those of a chat are
            written by its chat template.
        chat_options: for a chat, what ``apply_chat_template`` takes besides: ``tools``, ``documents``, what the chat
            template itself reads. ``add_generation_prompt`` is True where it is not given.

    Raises:
        ValueError: braces that make no variable, or options of a chat for a string.

    Example:
        >>> template = PromptTemplate("Translate to French.\\nEnglish: {text}", tokenizer)  # doctest: +SKIP
        >>> cache.warm([template])  # doctest: +SKIP
        >>> prompt = template.render(text="Good morning!")  # doctest: +SKIP
        >>> model.generate(**prompt.inputs(model.device))  # prefills from the variable on  # doctest: +SKIP
    """

    def __init__(self, template: str | Sequence[Mapping[str, Any]], tokenizer: Any, **chat_options: Any) -> None:
        self._is_chat = not isinstance(template, str)
        if chat_options and not self._is_chat:
            raise ValueError(f"{', '.join(chat_options)}: options of a chat, but the template is a string")
        self._tokenizer = tokenizer
        self._chat_options = {"add_generation_prompt": True, **chat_options}
        self._parsed = _Text.parse(template) if isinstance(template, str) else [_parse_message(m) for m in template]
        pieces = [piece for text in _texts(self._parsed) for piece in text.pieces]
        #: Names of the variables, in the order in which they appear.
        self.variables: tuple[str, ...] = tuple(dict.fromkeys(name for _, name in pieces if name is not None))
        self._opening, self._closing = self._special_ids()
        #: The ids that every prompt of the template begins with, and their text.
        self.static_ids, self.static_text = self._cut()
        self._warn_of_late_text(pieces)

    @property
    def static_tokens(self) -> int:
        """Tokens that every prompt of the template begins with: what hits, once one of the prompts is cached."""
        return len(self.static_ids)

    def render(self, /, **values: object) -> Prompt:
        """The prompt for these values, each put in as ``str()`` gives it; braces in a value mean nothing.

        Raises:
            ValueError: a variable has no value, or a value has no variable; the message names it.
            TypeError: a value is None.
        """
        self._check(values)
        text = self._text(values)
        ids = self._encode(text)
        if ids[: self.static_tokens] != self.static_ids:
            ids = self._encode_apart(text, ids)
        return Prompt(text, ids, _common([ids, self.static_ids]))

    def hits(self, cache: PromptCache, /, **values: object) -> int:
        """Tokens that a request with these values would now take from the cache; without values, of the static part.

        Salts are those of `PromptCache.salted`. The last token of a prompt is always computed.
        """
        ids = self.render(**values).token_ids[:-1] if values or not self.variables else self.static_ids
        match = cache.lookup(ids) if ids else None
        return 0 if match is None else match.cached_tokens

    def __repr__(self) -> str:
        return f"PromptTemplate({self.static_tokens} static tokens, then {', '.join(self.variables) or 'nothing'})"

    # -- text

    def _check(self, values: Mapping[str, object]) -> None:
        missing = [name for name in self.variables if name not in values]
        unknown = [name for name in values if name not in self.variables]
        if missing or unknown:
            wrong = [f"{kind} {', '.join(names)}" for kind, names in (("no", missing), ("unknown", unknown)) if names]
            raise ValueError(f"{'; '.join(wrong)}: the template's variables are {', '.join(self.variables) or 'none'}")
        for name, value in values.items():
            if value is None:
                raise TypeError(f"{name}=None: a value is needed, an empty string for nothing")

    def _text(self, values: Mapping[str, object]) -> str:
        filled = _fill(self._parsed, values)
        if self._is_chat:
            return str(self._tokenizer.apply_chat_template(filled, tokenize=False, **self._chat_options))
        return str(filled)

    # -- tokens

    def _encode(self, text: str) -> list[int]:
        return [*self._opening, *self._plain(text), *self._closing]

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _special_ids(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text."""
        if self._is_chat:
            return [], []
        plain, whole = self._plain("a"), list(self._tokenizer("a")["input_ids"])
        at = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return whole[:at], whole[at + len(plain) :]

    def _decode(self, ids: list[int]) -> str:
        """The text of ids without those that the tokenizer puts before and after it."""
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _cut(self) -> tuple[list[int], str]:
        """The static ids and their text: as far as no beginning of a value changes them."""
        texts = [self._text(dict.fromkeys(self.variables, beginning)) for beginning in _BEGINNINGS]
        text = texts[0][: _common(texts)]
        if not self.variables:
            return self._encode(text), text
        plain = self._plain(text)
        if self._decode(plain) != text:  # the tokenizer does not keep text as it is: which part is which, is unknown
            return [*self._opening, *plain], text
        # Of a chat, what follows a value is part of these texts too.
        encoded = [self._plain(each) for each in texts]
        stable = encoded[0][: _common(encoded)]
        while not text.startswith(head := self._decode(stable)):  # half a character
            stable = stable[:-1]
        return [*self._opening, *stable], head

    def _encode_apart(self, text: str, whole: list[int]) -> list[int]:
        """Static ids, then those of the rest of the text; `whole` where they would not give the text back."""
        keeps_text = self._decode(self._plain(text)) == text
        static = self.static_ids[len(self._opening) :]
        rest = text[len(self.static_text) :]
        for anchor in _ANCHORS if text.startswith(self.static_text) else ():
            before, both = self._plain(anchor), self._plain(anchor + rest)
            ids = [*static, *both[len(before) :]]
            if both[: len(before)] == before and (not keeps_text or self._decode(ids) == text):
                return [*self._opening, *ids, *self._closing]
        warnings.warn(
            "with these values the prompt does not begin like the template's others (a chat template that writes a "
            "date, or looks at the values): it is right, and hits as far as it is the same",
            stacklevel=3,
        )
        return whole

    def _warn_of_late_text(self, pieces: list[tuple[str, str | None]]) -> None:
        first = next((at for at, (_, name) in enumerate(pieces) if name is not None), len(pieces))
        late = len(self._plain("".join(text for text, _ in pieces[first + 1 :])))
        if late > max(_MANY_LATE_TOKENS, self.static_tokens):
            warnings.warn(
                f"{late} tokens of static text come after {{{self.variables[0]}}} and only {self.static_tokens} before "
                "it, which are all that can hit for other values: move the variables towards the end",
                stacklevel=3,
            )


def _common(sequences: list[str] | list[list[int]]) -> int:
    """Items that all of them begin with."""
    first, last = min(sequences), max(sequences)
    different = (at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return next(different, min(len(first), len(last)))


class _Text(NamedTuple):
    """A string with variables: pieces of text, each with the name of the variable that follows it, or None."""

    pieces: list[tuple[str, str | None]]

    @classmethod
    def parse(cls, text: str) -> _Text:
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}; write {{{{ and }}}} for braces that are text") from None
        for _, name, form, conversion in parsed:
            if name is not None and (not name.isidentifier() or form or conversion):
                raise ValueError(
                    f"{{{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}}} is no variable: "
                    "{name} is, with nothing else in it; write {{ and }} for braces that are text"
                )
        return cls([(piece, name) for piece, name, _, _ in parsed])

    def fill(self, values: Mapping[str, object]) -> str:
        return "".join(piece if name is None else f"{piece}{values[name]!s}" for piece, name in self.pieces)


def _parse_message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _Text.parse(content)}
    if isinstance(content, Sequence):
        return {**message, "content": [_parse_part(part) for part in content]}
    return dict(message)


def _parse_part(part: Any) -> Any:
    is_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
    return {**part, "text": _Text.parse(part["text"])} if is_text else part


def _fill(parsed: Any, values: Mapping[str, object]) -> Any:
    """A copy with strings in place of every `_Text`."""
    if isinstance(parsed, _Text):
        return parsed.fill(values)
    if isinstance(parsed, list):
        return [_fill(each, values) for each in parsed]
    if isinstance(parsed, dict):
        return {name: _fill(each, values) for name, each in parsed.items()}
    return parsed


def _texts(parsed: Any) -> Iterator[_Text]:
    """Every `_Text`, in order."""
    if isinstance(parsed, _Text):
        yield parsed
    elif isinstance(parsed, (list, dict)):
        for each in parsed.values() if isinstance(parsed, dict) else parsed:
            yield from _texts(each)
