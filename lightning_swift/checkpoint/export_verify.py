"""Holds an exported folder against the model it was made from: a fresh process loads it and computes its logits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_swift.checkpoint.reload import ANSWER, LOGITS, Answer, Request
from lightning_swift.errors import ExportError

__all__ = ["ROUNDING", "Expected", "Verdict", "quantised_tolerance", "verify_folder"]

ROUNDING: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 8 * 2**-7, "float16": 8 * 2**-10}
"""Largest logit gap that rounding alone may make, relative to the largest logit, by dtype of the exported weights.

For the cases that cannot be bitwise: adapters, whose product is added to the weight once instead of to each output,
and other kernels or devices. Half precision: eight units in the last place (measured: below one). Float32: about 800,
since the error of thousands of summands grows with the depth of the model (measured: about four). A wrong,
transposed or stale layer moves logits by their own size.
"""

_INT8 = 0.1
"""The same for 8-bit layers, which also round their inputs, to 127 steps up and down: a part in 250 for each element
and layer, whatever the dtype. A wrong scale or layer moves logits by their own size."""

_FIX = "Nothing was exported."
_LONGEST_MESSAGE = 600
# What a launcher sets for the training process and no other.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR")
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "PL_")


@dataclass(frozen=True)
class Expected:
    """The trained model's side of the comparison.

    Args:
        ids: The tokens.
        logits: float32 ``[tokens, vocabulary]``.
        dtype: Dtype to load the folder in, so that both sides compute alike; ``"auto"`` for the folder's own.
        tolerance: Largest allowed gap relative to the largest logit; 0 asks for equal bits.
        digests: Digest of every tensor, if they are to be equal too.
        attention: Attention implementation of the trained model; None for the default.
        device: Where to compute.
        quantization: How the base of an adapter is to be quantised; as in the manifest of a checkpoint.
    """

    ids: list[int]
    logits: Tensor
    dtype: str = "auto"
    tolerance: float = 0.0
    digests: Mapping[str, str] | None = None
    attention: str | None = None
    device: str = "cpu"
    quantization: dict[str, Any] | None = None


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison that held: largest logit gap, tokens and tensors compared, dtype when loaded."""

    max_logit_gap: float
    tokens: int
    tensors: int
    dtype: str


def quantised_tolerance(quantization: Mapping[str, Any], dtype: str) -> float:
    """Largest allowed gap between a quantised model and the matrices that its weights stand for.

    Args:
        quantization: Of the manifest.
        dtype: The narrowest one that takes part.
    """
    return max(ROUNDING[dtype], _INT8 if quantization["kind"] == "int8" else 0.0)


def verify_folder(folder: Path, expected: Expected, *, base: str | None = None) -> Verdict:
    """Load ``folder`` in a fresh process and compare.

    Args:
        folder: A Hugging Face folder, or a peft adapter folder with ``base`` given.
        expected: What the trained model gave.
        base: Folder of the base model of an adapter.

    Raises:
        ExportError: It does not load, lacks or has too many tensors, or does not reproduce the trained model.
    """
    request = Request(
        folder=str(folder),
        ids=expected.ids,
        dtype=expected.dtype,
        device=expected.device,
        base=base,
        attention=expected.attention,
        digests=expected.digests is not None,
        quantization=None if base is None else expected.quantization,
        threads=torch.get_num_threads(),
        matmul_precision=torch.get_float32_matmul_precision(),
    )
    answer, logits = _ask(request)
    _refuse_names(folder, answer)
    _refuse_digests(folder, answer, expected)
    gap = _gap(folder, logits, expected)
    return Verdict(gap, len(expected.ids), len(answer.digests), answer.dtype)


def _ask(request: Request) -> tuple[Answer, Tensor]:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="lightning-swift-") as scratch:
        question = Path(scratch) / "request.json"
        absolute = replace(request, folder=os.path.abspath(request.folder))
        question.write_text(json.dumps(asdict(absolute)), encoding="utf-8")
        command = [sys.executable, "-m", "lightning_swift.checkpoint.reload", str(question), scratch]
        result = subprocess.run(command, env=_environment(request), capture_output=True, text=True, check=False)  # noqa: S603
        if result.returncode:
            reason = _last_error(result.stderr) or f"exit code {result.returncode}"
            raise ExportError(f"the folder does not load: {reason}", where=request.folder, fix=_FIX)
        answer = Answer(**json.loads((Path(scratch) / ANSWER).read_text(encoding="utf-8")))
        return answer, load_file(Path(scratch) / LOGITS)["logits"]


def _last_error(stderr: str) -> str:
    """The message of the exception that a traceback ends with, which may have several lines; else the last line."""
    lines = stderr.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    text = " ".join(lines[starts[-1] if starts else -1 :])
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


def _environment(request: Request) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER and not name.startswith(_LAUNCHER_PREFIXES)
    }
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [kept.get("PYTHONPATH")])]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**kept, **offline, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(request.threads)}


def _refuse_names(folder: Path, answer: Answer) -> None:
    kinds = {"missing": answer.missing, "mis-shaped": answer.mismatched, "unexpected": answer.unexpected}
    for kind, names in kinds.items():
        if names:
            raise ExportError(f"{len(names)} {kind} tensors: {', '.join(names[:8])}.", where=str(folder), fix=_FIX)


def _refuse_digests(folder: Path, answer: Answer, expected: Expected) -> None:
    if expected.digests is None:
        return
    names = answer.digests.keys() | expected.digests.keys()
    wrong = sorted(name for name in names if answer.digests.get(name) != expected.digests.get(name))
    if wrong:
        raise ExportError(
            f"{len(wrong)} of {len(names)} tensors differ from the trained model's: {', '.join(wrong[:8])}.",
            where=str(folder),
            fix=_FIX,
        )


def _gap(folder: Path, logits: Tensor, expected: Expected) -> float:
    if logits.shape != expected.logits.shape:
        raise ExportError(
            f"logits of shape {list(logits.shape)}, the trained model's have {list(expected.logits.shape)}.",
            where=str(folder),
            fix=_FIX,
        )
    if torch.equal(logits, expected.logits):
        return 0.0
    gap = float((logits - expected.logits).abs().max())
    allowed = expected.tolerance * float(expected.logits.abs().max())
    # "not <=" also catches NaN.
    if not gap <= allowed:
        raise ExportError(
            f"its logits differ from the trained model's by up to {gap:.3g}; at most {allowed:.3g} is allowed.",
            where=str(folder),
            fix=_FIX,
        )
    return gap
