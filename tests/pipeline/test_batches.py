"""Batches of every shape: exact, padded where they must be, and refused before any communication where they cannot."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_swift.errors import DataError, ModelError
from lightning_swift.parallel._pipeline_batch import Microbatch, prepare
from tests.harness.models import tiny_config
from tests.harness.ranks import ranks
from tests.pipeline.references import (
    LOSS,
    batch_of,
    check_gradients,
    check_step,
    model_of,
    pipelined,
    single,
    token_mean,
)


@ranks(2)
def test_rows_and_lengths_that_change_and_do_not_divide() -> None:
    reference, model = model_of(layers=7), pipelined(model_of(layers=7), "1F1B", 4)
    for rows, length in ((8, 16), (8, 9), (8, 31), (5, 12), (9, 16), (8, 16)):
        check_step(model, reference, batch_of(rows, length), what=f"{rows} x {length}")
    assert sorted(len(s.layers) for s in model.stages) in ([3], [4])
    # With several stages on a rank what was worked out for one shape serves the next.
    for name in ("Interleaved1F1B", "ZBVZeroBubble"):
        model = pipelined(model_of(layers=7), name, 2)
        for rows, length in ((4, 9), (3, 6), (4, 9)):
            check_step(model, reference, batch_of(rows, length), what=f"{name} {rows} x {length}")
        assert model.schedule_builds[0] == 3


@ranks(2)
def test_fewer_rows_than_microbatches_are_padded_and_told_once() -> None:
    reference, model = model_of(), pipelined(model_of(), "ZBVZeroBubble", 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in (1, 3, 2):
            check_step(model, reference, batch_of(rows, 12), what=f"{rows} rows")
    # Both ranks see it, and each says it once.
    assert [str(w.message)[:21] for w in told if "microbatches" in str(w.message)] == ["A batch has 1 rows fo"]


@ranks(2)
def test_lengths_are_padded_on_the_right() -> None:
    # Float64: another length rounds differently, and some gradients of an untrained OPT are hardly more than that.
    for kind in ("llama", "gpt2", "opt", "bloom"):
        reference = model_of(kind).double()
        model = pipelined(model_of(kind).double(), "1F1B", 2, loss_fn=token_mean)
        # As under sequence parallelism, but with whole hidden states between the stages.
        model._length_multiple = 8
        for mask in (True, False):
            check_step(model, reference, batch_of(4, 13, mask=mask), what=f"{kind} {mask}", loss_fn=token_mean)
        if kind == "llama":
            # Positions that are given once are padded with the rest.
            given = {**batch_of(4, 13), "position_ids": torch.arange(13)[None]}
            check_step(model, reference, given, what="positions", loss_fn=token_mean)


@ranks(2)
def test_packed_sequences_are_told_apart_by_their_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]])
    for kind in ("llama", "gemma3"):
        reference, model = model_of(kind), pipelined(model_of(kind), "1F1B", 2)
        batch = batch_of(4, 12, mask=False)
        given = {**batch, "position_ids": positions.repeat(2, 1)}
        check_step(model, reference, given, what=kind)
        # They matter: without them the result is another one.
        assert abs(float(single(reference, given)[0] - single(reference, batch)[0])) > 1e-3
        # One row of positions for all rows.
        check_step(model, reference, {**batch, "position_ids": torch.arange(12)[None]}, what=kind)


@ranks(2)
def test_other_arguments_are_cut_with_the_rows_and_unequal_counts_given_by_the_user_are_kept() -> None:
    reference, model = model_of(), pipelined(model_of(), "1F1B", 4)
    mask = torch.ones(8, 1, 16, 16).tril().bool()
    mask[::2, :, 8:, :8] = False
    check_step(model, reference, {**batch_of(8, mask=False), "attention_mask": mask}, what="4-d mask")
    check_step(model, reference, batch_of(), what="count", num_items_in_batch=torch.tensor(77))
    labels = batch_of()["labels"]
    shifted = {**batch_of(), "shift_labels": torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)}
    check_step(model, reference, shifted, what="shift_labels")


@ranks(2)
def test_a_batch_without_a_single_target_has_loss_and_gradients_of_zero() -> None:
    for name in ("1F1B", "ZBVZeroBubble"):
        model = pipelined(model_of(), name, 4)
        batch = batch_of(6)
        out = model(**{**batch, "labels": torch.full_like(batch["labels"], -100)})
        out.loss.backward()
        assert float(out.loss.detach()) == 0.0
        assert all(float(p.grad.abs().max()) == 0.0 for p in model.parameters())


@ranks(2)
def test_microbatches_with_no_label_at_all() -> None:
    reference, model = model_of(), pipelined(model_of(), "1F1B", 4)
    batch = batch_of()
    batch["labels"][:5] = -100
    check_step(model, reference, batch)


@ranks(2)
def test_missing_labels_are_refused_on_all_ranks_before_any_communication() -> None:
    model = pipelined(model_of(), "1F1B", 4)
    ids = batch_of()["input_ids"]
    with pytest.raises(DataError, match="no labels, which the loss needs"):
        model(input_ids=ids)
    refused: list[Any] = [None, None]
    dist.all_gather_object(refused, True)
    # The pipeline is as good as before.
    model(**batch_of()).loss.backward()


@ranks(2)
def test_a_schedule_is_built_once_per_shape_and_quickly() -> None:
    for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        builder = pipelined(model_of(), name, 64)._built()
        seconds = []
        for length in (8, 9, 10, 11, 12):
            before = builder.build_seconds
            assert builder.get(1, length) is builder.get(1, length)
            seconds.append(builder.build_seconds - before)
        assert builder.builds == 5
        # The best of five, as other processes take the processor too. Torch works out the order of 64 interleaved
        # microbatches in 20 ms, and only the first shape pays for that.
        assert min(seconds) < 0.005, f"{name}: {min(seconds):.4f} s"


def _prepare(arguments: dict[str, Any], **kwargs: Any) -> Any:
    batch = {**batch_of(4, 8), **arguments}
    settings = {"microbatches": 2, "length_multiple": 1, "config": tiny_config(), **kwargs}
    return prepare(batch.pop("input_ids"), batch, **settings)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"past_key_values": object()}, "past_key_values"),
        ({"inputs_embeds": torch.zeros(4, 8, 2)}, "inputs_embeds=tensor of shape [4, 8, 2]"),
        ({"use_cache": True}, "use_cache=True"),
        ({"output_hidden_states": True}, "output_hidden_states=True"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"output_router_logits": True}, "output_router_logits=True"),
        ({"logits_to_keep": 1}, "logits_to_keep=1"),
        ({"logits_to_keep": torch.tensor([0])}, "logits_to_keep=tensor"),
        ({"return_dict": False}, "return_dict=False"),
        ({"attention_mask": {"full": None}}, "attention_mask='dict'"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=re.escape(named) + ".* does not work on pipeline stages"):
        _prepare(arguments)


def test_router_logits_of_the_configuration_are_refused_unless_the_call_says_no() -> None:
    config = tiny_config("mixtral")
    config.output_router_logits = True
    with pytest.raises(ModelError, match=r"config\.output_router_logits=True"):
        _prepare({}, config=config)
    assert "output_router_logits" not in _prepare({"output_router_logits": False}, config=config).keywords()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(8, dtype=torch.long)}, r"input_ids have shape \[8\]"),
        ({"input_ids": None}, "input_ids have none"),
        ({"labels": torch.zeros(4, 7, dtype=torch.long)}, r"labels have shape \[4, 7\], and input_ids \[4, 8\]"),
        ({"position_ids": torch.zeros(3, 4, 8)}, r"position_ids of shape \[3, 4, 8\] cannot be cut by rows"),
    ],
)
def test_tensors_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _prepare(arguments)
    with pytest.raises(DataError, match="one token"):
        prepare(
            torch.ones(2, 1, dtype=torch.long),
            {"labels": torch.ones(2, 1, dtype=torch.long)},
            microbatches=1,
            length_multiple=1,
            config=tiny_config(),
        )


def test_a_mask_that_has_no_place_for_padding_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be padded to the length"):
        _prepare({"attention_mask": torch.ones(4, 1, 8, 8)}, length_multiple=3)


def test_the_copies_of_rows_and_positions_have_no_labels() -> None:
    batch = _prepare({}, microbatches=3, length_multiple=5)
    assert batch.inputs.shape == (6, 10)
    assert (batch.labels[4:] == -100).all()
    assert (batch.labels[:, 8:] == -100).all()
    assert (batch.by_row["attention_mask"][:, 8:] == 0).all()
    plain = batch_of(4, 8)["labels"]
    assert int(batch.targets.sum()) == int((plain[:, 1:] != -100).sum())
    first = Microbatch.of(batch.microbatches()[0][1])
    assert float(first.share()) == float(batch.targets[0] / batch.targets.sum())


@ranks(2)
def test_counts_and_gradients_of_uneven_microbatches_do_not_depend_on_their_number() -> None:
    reference = model_of()
    batch = batch_of(8)
    loss, gradients = single(reference, batch)
    for microbatches in (2, 4, 8):
        model = pipelined(model_of(), "GPipe", microbatches)
        out = model(**batch)
        out.loss.backward()
        assert abs(float(out.loss.detach() - loss)) < LOSS
        check_gradients(model, gradients, what=f"{microbatches} microbatches")
