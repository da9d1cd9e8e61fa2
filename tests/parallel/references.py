"""What the engine is measured against: other modules, plain training loops in one process, an emulator of BF16."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.harness.models import VOCAB, Tokens, UserModule, loader, quiet_trainer, tiny_model

_Result = TypeVar("_Result")
STEPS = 20
BATCH = 4


class PlainModule(L.LightningModule):
    """No Hugging Face: torch's own encoder between an embedding and a head, all children of the module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCAB)
        self.losses: list[float] = []

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.encoder(self.embedding(batch["input_ids"])))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.01)


class TiedByHand(PlainModule):
    """The head uses the embedding's weight: one parameter, two children of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Seq2Seq(PlainModule):
    """A whole ``nn.Transformer``: encoder and decoder blocks below one child."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        # Two embeddings of their own: a tensor used twice would have its gradient summed in another order.
        source, target = self.embedding(batch["input_ids"].flip(1)), self.embedding(batch["input_ids"])
        return self.head(self.encoder(source, target))


class ValueHead(UserModule):
    """A Hugging Face model, a head of the user's own next to it, and a parameter on the module itself."""

    def __init__(self, kind: str = "llama", *, direct: bool = False, **config: Any) -> None:
        super().__init__(kind, **config)
        torch.manual_seed(5)
        self.value = nn.Sequential(nn.Linear(VOCAB, 8), nn.Tanh(), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0])) if direct else None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.model(**batch, use_cache=False)
        value = self.value(out.logits.tanh()).float().pow(2).mean()
        loss = out.loss + (value if self.scale is None else value * self.scale.prod())
        self.losses.append(float(loss.detach()))
        return loss


class Frozen(UserModule):
    """The first block and the embedding do not train."""

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.model.named_parameters():
            if "embed" in name or "layers.0." in name:
                parameter.requires_grad_(False)


class Lora(UserModule):
    """peft adapters of the user's own making."""

    def configure_model(self) -> None:
        if self.model is not None:
            return
        from peft import LoraConfig, get_peft_model

        super().configure_model()
        torch.manual_seed(7)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        self.model = get_peft_model(self.model, config)


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Recorder(L.Callback):
    """Keeps the whole gradients of the first optimizer step before and after clipping, and the weights at the end."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.gradients:
            named = ((n, p.grad) for n, p in pl_module.named_parameters())
            self.gradients = {n: full(grad) for n, grad in named if grad is not None}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = {n: full(p) for n, p in pl_module.named_parameters()}


def fit(
    module: Any, strategy: Any, *, steps: int = STEPS, batch: int = BATCH, callbacks: Sequence[Any] = (), **kwargs: Any
) -> tuple[Any, Recorder]:
    """Train ``module`` on this rank's share of the tokens; the module and what was recorded."""
    recorder = Recorder()
    together = [recorder, *callbacks]
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, callbacks=together, max_epochs=1000, **kwargs)
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer.fit(module, loader(Tokens(), batch_size=batch, rank=rank, world_size=world))
    return module, recorder


def mean_losses(module: Any) -> list[float]:
    """Loss of each micro-batch averaged over ranks."""
    losses = torch.tensor(module.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def micro_batches(step: int, *, world: int, accumulate: int = 1, batch: int = BATCH) -> list[list[Tensor]]:
    """Sequences of an optimizer step, by micro-batch and rank, as the loader of :func:`fit` deals them."""
    x = Tokens().x
    size = world * batch
    micro = [[(size * (step * accumulate + k) + j) % len(x) for j in range(size)] for k in range(accumulate)]
    return [[x[indices[rank::world]] for rank in range(world)] for indices in micro]


def on_first_rank(compute: Callable[..., _Result]) -> Callable[..., _Result]:
    """A reference needs no second process: the first rank computes it, the others wait for what it has found."""

    @functools.wraps(compute)
    def run(*args: Any, **kwargs: Any) -> _Result:
        found: list[Any] = [compute(*args, **kwargs) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        return found[0]

    return run


@on_first_rank
def single_process(
    model: nn.Module,
    *,
    world: int,
    steps: int = STEPS,
    accumulate: int = 1,
    batch: int = BATCH,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    lr: float = 5e-3,
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """A plain loop over the same global batches: losses, gradients of the first step, norms before clipping."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.01)
    losses, norms, first = [], [], {}
    for step in range(steps):
        for parts in micro_batches(step, world=world, accumulate=accumulate, batch=batch):
            x = torch.cat(parts)
            loss = model(input_ids=x, labels=x, use_cache=False).loss
            (loss / accumulate).backward()
            losses.append(float(loss.detach()))
        if not first:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if clip_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm)))
        if clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
        optimizer.zero_grad()
    return losses, first, norms


@on_first_rank
def bf16_emulator(
    kind: str, *, world: int, steps: int = STEPS, accumulate: int = 1, synchronised: bool = True, **config: Any
) -> list[list[float]]:
    """What FSDP2's BF16 policy computes, by hand in one process: losses of each micro-batch by rank.

    Masters in float32; each rank's copy in bfloat16 with float32 buffers; gradients summed over ranks in float32.
    With synchronisation they are summed over ranks first and over micro-batches afterwards, without it the other way.
    """
    master = tiny_model(kind, **config).train()
    work = tiny_model(kind, **config).train()
    for parameter in work.parameters():
        parameter.data = parameter.data.bfloat16()
    optimizer = torch.optim.AdamW(master.parameters(), lr=5e-3, weight_decay=0.01)
    losses: list[list[float]] = []
    for step in range(steps):
        total: dict[tuple[int, ...], list[Tensor]] = {}
        with torch.no_grad():
            for parameter, copy in zip(master.parameters(), work.parameters(), strict=True):
                copy.copy_(parameter)
        for k, parts in enumerate(micro_batches(step, world=world, accumulate=accumulate)):
            losses.append([])
            for rank, x in enumerate(parts):
                work.zero_grad()
                loss = work(input_ids=x, labels=x, use_cache=False).loss
                (loss / accumulate).backward()
                losses[-1].append(float(loss.detach()))
                gradients = [p.grad.float() for p in work.parameters()]
                key = (k,) if synchronised else (rank,)
                total[key] = (
                    gradients if key not in total else [a + b for a, b in zip(total[key], gradients, strict=True)]
                )
        _apply_gradients(master, list(total.values()), world, synchronised=synchronised)
        optimizer.step()
    return losses


def _apply_gradients(master: nn.Module, sums: list[list[Tensor]], world: int, *, synchronised: bool) -> None:
    divide: Callable[[Tensor], Tensor] = (lambda t: t / world) if synchronised else (lambda t: t)
    combined = [divide(gradient) for gradient in sums[0]]
    for more in sums[1:]:
        combined = [a + divide(b) for a, b in zip(combined, more, strict=True)]
    for parameter, gradient in zip(master.parameters(), combined, strict=True):
        parameter.grad = gradient if synchronised else gradient / world


def norm_of(gradients: dict[str, Tensor]) -> float:
    """Norm of all of them as one vector, in float64."""
    return math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradients.values()))
