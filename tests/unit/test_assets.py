"""The shipped files: the same bytes in the checkout, in the wheel and where `assets` writes them."""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from mindspore_exporter import assets
from mindspore_exporter.errors import AssetError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = PurePosixPath("prometheus/prometheus.yml")


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    assets.add_arguments(parser)
    return assets.main(parser.parse_args(arguments))


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_shipped_file_is_written_as_it_is_in_the_checkout(tmp_path: Path) -> None:
    assert run("--out", str(tmp_path / "new" / "folder")) == 0
    written = files_below(tmp_path / "new" / "folder")
    assert str(CONFIG) in written
    assert all((ROOT / name).read_bytes() == data for name, data in written.items())


def test_written_files_are_readable_by_everybody_and_nothing_else_is_left(tmp_path: Path) -> None:
    run("--out", str(tmp_path))
    assert stat.S_IMODE((tmp_path / CONFIG).stat().st_mode) == 0o644
    assert {PurePosixPath(name) for name in files_below(tmp_path)} == set(assets.assets())


def test_second_time_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--out", str(tmp_path))
    inode = (tmp_path / CONFIG).stat().st_ino
    capsys.readouterr()
    assert run("--out", str(tmp_path)) == 0
    assert (tmp_path / CONFIG).stat().st_ino == inode
    assert f"unchanged  {tmp_path / CONFIG}" in capsys.readouterr().out


def test_changed_file_is_kept_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--out", str(tmp_path))
    (tmp_path / CONFIG).write_text("mine")
    capsys.readouterr()
    assert run("--out", str(tmp_path)) == 1
    assert (tmp_path / CONFIG).read_text() == "mine"
    assert f"kept       {tmp_path / CONFIG} (differs" in capsys.readouterr().out


def test_changed_file_is_overwritten_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--out", str(tmp_path))
    (tmp_path / CONFIG).write_text("mine")
    capsys.readouterr()
    assert run("--out", str(tmp_path), "--force") == 0
    assert (tmp_path / CONFIG).read_bytes() == (ROOT / CONFIG).read_bytes()
    assert f"written    {tmp_path / CONFIG}" in capsys.readouterr().out


def test_file_in_the_place_of_a_folder_is_one_readable_error(tmp_path: Path) -> None:
    (tmp_path / "prometheus").write_text("a file")
    with pytest.raises(AssetError, match="prometheus"):
        run("--out", str(tmp_path))


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, really built (in a copy of the sources, so that nothing is left in the checkout) and unpacked."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("exporter", "prometheus", "grafana"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = out.glob("mindspore_exporter-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "unpacked")
    return out / "unpacked"


def test_wheel_holds_the_shipped_files_byte_by_byte(unpacked_wheel: Path) -> None:
    shipped = {str(path): data for path, data in assets.assets().items()}
    assert files_below(unpacked_wheel / "mindspore_exporter" / "assets") == shipped


def test_wheel_is_marked_as_typed_and_holds_every_module(unpacked_wheel: Path) -> None:
    modules = {path.name for path in (ROOT / "exporter" / "mindspore_exporter").glob("*.py")}
    assert modules | {"py.typed"} <= {path.name for path in (unpacked_wheel / "mindspore_exporter").iterdir()}


def test_installed_package_writes_the_files_without_a_checkout(unpacked_wheel: Path, tmp_path: Path) -> None:
    program = (
        "import argparse, sys; from mindspore_exporter import assets; parser = argparse.ArgumentParser();"
        " assets.add_arguments(parser); print(assets.asset_root()); sys.exit(assets.main(parser.parse_args()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "--out", str(tmp_path / "out")],
        cwd=tmp_path,
        check=True,
        env={**os.environ, "PYTHONPATH": str(unpacked_wheel)},
        capture_output=True,
        text=True,
    )
    assert result.stdout.splitlines()[0] == str(unpacked_wheel / "mindspore_exporter" / "assets")
    assert (tmp_path / "out" / CONFIG).read_bytes() == (ROOT / CONFIG).read_bytes()
