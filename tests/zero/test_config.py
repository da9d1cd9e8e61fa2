"""The DeepSpeed configuration: templates, a user's own with "auto", and what contradicts it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_swift._shipped import shipped_folder
from lightning_swift.errors import ConfigurationError
from lightning_swift.strategies._zero_config import (
    TrainerFacts,
    base_config,
    complete_config,
    hidden_size,
    size_buckets,
)
from lightning_swift.strategies._zero_loading import known_to_transformers, loading_config
from lightning_swift.strategies._zero_options import ZeROOptions
from lightning_swift.strategies.zero import ZeROStrategy
from tests.harness.models import quiet_trainer

TEMPLATES = sorted((shipped_folder("configs") / "deepspeed").glob("*.json"))
PRESETS: dict[str, dict[str, Any]] = {
    "z1": {"stage": 1},
    "z2": {"stage": 2},
    "z2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "z3": {"stage": 3},
    "z3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "z3_nvme": {"stage": 3, "offload_optimizer": "nvme", "nvme_path": "/local_nvme"},
}


def completed(facts: TrainerFacts | None = None, **options: Any) -> dict[str, Any]:
    chosen = ZeROOptions(**options)
    return complete_config(base_config(chosen), chosen, facts or TrainerFacts(world_size=2))


def test_the_templates_are_those_that_the_issue_of_presets_names() -> None:
    assert [path.stem for path in TEMPLATES] == sorted([*PRESETS, "z3_qlora"])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_the_templates_say(name: str) -> None:
    template = json.loads((TEMPLATES[0].parent / f"{name}.json").read_text())
    config = completed(TrainerFacts(on_gpu=True), **PRESETS[name])
    for key, value in template.items():
        if key != "zero_optimization":
            assert config[key] == value, key
    for key, value in template["zero_optimization"].items():
        if not (name == "z3_nvme" and key == "offload_param"):
            assert config["zero_optimization"][key] == value, key


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_are_valid_for_deepspeed_itself(path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    parsed = DeepSpeedConfig(json.loads(path.read_text()))
    assert parsed.bfloat16_config.enabled
    assert parsed.grad_accum_dtype == "fp32"
    # A key that DeepSpeed does not know would be ignored in silence.
    known = set(type(parsed.zero_config).model_fields)
    known |= {field.alias for field in type(parsed.zero_config).model_fields.values() if field.alias}
    assert set(json.loads(path.read_text())["zero_optimization"]) <= known


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_are_valid_for_hugging_face(path: Path) -> None:
    from types import SimpleNamespace

    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    config = HfTrainerDeepSpeedConfig(json.loads(path.read_text()))
    arguments = SimpleNamespace(
        world_size=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_grad_norm=1.0,
        learning_rate=1e-4,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        save_on_each_node=False,
        fp16=False,
        fp16_full_eval=False,
        bf16=True,
        bf16_full_eval=False,
        get_warmup_steps=lambda _: 0,
    )
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    config.trainer_config_process(arguments)
    config.trainer_config_finalize(arguments, model, 10)
    unset_hf_deepspeed_config()
    assert config.config["zero_optimization"]["reduce_bucket_size"] == 64 * 64


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 12345,
    },
}


def test_a_hugging_face_configuration_is_filled_in() -> None:
    facts = TrainerFacts(world_size=2, accumulate=4, clip=0.5)
    config = completed(facts, config=AUTO)
    size_buckets(config, 4096)
    assert "auto" not in json.dumps(config)
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (4, 0.5)
    assert config["bf16"] == {"enabled": True}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert not {"optimizer", "scheduler", "fp16"} & set(config)
    zero = config["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert (zero["stage"], zero["sub_group_size"]) == (3, 12345)
    assert zero["reduce_bucket_size"] == 4096**2
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 4096**2)
    assert zero["stage3_param_persistence_threshold"] == 40960
    assert AUTO["gradient_clipping"] == "auto"
    # Without a hidden size DeepSpeed's own defaults apply; it would take "auto" for a number.
    config = completed(facts, config=AUTO)
    size_buckets(config, None)
    assert "auto" not in json.dumps(config)


def test_no_configuration_is_written_to() -> None:
    given: dict[str, Any] = {"gradient_clipping": "auto"}
    options = ZeROOptions(config=given)
    base = base_config(options)
    assert given == {"gradient_clipping": "auto"}
    before = copy.deepcopy(base)
    # Another Trainer may follow, with another value.
    for clip in (0.5, 0.25):
        facts = TrainerFacts(world_size=2, clip=clip)
        assert complete_config(base, options, facts)["gradient_clipping"] == clip
        assert base == before


def test_transformers_forgets_the_configuration_whoever_still_holds_it() -> None:
    from transformers.integrations import deepspeed as integration

    with known_to_transformers(loading_config(completed(stage=3))):
        held = integration._hf_deepspeed_config_weak_ref()
        assert integration.is_deepspeed_zero3_enabled()
    assert held.is_zero3()
    assert not integration.is_deepspeed_zero3_enabled()


def test_only_what_was_asked_for_is_offloaded() -> None:
    # The template offloads both.
    assert "offload_param" not in completed(stage=3, offload_optimizer="cpu")["zero_optimization"]
    assert "offload_optimizer" not in completed(stage=3, offload_params="cpu")["zero_optimization"]


def test_a_file_is_read_and_a_shipped_name_found(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert ZeROStrategy(config=str(tmp_path / "mine.json")).stage == 2
    assert ZeROStrategy(config="z1").stage == 1
    with pytest.raises(ConfigurationError, match="'z3_offload'"):
        ZeROStrategy(config="z3_ofload")
    (tmp_path / "mine.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match="no JSON object"):
        ZeROStrategy(config=str(tmp_path / "mine.json"))


@pytest.mark.parametrize(
    ("config", "options", "facts", "key"),
    [
        ({"gradient_accumulation_steps": 2}, {}, {"accumulate": 4}, "gradient_accumulation_steps"),
        ({"gradient_clipping": 1.0}, {}, {"clip": 0.5}, "gradient_clipping"),
        ({"train_batch_size": 9}, {}, {}, "train_batch_size"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, {}, {}, "train_batch_size"),
        ({"bf16": {"enabled": True}}, {"precision": "32-true"}, {}, "bf16.enabled"),
        ({"bf16": {"enabled": False}}, {}, {}, "bf16.enabled"),
        ({"fp16": {"enabled": True}}, {}, {}, "fp16.enabled"),
        ({"optimizer": {"params": {"lr": 1e-4}}}, {}, {}, "optimizer.params"),
        ({"zero_optimization": {"stage": 2}}, {"stage": 3}, {}, "zero_optimization.stage"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            {"offload_optimizer": "none"},
            {},
            "zero_optimization.offload_optimizer.device",
        ),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, {}, {}, "zero_optimization.offload_param"),
        ({"zero_optimization": {"stage": 0}}, {}, {}, "zero_optimization.stage=0"),
        ({"zero_optimization": {"stage": True}}, {}, {}, "zero_optimization.stage=True"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            {},
            {},
            "zero_optimization.offload_param",
        ),
        ({"zero_optimization": {"stage": 2}}, {"offload_params": "cpu"}, {}, "zero_optimization.offload_param"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            {},
            {},
            "set nvme_path",
        ),
        ({"zero_optimization": {"stage": 2}}, {"offload_optimizer": "nvme", "nvme_path": "/x"}, {}, "needs stage 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "disk"}}}, {}, {}, "offload_optimizer.device"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, {}, {}, "'cpu' is not an object"),
        ({"zero_optimisation": {"stage": 2}}, {}, {}, "Write zero_optimization"),
        ({"gradient_cliping": 1.0}, {}, {}, "Write gradient_clipping"),
        ({"gradient_clipping": "1.0"}, {}, {}, 'neither "auto" nor a number'),
        ({"bf16": True}, {}, {}, "bf16 is True, not an object"),
        (
            {"zero_optimization": {"reduce_bucket_size": 100}},
            {"reduce_bucket_size": 200},
            {},
            "zero_optimization.reduce_bucket_size",
        ),
    ],
)
def test_contradictions_are_refused_by_key(config: Any, options: Any, facts: Any, key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        completed(TrainerFacts(**{"world_size": 2, **facts}), config=config, **options)
    assert key in str(caught.value)


def test_what_the_configuration_alone_says_is_kept() -> None:
    assert completed(config={"gradient_clipping": 1.0})["gradient_clipping"] == 1.0
    assert completed(config={"zero_optimization": {"stage": "auto"}})["zero_optimization"]["stage"] == 3
    nvme = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}
    assert completed(config={"zero_optimization": nvme})["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/x"


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 4},
        {"stage": True},
        {"offload_params": "nvme"},
        {"stage": 2, "offload_params": "cpu"},
        {"offload_optimizer": "nvme"},
        {"offload_optimizer": "nvme", "nvme_path": "/x", "stage": 2},
        {"offload_optimizer": "cpu", "nvme_path": "/x"},
        {"offload_optimizer": "disk"},
        {"reduce_bucket_size": 0},
        {"reduce_bucket_size": "big"},
        {"pin_memory": "yes"},
        {"timeout": 0.0},
        {"precision": "16-mixed"},
    ],
)
def test_wrong_options_are_refused_at_construction(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        ZeROStrategy(**options)


def test_parameters_on_disk_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match="second step"):
        ZeROStrategy(offload_params="nvme")  # type: ignore[arg-type]


def test_gradients_are_summed_in_float32_unless_asked_otherwise() -> None:
    # DeepSpeed's own default is the dtype of the model, and BF16 sums lose small gradients.
    for stage in (1, 2, 3):
        config = completed(stage=stage)
        assert config["data_types"]["grad_accum_dtype"] == "fp32"
        assert config["communication_data_type"] == "fp32"
    assert completed(reduce_dtype="bfloat16")["communication_data_type"] == "bfp16"


def test_sizes_follow_from_the_widest_matrix_without_hugging_face() -> None:
    model = nn.Sequential(nn.Linear(48, 300), nn.Linear(300, 80))
    assert hidden_size(model) == 80
    assert hidden_size(nn.LayerNorm(3)) is None


def test_registered_names_mean_bf16_and_carry_their_options() -> None:
    for name, stage in (("swift_zero1", 1), ("swift_zero2", 2), ("swift_zero3", 3), ("swift_zero3_offload", 3)):
        strategy: Any = quiet_trainer(strategy=name).strategy
        assert (strategy.stage, strategy.options.precision) == (stage, "bf16-mixed")
    assert strategy.options.offload_params == strategy.options.offload_optimizer == "cpu"
    qlora: Any = quiet_trainer(strategy="swift_zero3_qlora").strategy
    assert qlora.options.adapters.quantization == "nf4"
    true: Any = quiet_trainer(strategy="swift_zero2", precision="bf16-true").strategy
    assert true.options.precision == true.precision_plugin.precision == "bf16-true"
    with pytest.raises(ConfigurationError, match="16-mixed"):
        quiet_trainer(strategy=ZeROStrategy(2), precision="16-mixed")
    assert torch.get_default_dtype() == torch.float32
