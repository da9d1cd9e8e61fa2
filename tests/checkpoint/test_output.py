"""Where outputs may be written: never into a checkpoint, and over an earlier export only when that is asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_swift.checkpoint.export import export_checkpoint
from lightning_swift.checkpoint.faults import FAULT_VARIABLE
from lightning_swift.checkpoint.merge import merge_checkpoint
from lightning_swift.checkpoint.output import POINT_BEFORE_COMMIT, POINT_BETWEEN_RENAMES, check_output, fresh_folder
from lightning_swift.errors import ExportError
from tests.harness.checkpoints import save_checkpoint, small_checkpoint

EXPORT = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
REPLACE = (
    "import sys; from pathlib import Path; from lightning_swift.checkpoint.output import fresh_folder\n"
    "with fresh_folder(Path(sys.argv[1]), overwrite=True) as folder: (folder / 'model.safetensors').write_text('new')"
)


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def export(folder: Path, *names: str, content: str = "old") -> Path:
    folder.mkdir()
    for name in names or EXPORT:
        (folder / name).write_text(content)
    return folder


def replace(output: Path, content: str = "new") -> None:
    with fresh_folder(output, overwrite=True) as folder:
        (folder / "model.safetensors").write_text(content)


def weights(folder: Path) -> str:
    return (folder / "model.safetensors").read_text()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("place", ["a.ckpt/out", "a.ckpt/deep/er/out", "link/out", "link", "a.ckpt", ".", "a.ckpt/m"])
def test_a_checkpoint_is_never_written_into(place: str, overwrite: bool, tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "a.ckpt")
    (tmp_path / "link").symlink_to("a.ckpt")
    # An empty folder or an earlier export in the checkpoint makes no difference.
    (checkpoint / "m").mkdir()
    before = tree(tmp_path)
    with pytest.raises(ExportError, match=r"lies in the checkpoint .*a\.ckpt, which|here already"):
        check_output(tmp_path / place, overwrite=overwrite)
    (checkpoint / "m").rmdir()
    for make in (merge_checkpoint, export_checkpoint):
        # The module of this checkpoint cannot be exported at all, which is said first.
        with pytest.raises(ExportError, match=r"lies in the checkpoint|here already|no Hugging Face model"):
            make(checkpoint, tmp_path / place, overwrite=overwrite)
    assert tree(tmp_path) == [name for name in before if name != "a.ckpt/m"]


def test_an_export_does_not_go_into_its_checkpoint(tmp_path: Path) -> None:
    def companions(folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    checkpoint = tmp_path / "plain"
    save_checkpoint(checkpoint, {}, companions=companions, huggingface="model")
    before = tree(tmp_path)
    with pytest.raises(ExportError, match="lies in the checkpoint"):
        export_checkpoint(checkpoint, checkpoint / "out", verify=False)
    assert tree(tmp_path) == before


def test_a_checkpoint_that_is_yet_to_be_saved_is_known_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"lies in the checkpoint .*step-2\.ckpt"):
        check_output(tmp_path / "runs/step-2.ckpt/out")
    check_output(tmp_path / "runs/out.ckpt")
    assert tree(tmp_path) == []


def test_an_earlier_export_is_replaced_when_asked(tmp_path: Path) -> None:
    output = export(tmp_path / "out")
    with pytest.raises(ExportError, match=r"here already.*overwrite=True"), fresh_folder(output):
        pass
    assert weights(output) == "old"
    replace(output)
    replace(tmp_path / "first")
    assert tree(tmp_path) == ["first", "first/model.safetensors", "out", "out/model.safetensors"]
    assert weights(output) == "new"


@pytest.mark.parametrize("names", [("model-00001-of-00002.safetensors", "model.safetensors.index.json")])
def test_other_exports_are_known_too(names: tuple[str, ...], tmp_path: Path) -> None:
    check_output(export(tmp_path / "sharded", *names), overwrite=True)
    check_output(export(tmp_path / "adapter", "adapter_model.safetensors", "adapter_config.json"), overwrite=True)


@pytest.mark.parametrize("extra", ["notes.txt", "deep/", "->model.safetensors", ".hidden", "other.safetensors"])
def test_what_is_more_than_an_export_is_kept(extra: str, tmp_path: Path) -> None:
    output = export(tmp_path / "out")
    if extra.endswith("/"):
        (output / extra).mkdir()
    elif extra.startswith("->"):
        (output / "vocab.json").symlink_to(extra[2:])
    else:
        (output / extra).touch()
    before = tree(tmp_path)
    with pytest.raises(ExportError, match="not an earlier export and nothing else"):
        replace(output)
    assert tree(tmp_path) == before
    assert weights(output) == "old"


def test_what_is_no_export_is_kept(tmp_path: Path) -> None:
    export(tmp_path / "no-weights", "config.json")
    (tmp_path / "file").touch()
    export(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    before = tree(tmp_path)
    for name in ("no-weights", "file", "link"):
        with pytest.raises(ExportError, match="not an earlier export"):
            replace(tmp_path / name)
    assert tree(tmp_path) == before


def test_a_block_that_raises_keeps_the_earlier_export(tmp_path: Path) -> None:
    output = export(tmp_path / "out")
    with pytest.raises(RuntimeError, match="wrong logits"), fresh_folder(output, overwrite=True):
        raise RuntimeError("wrong logits")
    assert tree(tmp_path) == ["out", *sorted(f"out/{name}" for name in EXPORT)]


def test_files_that_are_added_meanwhile_are_kept(tmp_path: Path) -> None:
    output = export(tmp_path / "out")

    def write() -> None:
        with fresh_folder(output, overwrite=True) as folder:
            (folder / "model.safetensors").touch()
            (output / "notes.txt").touch()

    with pytest.raises(ExportError, match="not an earlier export"):
        write()
    assert weights(output) == "old"


@pytest.mark.parametrize("point", [POINT_BEFORE_COMMIT, POINT_BETWEEN_RENAMES])
def test_a_failure_puts_the_earlier_export_back(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = export(tmp_path / "out")
    monkeypatch.setenv(FAULT_VARIABLE, f"{point}:0:raise")
    with pytest.raises(OSError, match="fault injected"):
        replace(output)
    assert tree(tmp_path) == ["out", *sorted(f"out/{name}" for name in EXPORT)]


@pytest.mark.parametrize("point", [POINT_BEFORE_COMMIT, POINT_BETWEEN_RENAMES])
def test_a_crash_leaves_the_earlier_export_and_the_next_call_goes_on(point: str, tmp_path: Path) -> None:
    output = export(tmp_path / "out")
    env = {**os.environ, FAULT_VARIABLE: f"{point}:0:kill"}
    done = subprocess.run([sys.executable, "-c", REPLACE, output], env=env, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    between = point == POINT_BETWEEN_RENAMES
    assert weights(tmp_path / (".out.replaced" if between else "out")) == "old"
    # The next fit looks at its start, without overwriting: then the earlier export is in the way again.
    with pytest.raises(ExportError, match="here already"):
        check_output(output)
    assert weights(output) == "old"
    replace(output)
    assert tree(tmp_path) == ["out", "out/model.safetensors"]
    assert weights(output) == "new"


def test_a_crash_before_the_earlier_export_is_deleted_leaves_the_new_one(tmp_path: Path) -> None:
    output = export(tmp_path / "out", "model.safetensors", content="new")
    export(tmp_path / ".out.replaced")
    check_output(output, overwrite=True)
    assert tree(tmp_path) == ["out", "out/model.safetensors"]
    assert weights(output) == "new"


def test_a_foreign_folder_under_the_name_of_a_replaced_one_is_kept(tmp_path: Path) -> None:
    output = export(tmp_path / "out")
    export(tmp_path / ".out.replaced", "precious")
    with pytest.raises(OSError, match="not empty"):
        replace(output)
    assert weights(output) == "old"
    assert (tmp_path / ".out.replaced/precious").exists()
