"""Text to tokens, and which of the tokens are targets of the loss.

In a conversation the targets are what the model has to produce: each assistant answer from the end of the generation
prompt up to and including the end-of-turn token. Where they lie is taken from the chat template, in this order:

1. The template marks them with ``{% generation %}``.
2. The conversation rendered up to an answer, with and without it, are prefixes of the whole: the answer is between.
3. Templates that change earlier turns later: the answers are replaced by sentinels, and the pieces between them
   have to give back the whole conversation character by character.

If none holds, the record is refused: a mask is exact or it is not made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_swift.data.sources import Message, Record
from lightning_swift.errors import DataError

__all__ = ["Encoder", "Tokens"]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_RENDER_ERRORS = (TemplateError, TypeError, ValueError)
# Private-use characters: no template and no sane text has them, and no template strips or splits them.
_SENTINEL = "\ue0f0{}\ue0f1"
_LOSS_ON_ALL = 'Use loss_on="all", or give the tokenizer a chat template with {% generation %} around the answers.'

Span = tuple[int, int]


@dataclass(frozen=True)
class Tokens:
    """One record in tokens.

    Attributes:
        ids: Token ids.
        targets: Which of them the loss counts; same length. The first never is one, as nothing predicts it.
    """

    ids: list[int]
    targets: list[bool]


@dataclass(frozen=True)
class Encoder:
    """Turns records into tokens and targets, or into the prompt that a model continues.

    Args:
        tokenizer: Any Hugging Face tokenizer; conversations need one with a chat template.
        loss_on_all: Count every token, the user's and the template's too.
    """

    tokenizer: PreTrainedTokenizerBase
    loss_on_all: bool = False

    def encode(self, record: Record) -> Tokens:
        """Tokens and targets of ``record``.

        Raises:
            DataError: If the chat template refuses the record or does not tell where the answers are.
        """
        if record.messages is not None:
            ids, targets = self._conversation(record)
        elif record.text is not None:
            ids = self._ended(self._plain(record.text))
            targets = [True] * len(ids)
        else:
            prompt = self._prompt(record)
            # The two are tokenised apart, as they are at inference: no token spans the border.
            completion = self._ended(self._ids(record.completion or ""))
            ids, targets = prompt + completion, [False] * len(prompt) + [True] * len(completion)
        if self.loss_on_all:
            targets = [True] * len(ids)
        return Tokens(ids, [False, *targets[1:]] if ids else [])

    def encode_prompt(self, record: Record) -> Tokens:
        """Only what precedes the (last) answer, ending with the generation prompt; nothing in it is a target."""
        if record.messages is None:
            ids = self._prompt(record) if record.text is None else self._plain(record.text)
        else:
            messages = record.messages[:-1] if record.messages[-1]["role"] == "assistant" else record.messages
            ids = self._ids(self._render(record.where, messages, add_generation_prompt=True))
        return Tokens(ids, [False] * len(ids))

    def _conversation(self, record: Record) -> tuple[list[int], list[bool]]:
        messages = record.messages or []
        text = self._render(record.where, messages)
        if self.loss_on_all:
            ids = self._ids(text)
            return ids, [True] * len(ids)
        if self._marks_answers and self.tokenizer.is_fast:
            return self._marked(messages)
        spans = self._prefix_spans(messages, text)
        if spans is None:
            spans = self._sentinel_spans(messages, text)
        if spans is None:
            raise DataError(
                "The chat template does not show where the assistant's answers are in this conversation.",
                where=record.where,
                fix=_LOSS_ON_ALL,
            )
        if self.tokenizer.is_fast:
            return self._mask_by_offsets(text, spans)
        return self._mask_by_prefix_tokens(record.where, text, spans)

    def _marked(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        out: Any = self.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, targets = list(out["input_ids"]), [bool(flag) for flag in out["assistant_masks"]]
        ends = {self.tokenizer.convert_tokens_to_ids(token) for token in self._end_of_turn}
        for at in range(1, len(ids)):
            # Some templates close the tag before the end-of-turn token; the model must learn to stop.
            if targets[at - 1] and ids[at] in ends and ids[at - 1] not in ends:
                targets[at] = True
        return ids, targets

    def _prefix_spans(self, messages: list[Message], text: str) -> list[Span] | None:
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                before = self._template(messages[:index], add_generation_prompt=True)
                after = self._template(messages[: index + 1])
            except _RENDER_ERRORS:
                return None
            if not (text.startswith(after) and after.startswith(before)):
                return None
            spans.append((len(before), self._without_trailing_space(after, len(before))))
        return spans

    def _without_trailing_space(self, text: str, start: int) -> int:
        """The end of the answer: white space that a template writes after the end of turn is not the model's."""
        stripped = text.rstrip()
        if len(stripped) > start and stripped.endswith(tuple(self._end_of_turn)):
            return len(stripped)
        return len(text)

    def _sentinel_spans(self, messages: list[Message], text: str) -> list[Span] | None:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        marked = list(messages)
        for index in answers:
            marked[index] = {**messages[index], "content": _SENTINEL.format(index)}
        try:
            pieces = re.split("\ue0f0\\d+\ue0f1", self._template(marked))
        except _RENDER_ERRORS:
            return None
        if len(pieces) != len(answers) + 1:
            return None
        contents = [messages[index].get("content") or "" for index in answers]
        spans = self._fitted(text, pieces, contents)
        return self._fitted(text, pieces, [content.strip() for content in contents]) if spans is None else spans

    def _fitted(self, text: str, pieces: list[str], contents: list[str]) -> list[Span] | None:
        """Spans of ``contents`` if they and the pieces between them make up ``text`` exactly."""
        if "".join(p + c for p, c in zip(pieces, [*contents, ""], strict=True)) != text:
            return None
        spans, at = [], 0
        for piece, content in zip(pieces, contents, strict=False):
            start = at + len(piece)
            at = start + len(content)
            closing = next((token for token in self._end_of_turn if text.startswith(token, at)), "")
            spans.append((start, at + len(closing)))
        return spans

    def _mask_by_offsets(self, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        targets = [any(begin < end and stop > start for start, end in spans) for begin, stop in out["offset_mapping"]]
        return list(out["input_ids"]), targets

    def _mask_by_prefix_tokens(self, where: str, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
        ids = self._ids(text)
        targets = [False] * len(ids)
        for start, end in spans:
            before, after = self._ids(text[:start]), self._ids(text[:end])
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise DataError(
                    "This tokenizer reports no offsets, and a token spans the border of an answer.",
                    where=where,
                    fix=_LOSS_ON_ALL,
                )
            targets[len(before) : len(after)] = [True] * (len(after) - len(before))
        return ids, targets

    def _prompt(self, record: Record) -> list[int]:
        ids = self._plain(record.prompt or "")
        end = self.tokenizer.eos_token_id
        # Tokenizers that end every text themselves must not end the prompt.
        return ids[:-1] if ids and ids[-1] == end and not (record.prompt or "").endswith(self._eos) else ids

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _ended(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return ids if end is None or (ids and ids[-1] == end) else [*ids, end]

    def _render(self, where: str, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        if self.tokenizer.chat_template is None:
            raise DataError(
                "This record is a conversation and the tokenizer has no chat template.",
                where=where,
                fix='Use the tokenizer of an instruct model, or records with "prompt" and "completion", or "text".',
            )
        try:
            return self._template(messages, add_generation_prompt=add_generation_prompt)
        except _RENDER_ERRORS as error:
            raise DataError(
                f"The tokenizer's chat template refuses this conversation: {error}",
                where=where,
                fix="Correct the order of roles, or remove the record.",
            ) from error

    def _template(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        text: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return str(text)

    @property
    def _eos(self) -> str:
        return str(self.tokenizer.eos_token)

    @cached_property
    def _marks_answers(self) -> bool:
        return _GENERATION_TAG.search(str(self.tokenizer.get_chat_template())) is not None

    @cached_property
    def _end_of_turn(self) -> list[str]:
        """Tokens that end an answer: the end-of-sequence token, and what the template writes after one."""
        ends = [] if self.tokenizer.eos_token is None else [self._eos]
        probe = _SENTINEL.format(0)
        try:
            text = self._template([{"role": "user", "content": "?"}, {"role": "assistant", "content": probe}])
        except _RENDER_ERRORS:
            return ends
        tail = text.partition(probe)[2]
        special = sorted(map(str, self.tokenizer.added_tokens_encoder), key=len, reverse=True)
        closing = next((token for token in special if tail.startswith(token)), None)
        return ends if closing is None else [*ends, closing]
