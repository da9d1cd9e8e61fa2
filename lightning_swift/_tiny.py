"""Tiny stand-ins for a dry run: a random model of the same architecture, a tokenizer and a few conversations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lightning_swift.errors import ConfigurationError

__all__ = ["SIZES", "shrink_config", "write_tiny_folder", "write_tiny_text"]

_ROWS = 64
_LAYERS = 2
SIZES = {
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "n_inner": 128,
    "ffn_dim": 128,
    "num_hidden_layers": _LAYERS,
    "n_layer": _LAYERS,
    "num_layers": _LAYERS,
    "num_attention_heads": 4,
    "n_head": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
}
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_SAMPLE = [
    ("Which planet is closest to the sun?", "Mercury is."),
    ("How do I make tea?", "Boil water, pour it over the leaves, and wait three minutes."),
    ("What is seven times eight?", "Fifty-six."),
    ("Name a river in Africa.", "The Nile flows north through eleven countries."),
]


def write_tiny_folder(source: str | Path | Mapping[str, Any], folder: Path, *, tokenizer: str | None = None) -> str:
    """Write a random model of the same architecture to ``folder``, with a tokenizer.

    Args:
        source: What :class:`CausalLM` takes: a model folder, a ``config.json`` or its content. Where there is no such
            file, the model is a Llama.
        folder: The folder to write.
        tokenizer: Folder of the tokenizer, if it is not that of the model.

    Returns:
        A sentence for the user: what was made of what.

    Raises:
        ConfigurationError: The architecture does not work in the tiny sizes.
    """
    settings = _settings(source)
    words: Any = _load_tokenizer(tokenizer or (source if isinstance(source, str | Path) else None))
    torch.manual_seed(0)
    try:
        model: Any = AutoModelForCausalLM.from_config(_tiny_config(settings, words), dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise ConfigurationError(
            f"no tiny model of this architecture could be built ({error}).",
            where="--dry_run",
            fix="Run the recipe itself with --trainer.max_steps 2.",
        ) from error
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    origin = f"there being no {source}" if settings is None else "of the recipe's own architecture"
    return f"Dry run: a random {type(model).__name__} of {parameters / 1e6:.1f} M parameters, {origin}."


def _tiny_config(settings: Mapping[str, Any] | None, words: Any) -> Any:
    given = {"model_type": "llama"} if settings is None else dict(settings)
    kind = given.pop("model_type")
    # Through the class, so that sizes that the file leaves to its defaults are there to be shrunk.
    small = shrink_config(AutoConfig.for_model(kind, **given).to_dict())
    small["vocab_size"] = max(len(words), given.get("vocab_size", 0))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        own = given.get(name)
        if not isinstance(own, int) or own >= small["vocab_size"]:
            small[name] = words.pad_token_id if name == "pad_token_id" else words.eos_token_id
    del small["model_type"]
    return AutoConfig.for_model(kind, **small)


def _settings(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any] | None:
    if isinstance(source, Mapping):
        return source
    path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    if not path.is_file():
        return None
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return settings


def _load_tokenizer(folder: str | Path | None) -> Any:
    if folder is not None and (Path(folder) / "tokenizer_config.json").is_file():
        return AutoTokenizer.from_pretrained(folder)
    return _tiny_tokenizer()


def shrink_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a ``config.json`` with two small layers; nested configurations are shrunk too."""
    small = {key: SIZES.get(key, value) if value is not None else None for key, value in settings.items()}
    for key in ("dtype", "torch_dtype", "quantization_config", "_name_or_path", "architectures", "auto_map"):
        small.pop(key, None)
    groups = settings.get("num_key_value_heads")
    if groups is not None:
        small["num_key_value_heads"] = 4 if groups == settings.get("num_attention_heads") else 2
    layer_types = settings.get("layer_types")
    if isinstance(layer_types, list):
        # Repeating patterns (every sixth layer, say) keep both their kinds.
        kinds = list(dict.fromkeys(layer_types))
        small["layer_types"] = (kinds * _LAYERS)[:_LAYERS]
    return {key: shrink_config(value) if key.endswith("_config") and isinstance(value, Mapping) else value
            for key, value in small.items()}  # fmt: skip


def write_tiny_text(source: Path, target: Path) -> None:
    """Write the first lines of a JSON Lines file to ``target``, or made-up conversations for anything else."""
    if source.is_file() and source.suffix in (".jsonl", ".ndjson"):
        with source.open(encoding="utf-8") as lines:
            target.write_text("".join(islice(lines, _ROWS)), encoding="utf-8")
    elif source.exists():
        # Parquet files and datasets folders are read whole: they are no slower than the text they hold.
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, target)
    else:
        target.write_text("".join(json.dumps(_chat(i)) + "\n" for i in range(_ROWS)), encoding="utf-8")


def _chat(index: int) -> dict[str, Any]:
    question, answer = _SAMPLE[index % len(_SAMPLE)]
    return {
        "messages": [
            {"role": "user", "content": f"{question} ({index})"},
            {"role": "assistant", "content": answer},
        ]
    }


def _tiny_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in _SAMPLE for text in pair), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")  # noqa: S106
    fast.chat_template = _TEMPLATE
    return fast
