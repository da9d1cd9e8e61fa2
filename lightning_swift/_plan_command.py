"""The ``plan`` command: its options, and what it prints. Imports neither torch nor Lightning (but for ``--trace``)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from lightning_swift.errors import ConfigurationError, ModelError

__all__ = ["add_plan"]

_AUTO = "auto"
_GAP = 0.05


def add_plan(commands: Any) -> None:
    """Add ``plan`` to the sub-commands of a parser."""
    from lightning_swift.planner.settings import OptimizerName, Precision, StrategyName

    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="say what fits, how fast it is, and which strategy to take",
        description="Predicts memory and time of every strategy for a model on given GPUs, and recommends one.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_plan)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model folder, a config.json, or a shipped configuration such as llama-3-8b")
    add("--gpu", default=_AUTO, metavar="NAME", help="such as a10, a YAML file, or auto for this machine's (default)")
    add("--gpus", type=_whole, default=1, metavar="N", help="GPUs per machine (default: %(default)s)")
    add("--nodes", type=_whole, default=1, metavar="N", help="machines (default: %(default)s)")
    add("--seq-length", type=_whole, default=2048, metavar="N", help="tokens per sequence (default: %(default)s)")
    add("--batch-size", type=_whole, metavar="N", help="sequences per GPU and micro-batch (default: searched)")
    add("--global-batch", type=_whole, metavar="N", help="sequences per optimizer step, by accumulation")
    add("--goal", default=_AUTO, choices=(_AUTO, "full", "lora", "qlora", "pretrain"), help="default: what fits")
    add("--lora-r", type=_whole, default=16, metavar="R", help="rank of adapters (default: %(default)s)")
    add("--dora", action="store_true", help="adapters with magnitudes")
    add("--dropout", action="store_true", help="dropout in front of adapters")
    add(
        "--loss",
        default="huggingface",
        choices=("huggingface", "huggingface_kept", "chunked"),
        help="how it is computed",
    )
    add("--chunk", type=_whole, default=1024, metavar="N", help="tokens of a chunk of the loss (default: %(default)s)")
    add("--checkpointing", default=_AUTO, choices=(_AUTO, "none", "selective", "full"), help="of activations")
    add("--strategy", default=_AUTO, choices=(_AUTO, *get_args(StrategyName)), help="consider only this one")
    add("--dtype", default="bf16-mixed", choices=get_args(Precision), help="precision (default: %(default)s)")
    add("--optimizer", default="adamw", choices=get_args(OptimizerName), help="default: %(default)s")
    add("--tensor-parallel", type=_whole, metavar="N", help="consider only meshes with this size")
    add("--pipeline-parallel", type=_whole, metavar="N", help="consider only meshes with this size")
    add("--host-memory", type=_amount, metavar="GB", help="of each machine")
    add("--network", type=_amount, metavar="GB/S", help="between machines, per GPU")
    add("--tokens", type=_amount, metavar="N", help="training tokens, for hours and cost (1e9, say)")
    add("--price", type=_amount, metavar="P", help="of one GPU for an hour, for the cost")
    add("--calibration", type=Path, metavar="FILE", help="records of earlier runs (default: those of this user)")
    add("--trace", action="store_true", help="run the best candidate's layers under fake tensors too (needs torch)")
    add("--output", type=Path, metavar="FILE", help="write the best candidate as a recipe")
    add("--plot", type=Path, metavar="FILE", help="draw the memory of all candidates (.png or .html)")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def _whole(text: str) -> int:
    value = int(text) if text.lstrip("+-").isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _plan(options: argparse.Namespace) -> int:
    from lightning_swift.planner import report
    from lightning_swift.planner.calibration import read_calibration
    from lightning_swift.planner.recipe import recipe_text, write_recipe
    from lightning_swift.planner.recommend import plan_for, refusal

    job = _job(options)
    if options.calibration is not None and not options.calibration.is_file():
        raise ConfigurationError("no such file.", where=f"--calibration {options.calibration}")
    calibration = read_calibration(job.gpu.name, options.calibration)
    limits = _limits(options, calibration.ratio)
    plan = plan_for(job, limits, any_goal=options.goal == _AUTO)
    if options.plot is not None:
        from lightning_swift.planner.plot import plot_plan

        plot_plan(plan, options.plot)
    traced = _traced(options, plan) if options.trace and plan.best is not None else {}
    if options.json:
        print(
            json.dumps(report.as_json(plan, options.model, calibration, {"trace": traced} if traced else {}), indent=1)
        )
    else:
        report.print_plan(plan, calibration, tokens=options.tokens, price=options.price)
        if traced:
            print(_trace_words(traced))
    if plan.best is None:
        raise refusal(plan, limits)
    if options.output is not None:
        write_recipe(options.output, recipe_text(plan.job, plan.best, options.model))
        if not options.json:
            print(f"recipe: {options.output} (lightning-swift fit --config {options.output})")
    return 0


def _job(options: argparse.Namespace) -> Any:
    from lightning_swift.planner.hardware import read_gpu
    from lightning_swift.planner.settings import Job
    from lightning_swift.planner.shape import read_shape

    return Job(
        read_shape(options.model),
        read_gpu(options.gpu),
        gpus=options.gpus,
        nodes=options.nodes,
        length=options.seq_length,
        goal="full" if options.goal == _AUTO else options.goal,
        global_batch=options.global_batch,
        precision=options.dtype,
        optimizer=options.optimizer,
        lora_r=options.lora_r,
        dora=options.dora,
        dropout=options.dropout,
        loss=options.loss,
        chunk=options.chunk,
        host_memory=(options.host_memory or 0.0) * 1e9,
        network=(options.network or 0.0) * 1e9,
    )


def _limits(options: argparse.Namespace, ratio: float) -> Any:
    from lightning_swift.planner.search import Limits

    return Limits(
        strategy=None if options.strategy == _AUTO else options.strategy,
        batch=options.batch_size,
        checkpointing=None if options.checkpointing == _AUTO else options.checkpointing,
        tensor=options.tensor_parallel,
        pipeline=options.pipeline_parallel,
        ratio=ratio,
    )


def _traced(options: argparse.Namespace, plan: Any) -> dict[str, Any]:
    from lightning_swift.planner.memory import requested_peak
    from lightning_swift.planner.shape import read_config
    from lightning_swift.planner.trace import trace_layout

    layout = plan.best.layout
    formula = requested_peak(plan.job, layout)
    try:
        trace = trace_layout(read_config(options.model)[1], plan.job, layout)
    except (ConfigurationError, ModelError) as error:
        return {"note": str(error), "formula_gb": formula / 1e9}
    gap = trace.requested / formula - 1
    return {"trace_gb": trace.requested / 1e9, "formula_gb": formula / 1e9, "gap": gap, "where": trace.where}


def _trace_words(traced: dict[str, Any]) -> str:
    if "note" in traced:
        return f"trace: {traced['note']}"
    words = (
        f"requested from PyTorch's allocator: {traced['formula_gb']:.3f} GB by the closed form, "
        f"{traced['trace_gb']:.3f} GB by the trace ({traced['gap']:+.1%})"
    )
    return words if abs(traced["gap"]) <= _GAP else f"{words}. They differ by more than 5 %: believe the trace."
