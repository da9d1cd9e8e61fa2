"""``python -m lightning_swift.checkpoint.reload REQUEST ANSWER``: load a folder as a user of it would, and look at it.

Runs in a process of its own, so that nothing of the training process can help: only the folder's files, local files
only, no code from the folder. REQUEST is a JSON file with the fields of :class:`Request`; ANSWER is a folder that
receives ``answer.json`` and ``logits.safetensors``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["ANSWER", "LOGITS", "Answer", "Request", "load_folder", "main"]

ANSWER = "answer.json"
LOGITS = "logits.safetensors"


@dataclass(frozen=True)
class Request:
    """What to load and how to compute.

    Args:
        folder: A Hugging Face folder, or a peft adapter folder.
        ids: Tokens of one sequence.
        dtype: ``"auto"`` for what the folder's config says, else the name of a torch dtype.
        device: Where to compute.
        base: Folder of the base model if ``folder`` is an adapter.
        attention: Attention implementation; None for the default.
        digests: Also digest every tensor.
        quantization: How to quantise the base of an adapter that was trained on a quantised one, as the manifest of a
            checkpoint says it.
        threads: Threads of torch; sums may be split differently over another number of them.
        matmul_precision: Of float32 matrix products.
    """

    folder: str
    ids: list[int]
    dtype: str = "auto"
    device: str = "cpu"
    base: str | None = None
    attention: str | None = None
    digests: bool = False
    quantization: dict[str, Any] | None = None
    threads: int = 1
    matmul_precision: str = "highest"


@dataclass(frozen=True)
class Answer:
    """What was found: names that do not fit, the dtype, digests if asked for; the logits are in a file next to it."""

    missing: list[str]
    mismatched: list[str]
    unexpected: list[str]
    dtype: str
    digests: dict[str, str]


def main(arguments: list[str]) -> None:
    """Answer one request."""
    import torch
    from safetensors.torch import save_file

    from lightning_swift.checkpoint.export_logits import digests_of, logits_of

    request = Request(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    torch.set_num_threads(request.threads)
    torch.set_float32_matmul_precision(request.matmul_precision)
    model, info = load_folder(request)
    logits = logits_of(model, request.ids, device=request.device)
    answer = Answer(
        missing=sorted(map(str, info["missing_keys"])),
        mismatched=sorted(str(key[0]) for key in info["mismatched_keys"]),
        unexpected=sorted(map(str, info["unexpected_keys"])),
        dtype=str(model.dtype).removeprefix("torch."),
        digests=digests_of(model) if request.digests else {},
    )
    folder = Path(arguments[1])
    save_file({"logits": logits.contiguous()}, folder / LOGITS)
    (folder / ANSWER).write_text(json.dumps(asdict(answer)), encoding="utf-8")


def load_folder(request: Request) -> tuple[Any, dict[str, Any]]:
    """The model of a request by ``from_pretrained`` alone, and transformers' report of names."""
    import torch
    import transformers

    folder = request.base or request.folder
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    architectures = getattr(config, "architectures", None) or []
    auto_class: Any = getattr(
        transformers, architectures[0] if architectures else "", transformers.AutoModelForCausalLM
    )
    options: dict[str, Any] = {} if request.attention is None else {"attn_implementation": request.attention}
    if request.quantization is not None:
        options["quantization_config"] = _quantisation(request.quantization)
    model, info = auto_class.from_pretrained(
        folder,
        dtype=request.dtype if request.dtype == "auto" else getattr(torch, request.dtype),
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        # Reported with their names, as the missing ones are.
        ignore_mismatched_sizes=True,
        **options,
    )
    if request.base is not None:
        model = _with_adapter(model, request.folder, info)
    for parameter in model.parameters():
        # Weights mapped from a file may lie at any address, and some matrix kernels round by it.
        parameter.data = parameter.data.clone()
    if request.quantization is None:
        model = model.to(request.device)
    else:
        from lightning_swift.adapters.quantise import guard_packing

        guard_packing(model)
    return model.eval(), info


def _quantisation(quantization: dict[str, Any]) -> Any:
    from transformers import BitsAndBytesConfig

    if quantization["kind"] == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization["kind"],
        bnb_4bit_use_double_quant=quantization["double_quant"],
        bnb_4bit_compute_dtype=quantization["dtype"],
    )


def _with_adapter(model: Any, folder: str, info: dict[str, Any]) -> Any:
    import warnings

    from peft import PeftModel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False, local_files_only=True)
    # peft reports names that do not fit by a warning only.
    texts = [str(warning.message) for warning in caught]
    info["missing_keys"] = [*info["missing_keys"], *(text for text in texts if "missing adapter keys" in text)]
    return model


if __name__ == "__main__":
    main(sys.argv[1:])
