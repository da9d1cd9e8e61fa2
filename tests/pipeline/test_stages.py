"""Cutting a model into stages: names, ownership, lazy models, adapters, and what is refused."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models.lazy import is_lazy, lazy_pretrained, load_lazy_weights
from lightning_swift.parallel.anatomy import probe
from lightning_swift.parallel.pipeline import global_name
from lightning_swift.parallel.schedule import ScheduleSettings
from lightning_swift.parallel.stages import Stage, balance, cut, split, stage_shares
from tests.harness.models import save_tiny_model, tiny_config, tiny_model
from tests.harness.ranks import ranks
from tests.pipeline.references import batch_of, check_gradients, check_step, model_of, pipelined, shared_copy, single


def _stages(model: Any, n_stages: int, numbers: list[int]) -> list[Stage]:
    anatomy = probe(model)
    return cut(model, anatomy, balance(model, anatomy, n_stages), numbers)


def _names(stages: list[Stage]) -> list[str]:
    return [name for stage in stages for name, _ in stage.model.named_parameters()]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "bloom", "mixtral"])
@pytest.mark.parametrize("meta", [False, True])
def test_stages_divide_the_parameters_under_their_own_names(kind: str, meta: bool) -> None:
    with torch.device("meta" if meta else "cpu"):
        whole = tiny_model(kind, layers=5, tie=False)
    expected = {name: id(p) for name, p in whole.named_parameters()}
    owners = [_stages(shared_copy(whole), 4, numbers) for numbers in ([0, 3], [1, 2])]
    held = [(name, id(p)) for stages in owners for stage in stages for name, p in stage.model.named_parameters()]
    # Each parameter on one stage, as the object that it was: nothing has been copied.
    assert sorted(held) == sorted(expected.items())


def test_what_no_stage_of_the_rank_owns_is_freed() -> None:
    model = tiny_model("llama", layers=4)
    anatomy = probe(model)
    kept = [weakref.ref(model.model.layers[number]) for number in range(4)]
    head = weakref.ref(model.lm_head)
    stages = cut(model, anatomy, balance(model, anatomy, 4), [1, 2])
    del model
    gc.collect()
    assert [ref() is not None for ref in kept] == [False, True, True, False]
    assert head() is None
    assert [len(stage.layers) for stage in stages] == [1, 1]


def test_a_tied_embedding_is_on_both_ends_and_twice_where_both_are_on_one_rank() -> None:
    first, last = (
        _stages(tiny_model("llama", layers=4, tie=True), 2, [0]),
        _stages(tiny_model("llama", layers=4, tie=True), 2, [1]),
    )
    assert first[0].tied == last[0].tied == ("model.embed_tokens.weight",)
    assert "model.embed_tokens.weight" in _names(first)
    assert "model.embed_tokens.weight" in _names(last)
    assert last[0].pretrained.lm_head.weight is last[0].pretrained.model.embed_tokens.weight
    one, other = _stages(tiny_model("llama", layers=4, tie=True), 4, [0, 3])
    mine, copied = one.pretrained.model.embed_tokens.weight, other.pretrained.model.embed_tokens.weight
    assert copied is other.pretrained.lm_head.weight
    assert copied is not mine
    assert torch.equal(mine, copied)
    assert _stages(tiny_model("llama", layers=4, tie=False), 2, [1])[0].tied == ()


def test_split_in_place_keeps_the_places_of_layers() -> None:
    model = tiny_model("llama", layers=5)
    split(model, probe(model), (2, 4), first=False, last=False)
    assert {name.split(".")[2] for name, _ in model.named_parameters()} == {"2", "3"}
    assert len(model.model.layers) == 5


@ranks(2)
def test_lazy_models_read_the_share_of_the_rank_and_nothing_else(tmp_path: Path) -> None:
    batch = batch_of(8)
    for kind, tie in (("llama", True), ("llama", False), ("gpt2", True), ("opt", True)):
        path = tmp_path / f"{kind}-{tie}"
        if dist.get_rank() == 0:
            save_tiny_model(path, kind, layers=4, tie=tie)
        dist.barrier()
        reference = tiny_model(kind, layers=4, tie=tie).train()
        for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
            model = pipelined(lazy_pretrained(path).train(), name, 4)
            assert is_lazy(model)
            report = load_lazy_weights(model, device="cpu")
            assert not is_lazy(model)
            # Float32 parameters of this rank, and not a byte more; buffers are in no file.
            assert report.bytes_read == 4 * sum(p.numel() for p in model.parameters())
            check_step(model, reference, batch, what=f"{kind} {tie} {name}")


@ranks(2)
def test_names_and_state_are_those_of_the_whole_model() -> None:
    whole = {name: value for name, value in model_of().state_dict().items()}
    for name in ("1F1B", "Interleaved1F1B"):
        model = pipelined(model_of(), name, 4)
        holder = nn.ModuleDict({"model": model})
        state = {key.removeprefix("model."): value for key, value in holder.state_dict().items()}
        assert [n for n, _ in holder.named_parameters()] == list(holder.state_dict())
        everywhere: list[Any] = [None, None]
        dist.all_gather_object(everywhere, list(state))
        assert sorted(everywhere[0] + everywhere[1]) == sorted(whole)
        assert all(torch.equal(value, whole[key]) for key, value in state.items())
        assert {"model.layers.0", "model"} & set(dict(model.named_modules()))
        # A checkpoint of the whole model, or of this rank, goes in under the same names.
        doubled = {f"model.{key}": 2 * value for key, value in state.items()}
        holder.load_state_dict(doubled)
        assert all(torch.equal(holder.state_dict()[key], value) for key, value in doubled.items())
    assert global_name("model.stages.1.model.model.layers.3.w") == "model.model.layers.3.w"
    assert global_name("stages.0.model.lm_head.weight") == "lm_head.weight"


@ranks(2)
def test_adapters_put_in_before_or_after_the_cut() -> None:
    from peft import LoraConfig, get_peft_model

    def with_adapters() -> Any:
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        return _filled(get_peft_model(model_of(), config))

    batch = batch_of(8)
    _, gradients = single(with_adapters(), batch)
    for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        model = pipelined(with_adapters(), name, 4)
        model(**batch).loss.backward()
        check_gradients(model, gradients, what=f"{name} wrapped")
        inside = pipelined(with_adapters().get_base_model(), name, 4)
        inside(**batch).loss.backward()
        plain = {key.removeprefix("base_model.model."): value for key, value in gradients.items()}
        check_gradients(inside, plain, what=f"{name} inside")


def _filled(model: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def test_layers_are_dealt_by_cost() -> None:
    even = tiny_model("llama", layers=8, vocab=16)
    anatomy = probe(even)
    assert balance(even, anatomy, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert sorted(end - start for start, end in balance(even, anatomy, 3)) == [2, 3, 3]
    # A head as large as two layers: the last stage has two layers less than the first.
    layer = sum(p.numel() for p in even.model.layers[0].parameters())
    heavy = tiny_model("llama", layers=8, vocab=2 * layer // 64)
    assert balance(heavy, probe(heavy), 2) == [(0, 5), (5, 8)]
    assert balance(heavy, probe(heavy), 2, [7, 1]) == [(0, 7), (7, 8)]
    shares = stage_shares(heavy, probe(heavy), [(0, 5), (5, 8)])
    assert sum(shares) == pytest.approx(1)
    assert shares[0] == pytest.approx(0.5, abs=0.01)
    # Of four experts two are used, so that a layer costs less than it holds.
    moe, plain = tiny_model("mixtral", layers=2), tiny_model("llama", layers=2)
    held = sum(p.numel() for p in moe.lm_head.parameters()) / sum(p.numel() for p in moe.parameters())
    assert stage_shares(moe, probe(moe), [(0, 1), (1, 2)])[1] - 0.5 > held / 2
    assert stage_shares(plain, probe(plain), [(0, 2)]) == [1.0]


@pytest.mark.parametrize("sizes", [[1, 1], [3], [4, 0], [2, 2, 0]])
def test_numbers_of_layers_that_do_not_fit_are_refused(sizes: list[int]) -> None:
    model = tiny_model("llama", layers=4)
    with pytest.raises(ConfigurationError, match="does not give 4 layers to 2 stages"):
        balance(model, probe(model), 2, sizes)


def test_fewer_layers_than_stages_are_refused() -> None:
    model = tiny_model("llama", layers=3)
    with pytest.raises(ModelError, match="3 layers cannot fill 4 pipeline stages"):
        balance(model, probe(model), 4)


def _broken(change: str) -> Any:
    from transformers.models.llama import modeling_llama as llama

    class Changed(llama.LlamaModel):
        def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
            hidden = self.embed_tokens(input_ids)
            rope = self.rotary_emb(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
            first = hidden
            for layer in self.layers:
                extra = {"skip": first} if change == "skip" else {}
                hidden = layer(hidden, position_embeddings=rope, **extra)
                if change == "between":
                    hidden = hidden * 2
                if change == "norm":
                    self.norm(hidden)
            if change == "again":
                hidden = self.layers[0](hidden, position_embeddings=rope)
            return llama.BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    class ChangedForCausalLM(llama.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = Changed(config)
            if change == "parameter":
                self.scale = nn.Parameter(torch.ones(3))

    # The result of a probe is kept per class and configuration, and these classes differ.
    return ChangedForCausalLM(tiny_config("llama", layers=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("between", "changes the hidden states between layers 0 and 1"),
        ("skip", "gives layer 0 more that is trained than the hidden states"),
        ("norm", r"calls model\.norm .*between the layers"),
        ("again", r"calls its layers in the order \[0, 1, 2, 0\]"),
        ("parameter", "has parameters of its own on ChangedForCausalLM"),
    ],
)
def test_models_that_a_split_would_compute_wrongly_are_refused(change: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        probe(_broken(change))


def test_layers_that_share_a_weight_are_refused() -> None:
    model = tiny_model("llama", layers=4)
    model.model.layers[3].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ModelError, match=r"a weight that model\.layers\.0 and model\.layers\.3 share"):
        probe(model)


def test_a_loss_with_an_auxiliary_part_is_not_taken_apart() -> None:
    config = tiny_config("mixtral")
    assert probe(tiny_model("mixtral")).counts_tokens
    config.output_router_logits = True
    from transformers import AutoModelForCausalLM

    assert not probe(AutoModelForCausalLM.from_config(config)).counts_tokens


def test_modules_that_are_no_hugging_face_model_are_refused() -> None:
    with pytest.raises(ModelError, match="Linear is no Hugging Face model and wraps none"):
        probe(nn.Linear(2, 2))


def test_stage_numbers_outside_the_pipeline_are_refused() -> None:
    model = tiny_model("llama", layers=4)
    with pytest.raises(ConfigurationError, match="there are 2 stages"):
        _stages(model, 2, [2])
    assert ScheduleSettings("ZBVZeroBubble", 4).stage_ids(1, 4) == [1, 6]
