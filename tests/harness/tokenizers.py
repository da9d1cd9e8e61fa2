"""A small real tokenizer, made on the spot, with the chat templates of the families people fine-tune."""

from __future__ import annotations

from functools import cache
from typing import Any

_CORPUS = [
    "What is the capital of France? The capital of France is Paris.",
    "You are a helpful assistant. Answer briefly, and say so when you do not know.",
    "user assistant system hello world yes no one two three 1 2 3 4 5 6 7 8 9 0",
    "Grüße aus Köln, 東京 and naïve café.\n\n  Indented text\tand tabs.",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The tag closes before the end-of-turn token, as in several published templates.
CHATML_GENERATION_WITHOUT_END = CHATML_GENERATION.replace(
    "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Roles must alternate, and the system message moves into the last user turn: earlier renderings are no prefixes.
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% if messages[0].role == 'system' %}"
    "{% set ns.system = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.index0 >= messages | length - 2 %}{{ ns.system }}{% endif %}"
    "{{ m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# As Qwen3 does: the last answer gets an empty thinking block, which vanishes from it once another turn follows.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]"],
}
_ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}
_STARTS = {"chatml": None, "llama3": "<|begin_of_text|>", "mistral": "<s>"}
_FAMILY_TEMPLATE = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}


@cache
def _trained(vocab: int, special: tuple[str, ...]) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return str(tokenizer.to_str())


def tiny_tokenizer(
    family: str = "chatml", *, template: str | None = "", pad: str | None = None, vocab: int = 320
) -> Any:
    """A byte-level BPE tokenizer of at most ``vocab`` tokens; every text round-trips.

    Args:
        family: ``chatml``, ``llama3`` or ``mistral``: special tokens, end of turn and default template.
        template: Another chat template, or None for no template.
        pad: The pad token; by default there is none, as in the published tokenizers of these families.
        vocab: Upper bound on the number of tokens; at least 256 bytes and the special ones.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(vocab, tuple(SPECIAL[family]))),
        eos_token=_ENDS[family],
        bos_token=_STARTS[family],
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _FAMILY_TEMPLATE[family] if template == "" else template
    return tokenizer
