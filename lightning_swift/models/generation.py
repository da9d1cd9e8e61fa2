"""A quick look at an exported model: load a folder, continue a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_swift.errors import ConfigurationError, ModelError

__all__ = ["generate"]


def generate(
    folder: str | Path,
    prompt: str,
    max_new_tokens: int = 64,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = True,
    device: str = "cpu",
) -> str:
    """Continue ``prompt`` with the model in ``folder``; only local files are read and no code from them is run.

    Args:
        folder: A Hugging Face folder with a tokenizer.
        prompt: The text; the user's message where the tokenizer has a chat template and ``chat`` is on.
        max_new_tokens: Most tokens to generate.
        temperature: 0 takes the likeliest token each time; more draws from the distribution.
        seed: Of the draw; the state of the global generator is put back.
        chat: Apply the chat template if there is one.
        device: Where to compute.

    Returns:
        The generated text without the prompt and without special tokens.

    Raises:
        ModelError: The folder has no model or no tokenizer, or cannot be loaded, or an argument is out of range.
        ConfigurationError: There is no such device here.
    """
    import torch

    if not prompt:
        raise ModelError("the prompt is empty.", where="generate", fix="Give some text.")
    if max_new_tokens < 1 or temperature < 0:
        raise ModelError(
            f"max_new_tokens={max_new_tokens} must be positive and temperature={temperature} not negative.",
            where="generate",
        )
    _check_device(device)
    model, tokenizer = _load(Path(folder), device)
    inputs = _encode(tokenizer, prompt, chat=chat).to(device)
    draw: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    if not temperature:
        # Settings for drawing that the folder brings along would only cause warnings.
        draw |= {"temperature": None, "top_p": None, "top_k": None}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        output = model.generate(
            **inputs, max_new_tokens=max_new_tokens, pad_token_id=_padding(model, tokenizer), **draw
        )
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


def _check_device(device: str) -> None:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = ["cpu"]
    if accelerator is not None:
        here += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise _no_device(device, here) from error
    if wanted.type != "cpu" and f"{wanted.type}:{wanted.index or 0}" not in here:
        raise _no_device(device, here)


def _no_device(device: str, here: list[str]) -> ConfigurationError:
    return ConfigurationError(
        f"there is no device {device!r} for torch on this machine.",
        where="device",
        fix=f"Choose one of {', '.join(here)}.",
    )


def _load(folder: Path, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise ModelError(
            "no Hugging Face model lies here (there is no config.json).",
            where=str(folder),
            fix="Name a folder that `lightning-swift merge` or `export` has made.",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the tokenizer cannot be loaded ({_first_line(error)}).",
            where=str(folder),
            fix="Copy the tokenizer files of the base model into the folder.",
        ) from error
    model: Any
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the model cannot be loaded ({_first_line(error)}).", where=str(folder)) from error
    return model.to(device).eval(), tokenizer


def _encode(tokenizer: Any, prompt: str, *, chat: bool) -> Any:
    if chat and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    return tokenizer(prompt, return_tensors="pt")


def _padding(model: Any, tokenizer: Any) -> int | None:
    # generate() asks for one although a single prompt is never padded.
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    end: Any = model.generation_config.eos_token_id
    return None if end is None else int(end[0] if isinstance(end, list) else end)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
