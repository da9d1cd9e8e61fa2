"""Tiny random Hugging Face models of real architectures, token data, and a LightningModule as a user writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB = 256
# Shorter than the sequences of most tests, so that it matters.
_WINDOW = 8

# Kind -> configuration class of transformers.
_CONFIGS = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen3": "Qwen3Config",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "gpt_neox": "GPTNeoXConfig",
    "mixtral": "MixtralConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "gpt2": "GPT2Config",
    "opt": "OPTConfig",
    "falcon": "FalconConfig",
    "bloom": "BloomConfig",
}
_Arguments = dict[str, Any]
# Kind -> its arguments, from the common ones, those with grouped key heads, and those with a width of heads besides.
# Dropout is off and attention windows are shorter than the sequences of tests.
_ARGUMENTS: dict[str, Callable[[_Arguments, _Arguments, _Arguments], _Arguments]] = {
    "llama": lambda common, grouped, headed: grouped,
    "mistral": lambda common, grouped, headed: headed,
    "qwen3": lambda common, grouped, headed: {**headed, "tie_word_embeddings": True},
    "gemma": lambda common, grouped, headed: headed,
    "gemma2": lambda common, grouped, headed: {**headed, "sliding_window": _WINDOW, "tie_word_embeddings": True},
    "gemma3": lambda common, grouped, headed: {**headed, "sliding_window": _WINDOW, "tie_word_embeddings": True},
    "phi3": lambda common, grouped, headed: {**grouped, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": lambda common, grouped, headed: {**common, "hidden_dropout": 0.0},
    "mixtral": lambda common, grouped, headed: {**grouped, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": lambda common, grouped, headed: {
        **headed,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": common["hidden_size"] // 2,
    },
    "gpt2": lambda common, grouped, headed: {
        "n_embd": common["hidden_size"],
        "n_layer": common["num_hidden_layers"],
        "n_head": common["num_attention_heads"],
        "vocab_size": common["vocab_size"],
        "n_positions": 512,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "opt": lambda common, grouped, headed: {
        **common,
        "ffn_dim": common["intermediate_size"],
        "word_embed_proj_dim": common["hidden_size"],
        "dropout": 0.0,
    },
    "falcon": lambda common, grouped, headed: {**common, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "bloom": lambda common, grouped, headed: {
        "hidden_size": common["hidden_size"],
        "n_layer": common["num_hidden_layers"],
        "n_head": common["num_attention_heads"],
        "vocab_size": common["vocab_size"],
        "pad_token_id": 0,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}


def tiny_config(
    kind: str = "llama", *, hidden: int = 64, layers: int = 3, vocab: int = VOCAB, tie: bool | None = None
) -> Any:
    """A config of about 0.2M parameters; ``tie`` overrides the architecture's own default."""
    import transformers as tf

    heads = 4
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    grouped = {**common, "num_key_value_heads": 2}
    headed = {**grouped, "head_dim": hidden // heads}
    config: Any = getattr(tf, _CONFIGS[kind])(**_ARGUMENTS[kind](common, grouped, headed))
    if tie is not None:
        config.tie_word_embeddings = tie
    return config


def tiny_model(kind: str = "llama", *, seed: int = 0, **kwargs: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(kind, **kwargs), dtype=torch.float32)


def save_tiny_model(
    folder: Path, kind: str = "llama", *, seed: int = 0, max_shard_size: str = "5GB", **kwargs: Any
) -> Path:
    """An ordinary Hugging Face folder with the weights of :func:`tiny_model`."""
    model = tiny_model(kind, seed=seed, **kwargs)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


class Tokens(Dataset[dict[str, Tensor]]):
    """``n`` fixed random sequences of shape ``[length]``, used as inputs and as labels."""

    def __init__(self, n: int = 64, length: int = 32, vocab: int = VOCAB, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randint(3, vocab, (n, length), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.x[index], "labels": self.x[index]}


def loader(dataset: Dataset[Any], *, batch_size: int, rank: int = 0, world_size: int = 1) -> DataLoader[Any]:
    """A sequential loader of this rank's share; pass ``use_distributed_sampler=False`` to the Trainer with it."""
    sampler: Any = DistributedSampler(dataset, world_size, rank, shuffle=False)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


class UserModule(L.LightningModule):
    """What a user writes: builds a Hugging Face model, returns ``out.loss``, knows nothing of the strategy."""

    def __init__(self, kind: str = "llama", *, lr: float = 5e-3, folder: str | None = None, **config: Any) -> None:
        super().__init__()
        self.kind, self.lr, self.folder, self.config_args = kind, lr, folder, config
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        if self.folder is None:
            self.model = tiny_model(self.kind, **self.config_args)
        else:
            from transformers import AutoModelForCausalLM

            self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.model.train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch, use_cache=False).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, weight_decay=0.01)


def quiet_trainer(**kwargs: Any) -> L.Trainer:
    """A Trainer that prints and writes nothing, on as many devices as there are ranks."""
    import os

    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return L.Trainer(**{**settings, **kwargs})
