"""Sizes read from configurations."""

from __future__ import annotations

import json

import pytest

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.planner.shape import named_configs, read_shape
from tests.planner.jobs import tiny

# As the model cards or transformers count them.
PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-2-7b": 6_738_415_616,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_shipped_configurations(name: str) -> None:
    assert read_shape(name).parameters == PARAMETERS[name]


def test_every_shipped_configuration_is_known() -> None:
    assert len(named_configs()) >= 20
    assert all(read_shape(name).known for name in named_configs())


@pytest.mark.parametrize(
    "config",
    [
        tiny(),
        tiny(model_type="qwen2"),
        tiny(model_type="qwen3", head_dim=64),
        tiny(model_type="gemma2", head_dim=32, tie_word_embeddings=True),
        tiny(model_type="gemma3_text", head_dim=32, tie_word_embeddings=True),
        tiny(model_type="mistral"),
        tiny(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
        tiny(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=32),
        {"model_type": "gpt2", "n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "n_positions": 64},
    ],
    ids=lambda config: config["model_type"],
)
def test_parameters_are_those_that_transformers_builds(config: dict) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    built = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    assert read_shape(config).parameters == sum(p.numel() for p in model.parameters())


def test_a_folder_a_file_and_their_content_are_the_same(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny()))
    sizes = {(s.parameters, s.layers) for s in map(read_shape, (tmp_path, tmp_path / "config.json", tiny()))}
    assert len(sizes) == 1


def test_the_text_part_of_a_vision_model_with_its_tower() -> None:
    config = {
        "model_type": "qwen2_vl",
        "text_config": tiny(model_type="qwen2"),
        "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 14, "image_size": 28},
    }
    shape = read_shape(config)
    assert shape.tower is not None
    assert shape.tower.tokens == 4
    assert shape.parameters == read_shape(tiny(model_type="qwen2")).parameters + shape.tower.parameters


def test_an_unknown_architecture_is_said_to_be_unknown() -> None:
    assert not read_shape(tiny(model_type="brand_new")).known


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"hidden_size": 250}, "not divisible"),
        ({"model_type": "t5"}, "no decoder language model"),
        ({"num_local_experts": 4, "num_experts_per_tok": 9}, "cannot visit 9 of 4"),
    ],
)
def test_bad_configurations_are_one_line(changes: dict, words: str) -> None:
    with pytest.raises(ModelError) as error:
        read_shape(tiny(**changes))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="nearest name is 'llama-3-8b'"):
        read_shape("llama-3-8")
    with pytest.raises(ModelError, match="not readable as JSON"):
        read_shape(__file__)
