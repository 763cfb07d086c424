"""Specification of the command line, and of the README's commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspore_exporter import __version__, cli, metrics

ROOT = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README.zh-CN.md")

CHECKED_ELSEWHERE = {
    "make demo": "tests/integration/test_demo_run.py runs the command behind it; the set-up is what `make test` itself uses",
    "make test": "this is it",
    "pip install .": "tests/unit/test_assets.py builds and unpacks the wheel; pip would fetch from a package index",
    "curl http://127.0.0.1:19440/metrics": "tests/unit/test_server.py asks the endpoint by sockets; no training runs here",
    "mindspore-exporter targets /shared/targets --serve 127.0.0.1:9099": "tests/unit/test_targets.py and"
    " tests/integration/test_targets_prometheus.py serve a directory; this one would not end",
}
"""Commands of the README that do not run in this file: why, and the check that stands for each."""


def commands(readme: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / readme).read_text(encoding="utf-8"), re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the README's commands name."""
    monkeypatch.chdir(tmp_path)
    yaml = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert yaml
    (tmp_path / "monitor.yaml").write_text(yaml.group(1))
    (tmp_path / "targets").mkdir(mode=0o755)
    return tmp_path


@pytest.mark.parametrize("readme", READMES)
def test_every_command_of_the_readme_runs_or_has_a_check_that_stands_for_it(
    readme: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = commands(readme)
    assert len(found) >= 8
    for command in found:
        if command in CHECKED_ELSEWHERE:
            continue
        words = command.replace("/shared/targets", str(workplace / "targets")).split()
        assert words[0] == "mindspore-exporter", f"{command}: neither run here nor listed with a reason"
        assert cli.main(words[1:]) == 0, command
        assert capsys.readouterr().out, command


def test_the_readmes_have_the_same_commands() -> None:
    assert commands("README.md") == commands("README.zh-CN.md")


def test_no_reason_is_given_for_a_command_that_is_gone() -> None:
    assert set(CHECKED_ELSEWHERE) <= set(commands("README.md"))


def test_the_command_line_works_without_mindspore() -> None:
    script = (
        "import sys; sys.modules['mindspore'] = None; from mindspore_exporter import cli;"
        "code = cli.main(['metrics']); print(len([m for m in sys.modules if m.startswith('mindspore.')])); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(ROOT / "exporter")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "0"), done.stderr


def test_the_catalogue_is_printed_as_markdown_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics"]) == 0
    table = capsys.readouterr().out
    assert cli.main(["metrics", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == set(metrics.CATALOGUE)
    assert all(f"| `{name}` |" in table for name in metrics.CATALOGUE)


def test_a_configuration_is_checked_and_what_differs_from_the_defaults_is_shown(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "monitor.yaml"]) == 0
    assert 'run: "llm-7b"' in capsys.readouterr().out
    (workplace / "bad.yaml").write_text("prt: 1\n")
    assert cli.main(["check", "bad.yaml"]) == 2
    assert "did you mean 'port'?" in capsys.readouterr().err


def test_every_key_is_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--reference"]) == 0
    table = capsys.readouterr().out
    for key in ("port", "baseline.from", "evaluation.every_steps", "thresholds", "discovery.directory"):
        assert f"| {key} |" in table


@pytest.mark.parametrize("command", ["check", "metrics", *cli.COMMANDS])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert "usage: mindspore-exporter" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == __version__
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()
