"""Architectures without a line of code of their own: pipeline of two ranks against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_swift.errors import ModelError
from lightning_swift.parallel.anatomy import probe
from tests.harness.models import tiny_model
from tests.harness.ranks import ranks
from tests.pipeline.references import batch_of, check_step, model_of, pipelined

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie": True}),
    ("llama", {"tie": False}),
    ("qwen3", {}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gemma3", {}),
    ("mistral", {}),
    ("phi3", {}),
    ("gpt_neox", {}),
    ("mixtral", {}),
    ("qwen3_moe", {}),
    ("gpt2", {}),
    ("opt", {}),
    ("falcon", {}),
    ("bloom", {}),
]


@pytest.mark.parametrize(("name", "microbatches"), [("1F1B", 4), ("ZBVZeroBubble", 2)])
@ranks(2, deadline=60)
def test_every_architecture(name: Any, microbatches: int) -> None:
    batch = batch_of(8, 12)
    for kind, config in KINDS:
        reference = model_of(kind, **config)
        check_step(pipelined(model_of(kind, **config), name, microbatches), reference, batch, what=f"{kind} {name}")


@ranks(4, deadline=60)
def test_four_stages_of_each_family() -> None:
    batch = batch_of(8, 12)
    for kind, config in KINDS[:12]:
        reference = model_of(kind, **config)
        check_step(pipelined(model_of(kind, **config), "1F1B", 4), reference, batch, what=kind)


def test_what_runs_before_and_after_the_layers_is_found_by_running_and_not_by_order() -> None:
    opt = probe(tiny_model("opt"))
    assert opt.after == {"model.decoder.final_layer_norm", "lm_head"}
    assert opt.before == {"model.decoder.embed_tokens", "model.decoder.embed_positions"}
    assert [probe(tiny_model(kind)).returns_tuple for kind in ("bloom", "falcon", "llama")] == [True, True, False]
    assert "bloom" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def test_a_part_that_the_configuration_does_not_know_is_refused() -> None:
    model = tiny_model("llama")
    model.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"has model\.extra, which no model of its configuration has"):
        probe(model)
