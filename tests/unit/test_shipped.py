"""Recipes and configs are found by name, in a checkout and in an installed wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lightning_swift._shipped import find_config, nearest, recipes, shipped_folder
from lightning_swift.errors import ConfigurationError

ROOT = Path(__file__).parents[2]


def test_every_recipe_says_what_it_is_for_and_what_was_measured():
    found = recipes()
    assert {recipe.name for recipe in found} >= {"quickstart", "sft_fsdp", "sft_hsdp"}
    for recipe in found:
        assert recipe.purpose
        assert recipe.measured, f"{recipe.path} has no `# measured:` line"
        assert len(recipe.purpose) <= 120


@pytest.mark.parametrize("spelling", ["sft_fsdp", "sft_fsdp.yaml", "recipes/sft_fsdp.yaml"])
def test_a_recipe_is_found_by_name_wherever_the_user_stands(spelling, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(spelling) == ROOT / "recipes" / "sft_fsdp.yaml"


def test_a_file_of_the_user_wins_over_a_recipe_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sft_fsdp").write_text("a: 1")
    assert find_config("sft_fsdp") == Path("sft_fsdp")


@pytest.mark.parametrize("spelling", ["sft_fdsp", "sft_fdsp.yaml", "recipes/sft_fdsp.yaml"])
def test_an_unknown_recipe_is_refused_with_the_nearest(spelling):
    with pytest.raises(ConfigurationError, match="'sft_fsdp'"):
        find_config(spelling)


def test_a_path_in_another_folder_is_no_name_of_a_recipe():
    with pytest.raises(ConfigurationError, match="neither a file"):
        find_config("elsewhere/sft_fsdp.yaml")


def test_nearest_always_answers():
    assert nearest("zzz", ["alpha", "beta"]) in {"alpha", "beta"}


def test_configs_are_shipped():
    assert (shipped_folder("configs") / "constraints-cpu.txt").is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling", reason="the wheel is built with hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_recipe_and_config_inside_the_package_and_nothing_else_beside_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names} == {"lightning_swift", "lightning_swift-0.1.0.dist-info"}
    for kind in ("recipes", "configs"):
        ours = {
            p.relative_to(ROOT / kind).as_posix() for p in (ROOT / kind).rglob("*") if p.suffix in (".yaml", ".txt")
        }
        ours = {name for name in ours if not name.startswith("quickstart/")}
        shipped = {
            name.removeprefix(f"lightning_swift/_shipped/{kind}/") for name in names if f"_shipped/{kind}/" in name
        }
        assert ours <= shipped
        assert not {name for name in shipped if name.endswith(".py")}
    assert not {name for name in names if "/.keep" in name or "__pycache__" in name}


def test_an_installed_wheel_lists_its_own_recipes(wheel, tmp_path):
    site = tmp_path / "site"
    # A wheel of one pure Python package is its own installed form.
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import sys, lightning_swift; from lightning_swift.cli import main; code = main(['recipes', '--json']); "
        "assert {'torch', 'lightning'}.isdisjoint(sys.modules); print(lightning_swift.__file__, file=sys.stderr); "
        "sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr.strip() == str(site / "lightning_swift" / "__init__.py")
    listed = json.loads(result.stdout)["recipes"]
    assert set(listed) == {recipe.name for recipe in recipes()}
    for entry in listed.values():
        assert Path(entry["path"]).is_relative_to(site / "lightning_swift" / "_shipped")
        assert Path(entry["path"]).is_file()


def test_an_editable_build_only_points_at_the_checkout(tmp_path):
    editable = pytest.importorskip("hatchling.build", reason="the wheel is built with hatchling")
    code = f"import hatchling.build as b; print(b.build_editable({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    assert editable
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        outside = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert len(outside) == 1
        assert outside[0].endswith(".pth")
        assert archive.read(outside[0]).decode().strip() == str(ROOT)
