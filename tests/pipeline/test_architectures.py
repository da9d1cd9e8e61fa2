"""What a probe says of architectures, none of which has a line of code of its own; numbers are in the matrix."""

from __future__ import annotations

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_swift.errors import ModelError
from lightning_swift.parallel.anatomy import probe
from tests.harness.models import tiny_model


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
