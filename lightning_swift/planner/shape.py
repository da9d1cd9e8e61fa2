"""The sizes of a model that decide its memory and its time, read from a Hugging Face ``config.json``. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_swift._shipped import nearest, shipped_folder
from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.planner._families import FAMILIES, Family

__all__ = ["ModelShape", "Tower", "named_configs", "read_config", "read_shape"]

# The same size under the names that architectures give it, the most common first.
_KEYS = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx"),
}
_WRAPPERS = ("text_config", "llm_config", "language_config")
# Models that read text with one half and write it with the other: another loss, another cost.
_REFUSED = ("t5", "mt5", "bart", "mbart", "whisper", "marian", "bert", "roberta", "vit", "clip", "mamba", "rwkv")


@dataclass(frozen=True)
class Tower:
    """A vision tower beside the language model: counted with its parameters, its activations by their share.

    Args:
        hidden: Width.
        layers: Number of blocks.
        intermediate: Width of the feed-forward part.
        tokens: Patches of one image at the size the configuration names.
    """

    hidden: int
    layers: int
    intermediate: int
    tokens: int

    @property
    def parameters(self) -> int:
        """Attention (4 h^2) and a two-matrix feed-forward part per block, patch embedding left out."""
        return self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.intermediate)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder language model; counts are in elements, not bytes.

    Args:
        name: What the user called it.
        model_type: That of ``transformers``.
        hidden: Width of the residual stream.
        layers: Number of decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of one head.
        intermediate: Width of the (dense) feed-forward part.
        vocab: Rows of the embedding.
        tied: The head shares the embedding's weight.
        family: What else the layer code of the architecture does.
        experts: Routed experts of a sparse layer; 0 for dense models.
        experts_per_token: Routed experts that each token visits.
        expert_intermediate: Width of one expert.
        shared_intermediate: Width of the expert that all tokens visit, 0 without.
        dense_layers: Layers of a sparse model that are dense all the same.
        positions: Longest sequence that the configuration allows; 0 if it does not say.
        tower: Vision tower, if the configuration has one.
        known: The closed form knows this architecture's layer code; otherwise it assumes that of Llama.
    """

    name: str
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    family: Family
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    positions: int = 0
    tower: Tower | None = None
    known: bool = True

    @property
    def q(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the output head that are not the embedding's."""
        return 0 if self.tied else self.embedding

    @property
    def attention_linear(self) -> int:
        """Parameters of the attention's matrices in one layer."""
        return self.hidden * (2 * self.q + 2 * self.kv)

    @property
    def matrices(self) -> int:
        """Matrices of a dense feed-forward part: three where it is gated."""
        return 3 if self.family.gated else 2

    def mlp_linear(self, sparse: bool) -> int:
        """Parameters of the feed-forward matrices in one layer, all experts counted."""
        if not sparse:
            return self.matrices * self.hidden * self.intermediate
        return self.matrices * self.hidden * (self.experts * self.expert_intermediate + self.shared_intermediate)

    def layer_small(self, sparse: bool) -> int:
        """Parameters of one layer outside its matrices: norms, biases, router."""
        family = self.family
        norms = family.norms * self.hidden * (2 if family.norm == "layer" else 1)
        heads = {"none": 0, "head": 2 * self.head_dim, "all": self.q + self.kv}[family.qk_norm]
        bias = (self.q + 2 * self.kv if family.qkv_bias else 0) + (self.hidden if family.out_bias else 0)
        mlp_bias = ((self.matrices - 1) * self.intermediate + self.hidden) if family.mlp_bias and not sparse else 0
        return norms + heads + bias + mlp_bias + (self.hidden * self.experts if sparse else 0)

    def layer_parameters(self, sparse: bool) -> int:
        """Parameters of one layer."""
        return self.attention_linear + self.mlp_linear(sparse) + self.layer_small(sparse)

    @property
    def sparse(self) -> tuple[bool, ...]:
        """For each layer, whether its feed-forward part is a mixture of experts."""
        return tuple(bool(self.experts) and index >= self.dense_layers for index in range(self.layers))

    @property
    def parameters(self) -> int:
        """All parameters of the model, the vision tower included."""
        blocks = sum(self.layer_parameters(sparse) for sparse in self.sparse)
        norm = self.hidden * (2 if self.family.norm == "layer" else 1)
        learned = self.positions * self.hidden if self.family.learned_positions else 0
        tower = self.tower.parameters if self.tower else 0
        return blocks + self.embedding + self.head + norm + learned + tower

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets in matrix products (head included, embedding not)."""
        total = self.embedding
        for sparse in self.sparse:
            width = self.experts_per_token * self.expert_intermediate + self.shared_intermediate
            total += self.attention_linear + self.matrices * self.hidden * (width if sparse else self.intermediate)
        return total


def named_configs() -> dict[str, Path]:
    """The configurations shipped for use without a download, by name."""
    return {path.stem: path for path in sorted((shipped_folder("configs") / "models").glob("*.json"))}


def read_shape(model: str | Path | Mapping[str, Any]) -> ModelShape:
    """Read the sizes of a model.

    Args:
        model: A model folder, a ``config.json`` or its content, or the name of a shipped configuration.

    Raises:
        ConfigurationError: There is no such file and no such name.
        ModelError: The file describes no decoder language model, or impossible sizes.
    """
    name, config = read_config(model)
    return _shape(config, name)


def read_config(model: str | Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The name of a model and the content of its ``config.json``; arguments and errors as :func:`read_shape`."""
    if isinstance(model, Mapping):
        return str(model.get("model_type", "model")), model
    if not str(model):
        raise ConfigurationError("the model has no name.", where="MODEL", fix="Give a folder, a file or a name.")
    path = Path(model).expanduser()
    source = path / "config.json" if path.is_dir() else path
    if not source.is_file():
        source = _named(str(model), is_folder=path.is_dir())
    return (path.resolve().name if path.is_dir() else source.stem), _load(source)


def _named(name: str, *, is_folder: bool) -> Path:
    if is_folder:
        raise ConfigurationError("the folder has no config.json.", where=name, fix="Give a Hugging Face model folder.")
    known = named_configs()
    if name.lower() in known:
        return known[name.lower()]
    raise ConfigurationError(
        "neither a folder, nor a config.json, nor the name of a shipped configuration.",
        where=name,
        fix=f"The nearest name is {nearest(name.lower(), known)!r}; the others are {', '.join(known)}.",
    )


def _load(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"not readable as JSON ({error}).", where=str(path), fix="Give a config.json.") from error
    if not isinstance(found, dict):
        raise ModelError("not an object with the sizes of a model.", where=str(path), fix="Give a config.json.")
    return found


def _shape(config: Mapping[str, Any], name: str) -> ModelShape:
    kind = str(config.get("model_type", "unknown"))
    _refuse_kind(config, kind, name)
    text = next((config[key] for key in _WRAPPERS if isinstance(config.get(key), Mapping)), config)
    inner = str(text.get("model_type", kind))
    family = FAMILIES.get(inner) or FAMILIES.get(kind)
    read = _Reader(text, name)
    heads, hidden = read.size("heads"), read.size("hidden")
    head_dim = read.optional("head_dim") or _divide(hidden, heads, name)
    kv_heads = read.optional("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(f"{heads} heads cannot share {kv_heads} key and value heads.", where=name)
    found = family or FAMILIES["llama"]
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return ModelShape(
        name=name,
        model_type=inner,
        hidden=hidden,
        layers=read.size("layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=read.optional(*_KEYS["intermediate"]) or 4 * hidden,
        vocab=read.size("vocab_size"),
        tied=found.tied if tied is None else bool(tied),
        family=found.with_switches(text),
        positions=read.optional(*_KEYS["positions"]) or 0,
        tower=_tower(config),
        known=family is not None,
        **_experts(text, read, name),
    )


def _refuse_kind(config: Mapping[str, Any], kind: str, name: str) -> None:
    if kind in _REFUSED or config.get("is_encoder_decoder"):
        raise ModelError(
            f"{kind!r} is no decoder language model, which is what the planner knows.",
            where=name,
            fix="Give the config.json of a causal language model.",
        )


class _Reader:
    """Reads whole positive numbers under their many names."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def size(self, key: str) -> int:
        names = _KEYS.get(key, (key,))
        value = self.optional(*names)
        if value is None:
            raise ModelError(
                f"the configuration has no {' or '.join(names)}.",
                where=self._name,
                fix="Give the config.json of a causal language model.",
            )
        return value

    def optional(self, *names: str) -> int | None:
        for key in names:
            value = self._config.get(key)
            if value is None:
                continue
            if isinstance(value, list):
                # Architectures whose layers differ give one size per layer.
                value = max(value, default=0)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelError(f"{key}={value!r} is not a whole number of at least 1.", where=self._name)
            return value
        return None


def _divide(hidden: int, heads: int, name: str) -> int:
    if hidden % heads:
        raise ModelError(f"hidden_size={hidden} is not divisible by num_attention_heads={heads}.", where=name)
    return hidden // heads


_ExpertSizes = dict[
    Literal["experts", "experts_per_token", "expert_intermediate", "shared_intermediate", "dense_layers"], int
]


def _experts(config: Mapping[str, Any], read: _Reader, name: str) -> Any:
    experts = read.optional(*_KEYS["experts"]) or 0
    if experts < 2:
        return {}
    chosen = read.optional("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts") or 2
    if chosen > experts:
        raise ModelError(f"a token cannot visit {chosen} of {experts} experts.", where=name)
    width = read.optional("moe_intermediate_size", *_KEYS["intermediate"]) or 0
    shared = config.get("shared_expert_intermediate_size") or int(config.get("n_shared_experts") or 0) * width
    dense = int(config.get("first_k_dense_replace") or 0)
    sizes: _ExpertSizes = {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_intermediate": width,
        "shared_intermediate": int(shared),
        "dense_layers": dense,
    }
    return sizes


def _tower(config: Mapping[str, Any]) -> Tower | None:
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    hidden = vision.get("hidden_size") or vision.get("embed_dim")
    layers = vision.get("num_hidden_layers") or vision.get("depth")
    if not isinstance(hidden, int) or not isinstance(layers, int):
        return None
    patch, image = vision.get("patch_size") or 14, vision.get("image_size") or 448
    side = (image if isinstance(image, int) else image[0]) // (patch if isinstance(patch, int) else patch[0])
    return Tower(hidden, layers, int(vision.get("intermediate_size") or 4 * hidden), side * side)
