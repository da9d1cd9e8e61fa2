"""Runs training steps of a traced model and says how high memory rose in each part of the second one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_swift.parallel.checkpointing import CheckpointingSettings, apply_checkpointing
from lightning_swift.planner._trace_events import StorageEvents
from lightning_swift.planner._trace_model import block_list, build_model, register_attention
from lightning_swift.planner._trace_parallel import (
    cut,
    distribute,
    fake_mesh,
    gather_around,
    loss_context,
    materialise,
    reduce_gradients,
    wait_with_gradients,
)

__all__ = ["trace"]

Request = Mapping[str, Any]
_VOCABULARY_OF_IDS = 1000


def trace(request: Request) -> dict[str, Any]:
    """Peak bytes of each section of a step, and the bytes that stay between steps.

    Args:
        request: Plain values; see ``trace.py``, which makes it.
    """
    register_attention()
    mesh = fake_mesh(request)
    if mesh is None:
        with _fake_mode() if request["fake"] else contextlib.nullcontext():
            return _Run(request, _built(request, None)).measure()
    # A mesh looks at the values of its ranks, which fake tensors do not have.
    model = _built(request, mesh)
    with _fake_mode():
        materialise(model)
        return _Run(request, model).measure()


def _built(request: Request, mesh: Any) -> Any:
    """The model with what the strategy does to it, in the strategy's order."""
    model: Any = build_model(request["config"], request, "cpu" if mesh is None else "meta")
    _cut(model, request["stage"])
    if mesh is not None:
        cut(model, mesh, request)
    if request["checkpointing"] != "none":
        apply_checkpointing(model, CheckpointingSettings(request["checkpointing"]))
    if mesh is not None:
        distribute(model, mesh, request)
    return model


def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


class _Run:
    def __init__(self, request: Request, model: Any) -> None:
        self.request = request
        self.model: Any = model
        # Called by name, since FSDP can only gather around methods of the model.
        for name, method in (("in_chunks", self._chunked), ("body", self._body)):
            object.__setattr__(self.model, name, method)
            if request["sharded"]:
                gather_around(self.model, name)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = _optimizer(self.trained, request["optimizer"], in_backward=request["optimizer_in_backward"])
        self.events = StorageEvents()
        self.ids = torch.randint(0, _VOCABULARY_OF_IDS, (request["batch"], request["length"]))

    def measure(self) -> dict[str, Any]:
        events, resident = self.events, self.request["resident"]
        _mark(self.model, events)
        with events, loss_context(self.request):
            events.count(_local(p) for p in self.model.parameters())
            events.count(self.model.buffers())
            events.count([self.ids])
            for _ in range(2):
                events.restart()
                self._step()
                static = events.current
                if not resident or self.request["scheduled"]:
                    self.optimizer.zero_grad()
            sections = events.finish()
        return {
            "sections": sections,
            "static": static,
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }

    def _step(self) -> None:
        events, request = self.events, self.request
        if request["scheduled"]:
            if request["sharded"]:
                wait_with_gradients(self.model)
            if request["resident"]:
                self._backward([self._forward()])
        events.section("forward")
        waiting = [self._forward() for _ in range(request["flight"])]
        events.section("loss")
        self._backward(waiting)
        if request["scheduled"] and request["sharded"]:
            events.section("reduction")
            reduce_gradients(self.model)
        events.section("step")
        self.optimizer.step()

    def _backward(self, waiting: list[dict[str, Any]]) -> None:
        """The backward pass of the oldest micro-batch."""
        outcome = waiting.pop(0)
        target, grad = outcome.pop("target"), outcome.pop("grad")
        if grad is None:
            target.backward()
        else:
            torch.autograd.backward(target, grad)
        del target, grad
        outcome.clear()
        waiting.clear()

    def _forward(self) -> dict[str, Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.request["autocast"]):
            return self._outcome()

    def _outcome(self) -> dict[str, Any]:
        request = self.request
        stage = request["stage"]
        inputs: dict[str, Any] = {"input_ids": self.ids}
        if stage in ("middle", "last"):
            batch, length, width = *self.ids.shape, self.model.config.hidden_size
            rows = length // request["tensor"] if request["sequence"] else length
            dtype = torch.float32 if request["precision"] == "32-true" else torch.bfloat16
            hidden = torch.empty((batch, rows, width), dtype=dtype, requires_grad=True)
            # The rows are a part of the sequence, whose positions are all needed inside the layers.
            inputs = {"inputs_embeds": hidden, "position_ids": torch.arange(length).unsqueeze(0)}
        if stage in ("first", "middle"):
            hidden = self.model.body(inputs)
            return {"target": hidden, "grad": torch.empty_like(hidden), "inputs": inputs}
        if request["loss"] == "chunked":
            return {"target": self.model.in_chunks(inputs), "grad": None, "inputs": inputs}
        output = self.model(**inputs, labels=self.ids, use_cache=False)
        kept = output if request["loss"] == "huggingface_kept" else None
        return {"target": output.loss, "grad": None, "kept": kept, "inputs": inputs}

    def _body(self, inputs: Mapping[str, Any]) -> Tensor:
        hidden: Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        return hidden

    def _chunked(self, inputs: Mapping[str, Any]) -> Tensor:
        model, chunk = self.model, self.request["chunk"]
        hidden = self._body(inputs)
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


def _local(parameter: Any) -> Tensor:
    local: Tensor = getattr(parameter, "_local_tensor", parameter)
    return local


def _optimizer(parameters: list[nn.Parameter], name: str, *, in_backward: bool) -> Any:
    if in_backward:
        return _InBackward(parameters, name)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, foreach=False)
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=name == "adamw", fused=name == "adamw_fused")


class _InBackward:
    """An optimizer for each parameter, which updates it and frees its gradient as soon as that is there."""

    def __init__(self, parameters: list[nn.Parameter], name: str) -> None:
        self._optimizers = {p: _optimizer([p], name, in_backward=False) for p in parameters}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: Tensor) -> None:
        optimizer = self._optimizers[cast(nn.Parameter, parameter)]
        optimizer.step()
        optimizer.zero_grad()

    def step(self) -> None:
        """Nothing is left to do."""

    def zero_grad(self) -> None:
        """Nothing is left to free."""
