"""Activation checkpointing: exact gradients, less memory, nothing else changed."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.checkpointing import CheckpointingSettings, apply_checkpointing, remove_checkpointing
from tests.harness.models import tiny_model

FULL = CheckpointingSettings("full")
SELECTIVE = CheckpointingSettings("selective")
EVERY_2 = CheckpointingSettings("every_n", every_n=2)
MODES = pytest.mark.parametrize("settings", [FULL, SELECTIVE, EVERY_2], ids=lambda s: s.mode)
IDS = torch.randint(3, 256, (2, 16), generator=torch.Generator().manual_seed(5))


def gradients(model: nn.Module, **kwargs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(11)
    model(input_ids=IDS, labels=IDS, **kwargs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_bitwise(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def counted_calls(model: nn.Module, name: str) -> list[int]:
    """A list that grows by one at each start of the submodule (recomputation may stop before its end)."""
    calls: list[int] = []
    model.get_submodule(name).register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@MODES
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma", "gpt2"])
def test_gradients_are_bitwise_those_without_it(kind: str, settings: CheckpointingSettings) -> None:
    model = tiny_model(kind).train()
    inner = {"gpt2": "transformer.h.0.mlp"}.get(kind, "model.layers.0.mlp")
    calls = counted_calls(model, inner)
    expected = gradients(model)
    assert len(calls) == 1
    keys, names, classes = list(model.state_dict()), [n for n, _ in model.named_parameters()], type_names(model)

    assert apply_checkpointing(model, settings) == (2 if settings is EVERY_2 else 3)

    # The cache is not switched off by the caller here: config.use_cache is True and must do no harm.
    assert_bitwise(gradients(model), expected)
    assert len(calls) == 3, "the block ran once forward and once more in the backward pass"
    assert (list(model.state_dict()), [n for n, _ in model.named_parameters()], type_names(model)) == (
        keys,
        names,
        classes,
    )
    assert model.config.use_cache is not False, "the config is saved with checkpoints and must not change"


def type_names(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules()]


@MODES
def test_dropout_draws_the_same_masks_again(settings: CheckpointingSettings) -> None:
    model = tiny_model("gpt2").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    expected = gradients(model)
    apply_checkpointing(model, settings)
    assert_bitwise(gradients(model), expected)


@MODES
def test_a_frozen_base_still_passes_gradients_to_its_adapters(settings: CheckpointingSettings) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # zero at the start, which would hide the gradient of A
    expected = gradients(model)
    assert apply_checkpointing(model, settings) > 0
    actual = gradients(model)
    assert_bitwise(actual, expected)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(actual)
    assert all("lora_" in name and bool(g.any()) for name, g in actual.items())


@MODES
def test_mixed_precision_is_the_same_in_recomputation(settings: CheckpointingSettings) -> None:
    model = tiny_model("llama").train()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model)
    apply_checkpointing(model, settings)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=IDS, labels=IDS).loss
    model.zero_grad()
    loss.backward()  # outside autocast, as Lightning calls it
    assert_bitwise({n: p.grad for n, p in model.named_parameters()}, expected)


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages made while active that are still alive: saved tensors and selective caches alike."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(out):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return out

    def total(self) -> int:
        gc.collect()
        return sum(size for ref, size in self.storages.values() if ref() is not None)


def activation_bytes(settings: CheckpointingSettings | None) -> int:
    model = tiny_model("llama", layers=4).train()
    ids = torch.randint(3, 256, (4, 64))
    if settings is not None:
        apply_checkpointing(model, settings)
    with LiveBytes() as live:
        loss = model(input_ids=ids).logits.sum()
    size = live.total()
    loss.backward()
    return size


def test_full_keeps_less_than_selective_and_selective_less_than_nothing() -> None:
    none, selective, full, every_2 = (activation_bytes(s) for s in (None, SELECTIVE, FULL, EVERY_2))
    # One hidden state of [4, 64, 64] float32 is 64 KiB. "full" keeps it once per block; the rest (embeddings, logits,
    # rotary tables, masks) is common to all four.
    assert full < every_2 < none
    assert full < selective < none
    assert selective < 0.75 * none
    assert full < 0.4 * none


def test_evaluation_and_no_grad_run_the_blocks_as_they_are() -> None:
    model = tiny_model("llama").eval()
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=True)
    apply_checkpointing(model, FULL)
    for training in (False, True):
        with torch.no_grad():
            out = model.train(training)(input_ids=IDS, use_cache=True)
        assert torch.equal(out.logits, expected.logits)
        assert out[1].get_seq_length() == IDS.shape[1], "the cache works where nothing is recomputed"


def test_evaluation_with_gradients_recomputes_nothing() -> None:
    model = tiny_model("llama").eval()
    calls = counted_calls(model, "model.layers.0.mlp")
    apply_checkpointing(model, FULL)
    gradients(model)
    assert len(calls) == 1


class CountingOperators(TorchDispatchMode):
    """How often each operator really runs; what a selective cache answers does not reach this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "matmul"), [("llama", "mm"), ("gpt2", "addmm")])
def test_selective_computes_attention_and_matrix_products_once(kind: str, matmul: str) -> None:
    model = tiny_model(kind).train()
    runs = {}
    for settings in (None, SELECTIVE, FULL):
        remove_checkpointing(model)
        if settings is not None:
            apply_checkpointing(model, settings)
        with CountingOperators() as counter:
            gradients(model)
        runs[settings] = counter.runs
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert runs[None][attention] == runs[SELECTIVE][attention] == 3
    assert runs[None][matmul] == runs[SELECTIVE][matmul] > 0
    assert runs[FULL][attention] == 6
    assert runs[FULL][matmul] > runs[None][matmul]
    assert runs[SELECTIVE]["mul"] > runs[None]["mul"], "the rest was computed again"


def test_generate_works_on_a_checkpointed_model() -> None:
    model = tiny_model("llama").eval()
    expected = model.generate(IDS[:, :4], max_new_tokens=5, do_sample=False)
    apply_checkpointing(model, FULL)
    assert torch.equal(model.generate(IDS[:, :4], max_new_tokens=5, do_sample=False), expected)


def test_a_cache_that_is_asked_for_in_training_is_not_written_twice() -> None:
    model = tiny_model("gpt2").train()  # GPT-2 passes the cache by position
    expected = gradients(model)
    apply_checkpointing(model, EVERY_2)
    assert_bitwise(gradients(model, use_cache=True), expected)
    assert "cache" not in model(input_ids=IDS, use_cache=True), "the blocks between do not fill it either"


def test_a_cache_handed_to_a_block_is_left_out() -> None:
    from transformers import DynamicCache

    model = tiny_model("llama").train()
    apply_checkpointing(model, FULL)
    x = torch.randn(1, 5, 64)
    position = model.model.rotary_emb(x, torch.arange(5)[None])
    cache = DynamicCache()
    model.model.layers[0](x, position_embeddings=position, cache=cache)
    assert cache.get_seq_length() == 0


def test_removing_it_leaves_no_trace() -> None:
    model = tiny_model("llama").train()
    before = [(dict(m.__dict__), dict(m._forward_pre_hooks)) for m in model.modules()]
    assert apply_checkpointing(model, FULL) == 3
    assert remove_checkpointing(model) == 3
    after = [(dict(m.__dict__), dict(m._forward_pre_hooks)) for m in model.modules()]
    assert [x[0].keys() for x in before] == [x[0].keys() for x in after]
    assert [x[1] for x in before] == [x[1] for x in after]
    assert remove_checkpointing(model) == 0


def test_somebody_elses_forward_is_kept_called_and_restored() -> None:
    model = tiny_model("llama").train()
    block = model.model.layers[0]
    original, calls = block.forward, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    block.forward = theirs
    apply_checkpointing(model, FULL)
    gradients(model)
    assert len(calls) == 2
    remove_checkpointing(model)
    assert block.forward is theirs


def test_applying_twice_is_applying_once() -> None:
    model = tiny_model("llama").train()
    calls = counted_calls(model, "model.layers.1.mlp")
    assert apply_checkpointing(model, FULL) == apply_checkpointing(model, FULL) == 3
    gradients(model)
    assert len(calls) == 2
    with pytest.raises(ConfigurationError, match="checkpointed already, with other settings"):
        apply_checkpointing(model, SELECTIVE)


def test_huggingface_checkpointing_is_refused() -> None:
    model = tiny_model("llama").train()
    model.activation_checkpointing_enable()
    with pytest.raises(ConfigurationError, match="Hugging Face's own gradient checkpointing"):
        apply_checkpointing(model, FULL)
    model.activation_checkpointing_disable()
    apply_checkpointing(model, FULL)
    model.activation_checkpointing_enable()  # afterwards: seen at the first step
    with pytest.raises(ConfigurationError, match="LlamaDecoderLayer has Hugging Face's own"):
        gradients(model)


def test_torch_wrappers_are_refused() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = tiny_model("llama").train()
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    with pytest.raises(ConfigurationError, match=r"layers\.1 is wrapped by torch"):
        apply_checkpointing(model, FULL)


def test_copies_and_pickles_are_checkpointed_models_of_their_own() -> None:
    model = tiny_model("llama").train()
    expected = gradients(model)
    apply_checkpointing(model, SELECTIVE)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        calls, own_calls = counted_calls(twin, "model.layers.0.mlp"), counted_calls(model, "model.layers.0.mlp")
        model.zero_grad()
        assert_bitwise(gradients(twin), expected)
        assert (len(calls), len(own_calls)) == (2, 0)
        assert all(p.grad is None for p in model.parameters())
        assert remove_checkpointing(twin) == 3


# Dynamo looks at .grad of every tensor and hides the warning by a filter that pytest's "error" overrules.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("settings", [FULL, SELECTIVE], ids=lambda s: s.mode)
def test_compiled_blocks(settings: CheckpointingSettings) -> None:
    model = tiny_model("llama", layers=2).train()
    expected = gradients(model)
    apply_checkpointing(model, settings)
    for block in model.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    actual = gradients(model)
    for name, gradient in expected.items():
        # aot_eager runs the same kernels but decomposes some backward formulas: rounding of float32 only.
        torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-7)
    torch._dynamo.reset()


class Plain(nn.Module):
    """Not a Hugging Face model: blocks of the user's own."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainBlock(norm) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=2.0)
        return self.head(x)


class PlainBlock(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.linear = norm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * torch.tanh(self.linear(self.norm(x)))


@MODES
def test_any_module_with_repeated_blocks(settings: CheckpointingSettings) -> None:
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(4, 8)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert apply_checkpointing(model, settings) == (2 if settings is EVERY_2 else 3)
    actual = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_blocks_are_chosen_by_class_name() -> None:
    model = tiny_model("llama").train()
    calls = [counted_calls(model, "model.layers.0.mlp.up_proj"), counted_calls(model, "model.layers.0.self_attn")]
    expected = gradients(model)
    assert apply_checkpointing(model, CheckpointingSettings(blocks=("LlamaMLP",))) == 3
    assert_bitwise(gradients(model), expected)
    assert [len(c) for c in calls] == [3, 2], "only the MLP ran again"


def test_an_unknown_class_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"Did you mean 'LlamaDecoderLayer'\? The classes.*LlamaMLP"):
        apply_checkpointing(tiny_model("llama"), CheckpointingSettings(blocks=("LlamaDecoderLayers",)))
    with pytest.raises(ConfigurationError, match="'Nope'"):
        apply_checkpointing(tiny_model("llama"), CheckpointingSettings(blocks=("LlamaMLP", "Nope")))


def test_blocks_inside_one_another_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"mlp lies inside model\.layers"):
        apply_checkpointing(tiny_model("llama"), CheckpointingSettings(blocks=("LlamaMLP", "LlamaDecoderLayer")))


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no repeated blocks were found in Linear"):
        apply_checkpointing(nn.Linear(2, 2), FULL)


def test_running_statistics_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"layers\.0\.norm is a BatchNorm1d"):
        apply_checkpointing(Plain(nn.BatchNorm1d), FULL)


@pytest.mark.parametrize(
    "wrong", [{"mode": "fully"}, {"every_n": 0}, {"blocks": ()}, {"blocks": "LlamaDecoderLayer"}], ids=str
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        CheckpointingSettings(**wrong)
