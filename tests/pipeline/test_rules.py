"""Rules of schedules: where stages lie, and what is refused without a word between ranks."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch.distributed as dist

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.parallel.anatomy import probe
from lightning_swift.parallel.pipeline import PipelinedModel
from lightning_swift.parallel.schedule import ScheduleName, ScheduleSettings
from lightning_swift.parallel.stages import cut
from tests.harness.models import tiny_config
from tests.harness.ranks import ranks
from tests.pipeline.references import batch_of, check_step, model_of, pipelined, token_mean


@pytest.mark.parametrize("name", get_args(ScheduleName))
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_every_stage_is_on_one_rank(name: ScheduleName, pp: int) -> None:
    settings = ScheduleSettings.default(name, pp)
    held = [settings.stage_ids(rank, pp) for rank in range(pp)]
    assert sorted(number for numbers in held for number in numbers) == list(range(settings.n_stages(pp)))
    for rank, numbers in enumerate(held):
        assert numbers == sorted(numbers)
        assert [settings.rank_of(number, pp) for number in numbers] == [rank] * len(numbers)
    if pp > 1:
        settings.check(pp)


@pytest.mark.parametrize(
    ("settings", "pp", "message"),
    [
        (("1F1B", 3), 4, "1F1B needs at least as many microbatches as stages, and has 3 for 4"),
        (("DualPipeV", 7), 4, "at least two microbatches per rank, and has 7 for 4 ranks"),
        (("Interleaved1F1B", 5), 2, "runs 5 microbatches on 2 ranks in 2 rounds"),
        (("InterleavedZeroBubble", 9), 4, "in 2 rounds, which does not divide"),
        (("GPipe", 4, 2), 2, "GPipe has one stage per rank, and virtual_stages=2"),
        (("1F1B", 4, 2), 2, "1F1B has one stage per rank"),
        (("ZBVZeroBubble", 4, 1), 2, "two stages per rank, and virtual_stages=1"),
        (("DualPipeV", 8, 4), 2, "two stages per rank, and virtual_stages=4"),
        (("ZBVZeroBubble", 4), 1, "on one rank has nothing to overlap"),
    ],
)
def test_rules_of_schedules(settings: tuple[Any, ...], pp: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ScheduleSettings(*settings).check(pp)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("2F2B", 4), "schedule='2F2B' is not known"),
        (("1F1B", 0), "microbatches=0"),
        (("Interleaved1F1B", 4, 0), "virtual_stages=0"),
    ],
)
def test_values_that_are_not_allowed(settings: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ScheduleSettings(*settings)


def test_the_bubble_is_that_of_the_literature() -> None:
    assert ScheduleSettings("1F1B", 8).bubble(4) == pytest.approx(3 / 11)
    assert ScheduleSettings("GPipe", 8).bubble(4) == pytest.approx(3 / 11)
    assert ScheduleSettings("Interleaved1F1B", 8).bubble(4) == pytest.approx(3 / 19)
    assert ScheduleSettings("InterleavedZeroBubble", 8).bubble(4) < 3 / 19
    assert ScheduleSettings("1F1B", 1).bubble(1) == 0.0
    assert ScheduleSettings.default("1F1B", 4).microbatches == 16
    assert ScheduleSettings.default("1F1B", 1).microbatches == 1


@ranks(2)
def test_a_pipeline_that_breaks_a_rule_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigurationError, match="has one stage per rank"):
        pipelined(model_of(), "GPipe", 4, virtual_stages=2)
    config = tiny_config("mixtral", layers=4)
    config.output_router_logits = True
    from transformers import AutoModelForCausalLM

    with pytest.raises(ModelError, match="no plain mean over tokens"):
        pipelined(AutoModelForCausalLM.from_config(config), "1F1B", 4)
    model = pipelined(AutoModelForCausalLM.from_config(config), "1F1B", 4, loss_fn=token_mean)
    with pytest.raises(ModelError, match=r"config\.output_router_logits=True"):
        model(**batch_of())
    dist.barrier()


@ranks(2)
def test_a_pipeline_of_one_rank_and_three_virtual_stages() -> None:
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    batch, reference = batch_of(7), model_of()
    for name, microbatches in (("1F1B", 1), ("1F1B", 3), ("GPipe", 2), ("Interleaved1F1B", 2)):
        check_step(pipelined(model_of(), name, microbatches, group=group), reference, batch, what=name)
    reference = model_of(layers=6, tie=True)
    model = pipelined(model_of(layers=6, tie=True), "Interleaved1F1B", 4, virtual_stages=3)
    assert [len(stage.layers) for stage in model.stages] == [1, 1, 1]
    check_step(model, reference, batch, what="three")


def test_stages_and_models_can_be_told_apart() -> None:
    model = model_of()
    stages = cut(model, probe(model), [(0, 2), (2, 4)], [0])
    assert (stages[0].first, stages[0].last, stages[0].bounds) == (True, False, (0, 2))
    assert stages[0].pretrained is model
    assert stages[0].layers == list(model.model.layers[:2])
    assert issubclass(PipelinedModel, type(stages[0]).__mro__[1])
