"""Runs training steps of a traced model and says how high memory rose in each part of the second one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_swift.parallel.checkpointing import CheckpointingSettings, apply_checkpointing
from lightning_swift.planner._trace_events import StorageEvents
from lightning_swift.planner._trace_model import block_list, build_model, register_attention

__all__ = ["trace"]

Request = Mapping[str, Any]
_VOCABULARY_OF_IDS = 1000


def trace(request: Request) -> dict[str, Any]:
    """Peak bytes of each section of a step, and the bytes that stay between steps.

    Args:
        request: Plain values; see ``trace.py``, which makes it.
    """
    register_attention()
    # A mesh looks at the values of its ranks, which fake tensors do not have.
    mesh = _mesh(request["ranks"]) if request["ranks"] > 1 else None
    mode = _fake_mode() if request["fake"] else contextlib.nullcontext()
    with mode:
        return _Run(request, mesh).measure()


def _mesh(ranks: int) -> Any:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lightning_swift.parallel.mesh import MeshSizes, build_mesh

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    return build_mesh(MeshSizes(dp_shard=ranks), "cpu")


def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


class _Holder(nn.Module):
    """Stands for the LightningModule around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class _Run:
    def __init__(self, request: Request, mesh: Any) -> None:
        self.request = request
        self.model: Any = build_model(request["config"], request, "cpu")
        _cut(self.model, request["stage"])
        if request["checkpointing"] != "none":
            apply_checkpointing(self.model, CheckpointingSettings(request["checkpointing"]))
        # Called by name, since FSDP can only gather around methods of the model.
        object.__setattr__(self.model, "in_chunks", self._chunked)
        if mesh is not None:
            _shard(self.model, mesh, request)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = _optimizer(self.trained, request["optimizer"])
        self.events = StorageEvents()
        self.ids = torch.randint(0, _VOCABULARY_OF_IDS, (request["batch"], request["length"]))

    def measure(self) -> dict[str, Any]:
        events, resident = self.events, self.request["resident"]
        _mark(self.model, events)
        with events:
            events.count(_local(p) for p in self.model.parameters())
            events.count(self.model.buffers())
            events.count([self.ids])
            for _ in range(2):
                events.restart()
                self._step()
                static = events.current
                if not resident:
                    self.optimizer.zero_grad()
            sections = events.finish()
        return {
            "sections": sections,
            "static": static,
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }

    def _step(self) -> None:
        events, request = self.events, self.request
        events.section("forward")
        waiting = [self._forward() for _ in range(request["flight"])]
        events.section("loss")
        outcome = waiting.pop(0)
        target, grad = outcome.pop("target"), outcome.pop("grad")
        if grad is None:
            target.backward()
        else:
            torch.autograd.backward(target, grad)
        del target, grad
        outcome.clear()
        waiting.clear()
        events.section("step")
        self.optimizer.step()

    def _forward(self) -> dict[str, Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.request["autocast"]):
            return self._outcome()

    def _outcome(self) -> dict[str, Any]:
        request = self.request
        stage = request["stage"]
        inputs: dict[str, Any] = {"input_ids": self.ids}
        if stage in ("middle", "last"):
            width = self.model.config.hidden_size
            dtype = torch.bfloat16
            inputs = {"inputs_embeds": torch.empty((*self.ids.shape, width), dtype=dtype, requires_grad=True)}
        if stage in ("first", "middle"):
            hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
            return {"target": hidden, "grad": torch.empty_like(hidden), "inputs": inputs}
        if request["loss"] == "chunked":
            return {"target": self.model.in_chunks(inputs), "grad": None, "inputs": inputs}
        output = self.model(**inputs, labels=self.ids, use_cache=False)
        kept = output if request["loss"] == "huggingface_kept" else None
        return {"target": output.loss, "grad": None, "kept": kept, "inputs": inputs}

    def _chunked(self, inputs: Mapping[str, Any]) -> Tensor:
        model, chunk = self.model, self.request["chunk"]
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        hidden = hidden.view(-1, hidden.shape[-1])
        labels = self.ids.view(-1)
        cap = getattr(model.config, "final_logit_softcapping", None)

        def piece(rows: Tensor, targets: Tensor) -> Tensor:
            logits = model.lm_head(rows)
            if cap is not None:
                logits = torch.tanh(logits / cap) * cap
            return functional.cross_entropy(logits.float(), targets, reduction="sum")

        total: Any = 0
        for start in range(0, hidden.shape[0], chunk):
            end = start + chunk
            total = total + checkpoint(piece, hidden[start:end], labels[start:end], use_reentrant=False)
        loss: Tensor = total / hidden.shape[0]
        return loss


def _mark(model: Any, events: StorageEvents) -> None:
    """Name the parts of the backward pass, by the gradients that arrive at the ends of the first and last layer."""
    blocks = block_list(model)

    def leaving(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: events.section(name))

        return hook

    def entering(module: nn.Module, args: Any, kwargs: Any) -> None:
        tensor = args[0] if args else kwargs["hidden_states"]
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: events.section("embedding"))

    if len(blocks) > 1:
        blocks[-1].register_forward_hook(leaving("last layer"))
        blocks[-2].register_forward_hook(leaving("between"))
    blocks[0].register_forward_hook(leaving("first layer"))
    blocks[0].register_forward_pre_hook(entering, with_kwargs=True)


def _cut(model: Any, stage: str) -> None:
    """Take off what a pipeline stage does not have."""
    if stage in ("first", "middle"):
        model.lm_head = nn.Identity()
        for name in ("norm", "ln_f"):
            if hasattr(model.base_model, name):
                setattr(model.base_model, name, nn.Identity())
    if stage in ("middle", "last"):
        for name in ("embed_tokens", "wte"):
            if hasattr(model.base_model, name):
                setattr(model.base_model, name, nn.Identity())


def _shard(model: nn.Module, mesh: Any, request: Request) -> None:
    from torch.distributed.fsdp import register_fsdp_forward_method

    from lightning_swift.parallel.blocks import find_blocks
    from lightning_swift.parallel.dtypes import PrecisionPolicy
    from lightning_swift.parallel.sharding import ShardingSettings, shard

    blocks = [(f"model.{name}", block) for name, block in find_blocks(model)]
    shard(_Holder(model), mesh, ShardingSettings(PrecisionPolicy(request["precision"])), blocks)
    # What is called instead of forward has to gather the outermost group too.
    register_fsdp_forward_method(model, "in_chunks")


def _local(parameter: Any) -> Tensor:
    local: Tensor = getattr(parameter, "_local_tensor", parameter)
    return local


def _optimizer(parameters: list[nn.Parameter], name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, foreach=False)
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=name == "adamw", fused=name == "adamw_fused")
