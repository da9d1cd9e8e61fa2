"""Exactly the assistant's answers are targets, whatever the chat template."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_swift.data.sources import Record
from lightning_swift.data.targets import Encoder
from lightning_swift.errors import DataError
from tests.harness import tokenizers
from tests.harness.tokenizers import tiny_tokenizer

USER = {"role": "user", "content": "Is Köln in 東京?"}
TWO_TURNS = [
    USER,
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two\nthree"},
]
SYSTEM = {"role": "system", "content": "Answer briefly."}


def encode(messages: list[dict[str, Any]], tokenizer: Any, **options: Any) -> tuple[list[str], str]:
    """The runs of target tokens as text, and the whole text."""
    tokens = Encoder(tokenizer, **options).encode(Record("data.jsonl:7", messages=messages))
    runs: list[list[int]] = [[]]
    for token, target in zip(tokens.ids, tokens.targets, strict=True):
        if target:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run], tokenizer.decode(tokens.ids)


FAMILIES = [
    pytest.param("chatml", tokenizers.CHATML, "<|im_end|>", id="chatml"),
    pytest.param("chatml", tokenizers.CHATML_GENERATION, "<|im_end|>", id="generation-tags"),
    pytest.param("chatml", tokenizers.CHATML_GENERATION_WITHOUT_END, "<|im_end|>", id="generation-tags-without-end"),
    pytest.param("chatml", tokenizers.THINKING, "<|im_end|>", id="thinking"),
    pytest.param("llama3", tokenizers.LLAMA3, "<|eot_id|>", id="llama3"),
    pytest.param("mistral", tokenizers.MISTRAL, "</s>", id="mistral"),
]


@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["no-system", "system"])
@pytest.mark.parametrize(("family", "template", "end"), FAMILIES)
def test_targets_are_the_answers_with_their_end_of_turn(
    family: str, template: str, end: str, system: list[dict[str, str]]
) -> None:
    answers, text = encode(system + TWO_TURNS, tiny_tokenizer(family, template=template))
    # Where the template has a space before the answer, the model produces it too: it may be part of the first token.
    assert [answer.removeprefix(" ") for answer in answers] == [f"No.{end}", f"two\nthree{end}"]
    assert "Köln in 東京" in text


@pytest.mark.parametrize(("family", "template", "end"), FAMILIES)
def test_loss_on_all_counts_every_token_but_the_first(family: str, template: str, end: str) -> None:
    tokenizer = tiny_tokenizer(family, template=template)
    tokens = Encoder(tokenizer, loss_on_all=True).encode(Record("f:1", messages=TWO_TURNS))
    assert tokens.targets == [False] + [True] * (len(tokens.ids) - 1)


def test_ids_are_those_of_the_tokenizer_itself() -> None:
    tokenizer = tiny_tokenizer("llama3")
    tokens = Encoder(tokenizer).encode(Record("f:1", messages=TWO_TURNS))
    assert tokens.ids == tokenizer.apply_chat_template(TWO_TURNS, return_dict=True)["input_ids"]


def test_targets_begin_where_generation_would() -> None:
    tokenizer = tiny_tokenizer("chatml")
    encoder = Encoder(tokenizer)
    record = Record("f:1", messages=[USER, {"role": "assistant", "content": "No."}])
    prompt, whole = encoder.encode_prompt(record), encoder.encode(record)
    assert whole.ids[: len(prompt.ids)] == prompt.ids
    assert whole.targets.index(True) == len(prompt.ids)
    assert not any(prompt.targets)


def test_the_same_words_in_a_question_are_no_targets() -> None:
    messages = [
        {"role": "user", "content": "No. No."},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": "user"},
    ]
    for template in (tokenizers.CHATML, tokenizers.THINKING):
        assert encode(messages, tiny_tokenizer(template=template))[0] == ["No.<|im_end|>", "user<|im_end|>"]


def test_an_answer_that_the_template_strips_keeps_its_targets() -> None:
    messages = [USER, {"role": "assistant", "content": "  No. \n"}]
    assert encode(messages, tiny_tokenizer("llama3"))[0] == ["No.<|eot_id|>"]
    stripping = tokenizers.THINKING.replace("{{ m.content }}", "{{ m.content | trim }}")
    assert encode([*messages, USER, messages[1]], tiny_tokenizer(template=stripping))[0] == ["No.<|im_end|>"] * 2


def test_a_conversation_without_an_answer_has_no_targets() -> None:
    for template in (tokenizers.CHATML, tokenizers.CHATML_GENERATION, tokenizers.THINKING):
        assert encode([USER], tiny_tokenizer(template=template))[0] == []


def test_a_template_that_hides_the_answers_is_refused() -> None:
    shouting = "{% for m in messages %}{{ loop.length }}{{ m.content | upper }}\n{% endfor %}"
    with pytest.raises(DataError) as error:
        encode(TWO_TURNS, tiny_tokenizer(template=shouting))
    assert str(error.value) == (
        "data.jsonl:7: The chat template does not show where the assistant's answers are in this conversation. "
        'Use loss_on="all", or give the tokenizer a chat template with {% generation %} around the answers.'
    )
    assert encode(TWO_TURNS, tiny_tokenizer(template=shouting), loss_on_all=True)[0]


def test_a_template_that_refuses_the_roles_says_so_with_the_line() -> None:
    with pytest.raises(DataError) as error:
        encode([USER, USER], tiny_tokenizer("mistral"))
    assert str(error.value) == (
        "data.jsonl:7: The tokenizer's chat template refuses this conversation: Conversation roles must alternate "
        "user/assistant Correct the order of roles, or remove the record."
    )


def test_a_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"data.jsonl:7: .*the tokenizer has no chat template\. Use the tokenizer of an"
    ):
        encode(TWO_TURNS, tiny_tokenizer(template=None))


class WithoutOffsets:
    """A tokenizer as the slow ones are: it reports neither offsets nor encodings."""

    is_fast = False

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, text: str, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self._inner(text, **options)


def test_without_offsets_the_prefixes_are_compared_in_tokens() -> None:
    slow: Any = WithoutOffsets(tiny_tokenizer("chatml"))
    assert encode(TWO_TURNS, slow)[0] == ["No.<|im_end|>", "two\nthree<|im_end|>"]


def test_without_offsets_a_token_across_the_border_is_refused() -> None:
    # "assistant:" and " two" meet in the middle of the token " two".
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    messages = [USER, {"role": "assistant", "content": "two"}]
    assert encode(messages, tiny_tokenizer(template=template))[0] == [" two\n"]
    with pytest.raises(DataError, match="a token spans the border of an answer"):
        encode(messages, WithoutOffsets(tiny_tokenizer(template=template)))


def test_completions_are_targets_and_prompts_are_not() -> None:
    for family in ("chatml", "llama3", "mistral"):
        tokenizer = tiny_tokenizer(family)
        tokens = Encoder(tokenizer).encode(Record("f:1", prompt="The capital of France is", completion=" Paris."))
        targets = [token for token, target in zip(tokens.ids, tokens.targets, strict=True) if target]
        assert tokenizer.decode(targets) == f" Paris.{tokenizer.eos_token}"
        assert tokens.ids[: len(tokens.ids) - len(targets)] == tokenizer("The capital of France is")["input_ids"]


def test_text_is_all_targets_and_ends_once() -> None:
    tokenizer = tiny_tokenizer("mistral")
    tokens = Encoder(tokenizer).encode(Record("f:1", text="hello world"))
    assert tokenizer.decode(tokens.ids) == "hello world</s>"
    assert tokens.targets == [False] + [True] * (len(tokens.ids) - 1)
    again = Encoder(tokenizer).encode(Record("f:1", text="hello world</s>"))
    assert again.ids == tokens.ids


def test_a_tokenizer_that_ends_every_text_does_not_end_the_prompt() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer("mistral")
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    record = Record("f:1", prompt="yes", completion="no")
    assert tokenizer.decode(Encoder(tokenizer).encode(record).ids) == "yesno</s>"
    assert tokenizer.decode(Encoder(tokenizer).encode_prompt(record).ids) == "yes"


def test_prompts_end_with_the_generation_prompt() -> None:
    tokenizer = tiny_tokenizer("chatml")
    for messages in (TWO_TURNS, TWO_TURNS[:-1]):
        prompt = Encoder(tokenizer).encode_prompt(Record("f:1", messages=messages))
        assert tokenizer.decode(prompt.ids).endswith("<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n")


def test_sentinels_in_the_data_are_not_taken_for_answers() -> None:
    messages = [{"role": "user", "content": "\ue0f01\ue0f1"}, *TWO_TURNS[1:]]
    assert encode(messages, tiny_tokenizer())[0] == ["No.<|im_end|>", "two\nthree<|im_end|>"]
    with pytest.raises(DataError, match="does not show where"):
        encode(messages, tiny_tokenizer(template=tokenizers.THINKING))


def test_templates_run_in_a_sandbox() -> None:
    escape = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(DataError, match=re.escape("refuses this conversation: access to attribute '__class__'")):
        encode(TWO_TURNS, tiny_tokenizer(template=escape))
