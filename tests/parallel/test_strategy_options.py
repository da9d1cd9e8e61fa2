"""Options of the strategy: what they do, and what is refused before anything is loaded."""

from __future__ import annotations

import ctypes
import inspect
import platform
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models.lazy import lazy_pretrained
from lightning_swift.parallel import memory
from lightning_swift.parallel.agreement import copy_from_first_rank
from lightning_swift.parallel.checkpointing import CheckpointingSettings
from lightning_swift.parallel.mesh import MeshSizes, build_mesh
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import Tokens, UserModule, quiet_trainer, save_tiny_model, tiny_model
from tests.harness.ranks import ranks, run_ranks
from tests.parallel.references import PlainModule, fit


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"precision": "16-mixed"}, ("precision", "16-mixed", "bf16-mixed")),
        ({"reduce_dtype": "float16"}, ("reduce_dtype", "float16")),
        ({"precision": "32-true", "reduce_dtype": "bfloat16"}, ("precision='32-true'", "reduce_dtype='bfloat16'")),
        ({"compile": "inducter"}, ("inducter", "inductor")),
        ({"reshard_after_forward": "never"}, ("reshard_after_forward", "never")),
        ({"return_freed_memory": "always"}, ("return_freed_memory", "always")),
        ({"block_classes": []}, ("block_classes",)),
        ({"timeout": 0}, ("timeout",)),
        ({"timeout": -1.0}, ("timeout",)),
    ],
)
def test_values_that_are_not_allowed_are_named(options: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        FSDPBF16Strategy(**options)
    assert all(part in str(caught.value) for part in named), str(caught.value)


def test_every_option_is_readable_by_a_configuration_file() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    text = {
        "precision": "bf16-true",
        "data_parallel_shard": "auto",
        "data_parallel_replicate": 2,
        "reduce_dtype": "bfloat16",
        "cpu_offload": True,
        "reshard_after_forward": "auto",
        "return_freed_memory": False,
        "accumulate_without_sync": True,
        "compile": "aot_eager",
        "block_classes": ["LlamaDecoderLayer"],
        "process_group_backend": "gloo",
        "timeout": 60,
        "lora": {"r": 4, "target_modules": ["q_proj"]},
        "quantization": None,
        "save_frozen": True,
    }
    assert set(text) == set(inspect.signature(FSDPBF16Strategy).parameters)
    path = "lightning_swift.strategies.fsdp.FSDPBF16Strategy"
    config = parser.parse_object({"strategy": {"class_path": path, "init_args": text}})
    strategy = parser.instantiate(config).strategy
    assert strategy.options.block_classes == ("LlamaDecoderLayer",)
    assert strategy._timeout.total_seconds() == 60
    assert strategy.process_group_backend == "gloo"


@ranks(2)
def test_block_classes_that_do_not_exist_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    module = Lazy(save_once(tmp_path))
    with pytest.raises(ConfigurationError, match="Did you mean 'LlamaDecoderLayer'"):
        fit(module, FSDPBF16Strategy(block_classes=["LlamaDecoder"]), steps=1)
    assert all(p.is_meta for p in module.parameters())


@ranks(2)
def test_compile_without_blocks_is_refused_and_no_blocks_alone_is_a_warning() -> None:
    with pytest.raises(ConfigurationError, match="aot_eager"):
        fit(NoBlocks(), FSDPBF16Strategy(compile="aot_eager"), steps=1)
    with pytest.warns(UserWarning, match="no repeated blocks") if dist.get_rank() == 0 else nullcontext():
        fit(NoBlocks(), FSDPBF16Strategy(), steps=1)


@ranks(1)
def test_a_module_that_shards_itself_is_refused() -> None:
    module = UserModule()
    module.configure_model()
    fully_shard(module.model)
    with pytest.raises(ModelError, match="fully_shard already"):
        fit(module, FSDPBF16Strategy(), steps=1)


@ranks(1)
def test_a_module_set_up_with_other_options_is_refused() -> None:
    module, _ = fit(UserModule(), FSDPBF16Strategy(), steps=1)
    with pytest.raises(ModelError, match="32-true"):
        fit(module, FSDPBF16Strategy("32-true"), steps=1)


class NoBlocks(PlainModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Tanh()


class Lazy(UserModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder

    def configure_model(self) -> None:
        if self.model is None:
            self.model = lazy_pretrained(self.path).train()


def save_once(folder: Path) -> Path:
    if dist.get_rank() == 0:
        save_tiny_model(folder)
    dist.barrier()
    return folder


@ranks(2)
def test_lazy_weights_train_like_loaded_ones(tmp_path: Path) -> None:
    folder = save_once(tmp_path)
    expected = fit(UserModule(folder=str(folder)), FSDPBF16Strategy(), steps=4)[0].losses
    for options in ({}, {"cpu_offload": True, "compile": "aot_eager"}):
        assert fit(Lazy(folder), FSDPBF16Strategy(**options), steps=4)[0].losses == expected


@ranks(2)
def test_activation_checkpointing_has_its_place_in_the_order() -> None:
    expected = fit(UserModule(), FSDPBF16Strategy(), steps=4)[0].losses
    for options in ({}, {"compile": "aot_eager"}):
        strategy = FSDPBF16Strategy(**options)
        strategy.activation_checkpointing = CheckpointingSettings("full")
        module = fit(UserModule(), strategy, steps=4)[0]
        assert module.losses == expected, options
        # Equal losses alone would also come of doing nothing.
        assert all("forward" in vars(block) for block in module.model.model.layers)


class DiffersByRank(UserModule):
    """A model that each rank initialises with a seed of its own, with a buffer of every awkward kind."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_model(seed=dist.get_rank())
            self.register_buffer("flag", torch.tensor(dist.get_rank() == 0))
            self.register_buffer("turned", torch.full((2, 3), float(dist.get_rank())).t())
            self.register_buffer("coarse", torch.full((3,), dist.get_rank(), dtype=torch.bfloat16))
            self.register_buffer("empty", torch.zeros(0))


@ranks(4)
def test_ranks_that_build_different_models_train_that_of_the_first() -> None:
    for options in ({}, {"data_parallel_replicate": 2}):
        module, _ = fit(DiffersByRank(), FSDPBF16Strategy("32-true", **options), steps=0)
        trainer_free = tiny_model(seed=0)
        for name, parameter in module.model.named_parameters():
            assert torch.equal(parameter.full_tensor(), trainer_free.get_parameter(name)), name
        assert bool(module.flag)
        assert module.turned.abs().sum() == 0
        assert module.coarse.float().sum() == 0


@ranks(2)
def test_empty_weights_are_not_sent() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    copy_from_first_rank(model, build_mesh(MeshSizes(dp_shard=2), "cpu"), torch.device("cpu"))
    assert model.weight.is_meta


@ranks(2)
def test_offloaded_shards_and_moments_live_in_host_memory_and_teardown_moves_nothing() -> None:
    module, _ = fit(UserModule(), FSDPBF16Strategy(cpu_offload=True), steps=1)
    assert all(isinstance(p, DTensor) for p in module.parameters())
    assert all(isinstance(block, FSDPModule) for block in module.model.model.layers)
    assert module.device == torch.device("cpu")


@ranks(4)
def test_each_rank_gets_its_share_of_the_data_and_knows_its_mesh() -> None:
    class Looks(UserModule):
        def on_train_start(self) -> None:
            self.mesh_shape = self.device_mesh["dp_replicate", "dp_shard"].shape
            sampler = self.trainer.train_dataloader.sampler
            self.share = (sampler.num_replicas, sampler.rank)

    module = Looks()
    trainer = quiet_trainer(
        strategy=FSDPBF16Strategy(data_parallel_replicate=2), max_steps=1, use_distributed_sampler=True
    )
    trainer.fit(module, torch.utils.data.DataLoader(Tokens(), batch_size=2))
    assert module.mesh_shape == (2, 2)
    assert module.share == (4, dist.get_rank())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_large_freed_blocks_go_back_to_the_system_and_the_end_of_the_heap_does_not() -> None:
    script = """
        import ctypes, os, resource
        from lightning_swift.parallel.memory import return_freed_memory, returning_freed_memory

        def anonymous():
            text = open("/proc/self/status").read()
            return int(text.split("RssAnon:")[1].split()[0])

        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]

        def grow_and_free():
            # One big free raises the threshold (32 MiB is its limit); then blocks below a live one stay in the heap.
            libc.free(libc.malloc(24 << 20))
            blocks = [libc.malloc(20 << 20) for _ in range(10)]
            for block in blocks:
                ctypes.memset(block, 1, 20 << 20)
            for block in blocks[:-1]:
                libc.free(block)
            return anonymous()

        def faults(size):
            # Of 40 MiB that are taken and freed again and again, once they have been there.
            libc.malloc_trim(0)
            for _ in range(2):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                blocks = [libc.malloc(size) for _ in range((40 << 20) // size)]
                for block in blocks:
                    ctypes.memset(block, 1, size)
                for block in blocks:
                    libc.free(block)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        if os.environ["RETURN"] == "1":
            assert return_freed_memory()
        print(grow_and_free())
        if os.environ["RETURN"] == "1":
            # Below the threshold from which blocks are mapped: those of a step.
            print(faults(750 << 10))
            with returning_freed_memory(afterwards=True):
                print(faults(750 << 10))
            print(faults(750 << 10))
            with returning_freed_memory():
                pass
            print(faults(20 << 20))
    """
    used, faults = {}, []
    for value in ("0", "1"):
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env={"RETURN": value, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        used[value], *faults = (int(line) for line in result.stdout.split())
    # Nine blocks of 20 MiB were freed.
    assert used["0"] - used["1"] > 150 << 10, used
    kept, loading, again, usual = faults
    # While a model loads every page goes back and is faulted in again; at all other times none is.
    assert max(kept, again, usual) * 10 < loading, faults


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.parametrize(("option", "world", "expected"), [("auto", 2, 1), ("auto", 1, 0), (False, 2, 0), (True, 1, 1)])
def test_freed_memory_is_returned_where_ranks_share_host_memory(option: Any, world: int, expected: int) -> None:
    calls = run_ranks(_count_returns, world, (option,))
    assert calls == expected


def _count_returns(option: Any) -> int:
    from lightning_swift.strategies import _mesh

    calls: list[int] = []
    original = _mesh.return_freed_memory
    _mesh.return_freed_memory = lambda: calls.append(1) or original()
    trainer = quiet_trainer(strategy=FSDPBF16Strategy(return_freed_memory=option), max_steps=1)
    trainer.fit(UserModule(layers=1), torch.utils.data.DataLoader(Tokens(4), batch_size=2))
    return len(calls)


def test_elsewhere_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.return_freed_memory()
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    assert not memory.return_freed_memory()
    assert ctypes.CDLL is not None
