"""Merging a sharded checkpoint: ours beside ``cp -r``, Lightning, torch and accelerate, each in a process of its own.

``python -m benchmarks.merge --size-gb 2`` makes a float32 checkpoint of 4 shards, merges it by every contender from a
warm page cache, compares every tensor that ours wrote with the original, and deletes everything. Wall time is the
median of ``--repeats`` runs taken in turns; peers that take many times longer run once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.launch import ROOT, report, table, torchrun

RANKS = 4
HIDDEN, INTERMEDIATE, VOCAB = 1024, 2816, 32000
OURS = "lightning-swift merge"

# A small process starts the measured one: the peak of a child counts what its parent held when it forked.
_MEASURE = """
import os, sys, time
start = time.perf_counter()
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
wall = time.perf_counter() - start
print(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, os.waitstatus_to_exitcode(status), file=sys.stderr)
"""


@dataclass(frozen=True)
class Run:
    """Wall and CPU seconds and peak resident bytes of one process."""

    wall: float
    cpu: float
    peak: float


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in WORKERS:
        WORKERS[sys.argv[1]](*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-gb", type=float, default=2.0, help="size of the checkpoint in 10^9 bytes")
    parser.add_argument("--repeats", type=int, default=3, help="runs of cp and ours")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; default: the temporary folder")
    parser.add_argument("--no-peers", action="store_true", help="only cp and ours")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swift-merge-", dir=args.folder) as folder:
        checkpoint = Path(folder) / "big.ckpt"
        torchrun("benchmarks.merge", RANKS, ["make", str(checkpoint), str(args.size_gb)])
        _compare(checkpoint, Path(folder) / "out", args.repeats, peers=not args.no_peers)


def _compare(checkpoint: Path, output: Path, repeats: int, *, peers: bool) -> None:
    fast = _ours(checkpoint, output)
    runs: dict[str, list[Run]] = {name: [] for name in fast}
    for repeat in range(repeats):
        for name, command in fast.items():
            runs[name].append(_timed(checkpoint, output, command))
            if repeat == 0 and name.startswith(OURS):
                _python("check", checkpoint, output, "bfloat16" if "bfloat16" in name else "float32")
    if peers:
        runs |= {name: [_timed(checkpoint, output, command)] for name, command in _peers(checkpoint, output).items()}
    base = statistics.median(run.wall for run in runs["cp -r"])
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    table(
        f"Merge of {size / 1e9:.2f} GB in {RANKS} shards, warm cache; every tensor of ours compared",
        ["contender", "wall s", "x cp", "CPU s", "peak RSS MB"],
        [_row(name, values, base) for name, values in runs.items()],
    )


def _row(name: str, runs: list[Run], base: float) -> tuple[str, ...]:
    wall = statistics.median(run.wall for run in runs)
    cpu = statistics.median(run.cpu for run in runs)
    return name, f"{wall:.2f}", f"{wall / base:.2f}", f"{cpu:.2f}", f"{max(run.peak for run in runs) / 1e6:.0f}"


def _ours(checkpoint: Path, output: Path) -> dict[str, list[str]]:
    merge = [sys.executable, "-m", "benchmarks.merge", "merge", str(checkpoint), str(output)]
    return {
        "cp -r": [shutil.which("cp") or "/bin/cp", "-r", str(checkpoint), str(output)],
        OURS: [*merge, "", ""],
        f"{OURS} --verify-hashes": [*merge, "", "hashes"],
        f"{OURS} --dtype bfloat16": [*merge, "bfloat16", ""],
        f"{OURS} --dtype bfloat16 --verify-hashes": [*merge, "bfloat16", "hashes"],
    }


def _peers(checkpoint: Path, output: Path) -> dict[str, list[str]]:
    python = [sys.executable, "-W", "ignore"]
    lightning = [*python, "-m", "lightning.fabric.utilities.consolidate_checkpoint", str(checkpoint)]
    return {
        "Lightning consolidate_checkpoint": [*lightning, "--output_file", str(output)],
        "torch dcp_to_torch_save": [*python, "-m", "benchmarks.merge", "torch", str(checkpoint), str(output)],
        "accelerate merge_fsdp_weights": [
            *python,
            "-m",
            "benchmarks.merge",
            "accelerate",
            str(checkpoint),
            str(output),
        ],
    }


def _timed(checkpoint: Path, output: Path, command: list[str]) -> Run:
    """Run ``command`` on a warm cache with nothing left to write back from the run before."""
    if output.is_dir():
        shutil.rmtree(output)
    output.unlink(missing_ok=True)
    for path in checkpoint.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")
    os.sync()
    done = subprocess.run(
        [sys.executable, "-S", "-c", _MEASURE, *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    wall, cpu, peak, code = map(float, done.stderr.splitlines()[-1].split())
    if code:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return Run(wall, cpu, peak)


def _python(*arguments: object) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.merge", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arguments[0]} failed:\n{done.stderr[-4000:]}")


def _shapes(size_gb: float) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama of about that size in float32."""
    blocks = {
        **{f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
        **{f"mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")},
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    per_layer = sum(math.prod(shape) for shape in blocks.values())
    layers = max(1, round((size_gb * 1e9 / 4 - 2 * VOCAB * HIDDEN) / per_layer))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in blocks.items()}
    return {**shapes, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def _values(name: str, shape: tuple[int, ...]) -> Iterator[Any]:
    """The shards of one tensor, reproducible by name."""
    import torch

    for rank in range(RANKS):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}.{rank}".encode()))
        yield torch.empty(shape[0] // RANKS, *shape[1:]).normal_(0, 0.02, generator=generator)


def _make(checkpoint: str, size_gb: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    shapes = _shapes(float(size_gb))
    state = {}
    for name, shape in shapes.items():
        shard = list(_values(name, shape))[dist.get_rank()]
        state[f"model.model.{name}"] = DTensor.from_local(shard, mesh, [Shard(0)])
    dcp.save(state, checkpoint_id=checkpoint)
    if dist.get_rank() == 0:
        torch.save({}, Path(checkpoint) / "meta.pt")
        _describe(Path(checkpoint), shapes)
        report(None)
    dist.barrier()
    dist.destroy_process_group()


def _describe(checkpoint: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    from lightning_swift.checkpoint.layout import MANIFEST, FileRecord, Manifest, RunRecord, TensorRecord

    (checkpoint / "huggingface").mkdir()
    config = {"model_type": "llama", "dtype": "float32", "tie_word_embeddings": False}
    (checkpoint / "huggingface" / "config.json").write_text(json.dumps(config))
    files = {}
    for path in (path for path in checkpoint.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[str(path.relative_to(checkpoint))] = FileRecord(path.stat().st_size, digest)
    manifest = Manifest(
        run=RunRecord(id="benchmark", started="2026-01-01T00:00:00Z"),
        global_step=1,
        strategy="FSDPBF16Strategy",
        mesh={"dp_shard": RANKS},
        files=files,
        tensors={f"model.model.{name}": TensorRecord(shape, "float32") for name, shape in shapes.items()},
        tied={},
        huggingface="model",
        weights_only=True,
        samples_seen=None,
        created="2026-01-01T00:00:00Z",
        versions={},
    )
    (checkpoint / MANIFEST).write_text(manifest.to_json())


def _merge(checkpoint: str, output: str, dtype: str, hashes: str) -> None:
    from lightning_swift.checkpoint.merge import merge_checkpoint

    cast: Any = dtype or None
    merge_checkpoint(Path(checkpoint), Path(output), dtype=cast, verify_hashes=bool(hashes))


def _torch(checkpoint: str, output: str) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint, output)


def _accelerate(checkpoint: str, output: str) -> None:
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(checkpoint, output)


def _check(checkpoint: str, output: str, dtype: str) -> None:
    """Compare every tensor of a merged folder, bit by bit, with what was saved (cast by torch)."""
    import torch
    from safetensors import safe_open

    from lightning_swift.checkpoint.layout import read_manifest

    records = read_manifest(Path(checkpoint)).tensors
    shapes = {key.removeprefix("model.model."): record.shape for key, record in records.items()}
    with safe_open(Path(output) / "model.safetensors", framework="pt") as file:
        if sorted(file.keys()) != sorted(shapes):
            raise SystemExit("the names differ")
        for name, shape in shapes.items():
            expected = torch.cat(list(_values(name, shape))).to(getattr(torch, dtype))
            if not torch.equal(file.get_tensor(name).view(torch.uint8), expected.view(torch.uint8)):
                raise SystemExit(f"{name} differs")


WORKERS = {"make": _make, "merge": _merge, "torch": _torch, "accelerate": _accelerate, "check": _check}

if __name__ == "__main__":
    main()
