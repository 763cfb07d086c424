"""`make bench`: what the callback costs, against other monitors. Prints the tables; `--write` puts them into README.md here.

Every figure is compared with its bar; a missed bar says so, and by how much.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("README.md")
OURS = "PrometheusMonitor"
MEASUREMENT_SECONDS = 900
"""What one measurement may take before it is taken for hung."""

Case = tuple[str, str]
"""Mode and model."""
Results = dict[str, dict[Case, dict[str, Any]]]

FULL: dict[str, dict[Case, tuple[int, int]]] = {
    "compare": {("graph", "1 ms"): (40, 250), ("pynative", "1 ms"): (10, 24), ("graph", "50 ms"): (10, 14),
                ("pynative", "50 ms"): (8, 10)},
    "cost": {("graph", "1 ms"): (40, 1000), ("graph", "50 ms"): (44, 40), ("pynative", "50 ms"): (12, 24)},
    "latency": {("graph", "1 ms"): (1, 15_000), ("graph", "50 ms"): (1, 400), ("pynative", "50 ms"): (1, 200)},
    "conversions": {("graph", "1 ms"): (1, 200), ("pynative", "1 ms"): (1, 60)},
    "endurance": {("graph", "1 ms"): (1, 200_000)},
}  # fmt: skip
QUICK: dict[str, dict[Case, tuple[int, int]]] = {
    "compare": {("graph", "1 ms"): (3, 60), ("pynative", "1 ms"): (2, 6), ("graph", "50 ms"): (2, 5),
                ("pynative", "50 ms"): (2, 4)},
    "cost": {("graph", "1 ms"): (3, 300), ("graph", "50 ms"): (2, 20), ("pynative", "50 ms"): (2, 10)},
    "latency": {("graph", "1 ms"): (1, 1000), ("graph", "50 ms"): (1, 40), ("pynative", "50 ms"): (1, 20)},
    "conversions": {("graph", "1 ms"): (1, 60), ("pynative", "1 ms"): (1, 30)},
    "endurance": {("graph", "1 ms"): (1, 2000)},
}  # fmt: skip
"""Rounds (pairs) and steps of a block, by measurement and case."""

HEAD = """\
Hook times are those of the step's two hooks on the training thread, less what the timer itself takes (its median). Blocks
of steps alternate between the monitors, in an order that is drawn anew each round; *added* is the median over the rounds of
the difference between the median steps of a block and of the block without a monitor in the same round, its interval 95 %
by bootstrap over the rounds. The first step of a block (the first of all compiles) and a whole first round (in it the 20
reads that are proven) are left out. A mode's "1 ms" and "50 ms" are names of models: the step that was measured stands
beside. The machine is small, shared and noisy: read the intervals, and trust no p99 more than its machine."""


COST_HEAD = (
    "| model | throughput with : without (95 % interval) | pairs x steps | scrapes | records/s | CPU a record"
    " | CPU of a core | idle | step, median with / without | step, p99 with / without | dropped |"
)
CPU = """\
A scrape each second in the blocks with the exporter. CPU is that of all the exporter's threads; *idle* is what they take in
the blocks without, where they are there and do nothing."""


@dataclass(frozen=True)
class Bar:
    """One figure against its limit. `value` is None where it could not be measured."""

    name: str
    limit: float
    value: float | None
    unit: str
    digits: int = 1

    def row(self) -> str:
        """Line of the table: held, or missed by how much."""
        limit = f"{self.limit:.{self.digits}f}".rstrip("0").rstrip(".") if self.digits else f"{self.limit:.0f}"
        if self.value is None:
            return f"| {self.name} | {limit} {self.unit} | not measured | **not shown** |"
        seen = f"{self.value:.{self.digits}f} {self.unit}"
        if self.value <= self.limit:
            return f"| {self.name} | {limit} {self.unit} | {seen} | held |"
        by = f"{self.value - self.limit:.{self.digits}f} {self.unit}".strip()
        return f"| {self.name} | {limit} {self.unit} | {seen} | **missed by {by}** |"


def measure(name: str, case: Case, rounds: int, steps: int) -> dict[str, Any]:
    """Run one measurement in a process of its own. Raises SystemExit with its output where it fails."""
    mode, size = case
    print(f"{name}: {size} model, {mode} mode, {rounds} x {steps} steps", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.measure", name, mode, size, str(rounds), str(steps)],
            env=environment(directory),
            capture_output=True,
            text=True,
            check=False,
            timeout=MEASUREMENT_SECONDS,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"measurement {name} {mode} {size} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def environment(directory: str) -> dict[str, str]:
    """Of a measurement: nothing of the machine's own exporter or launcher in it, files and state under `directory`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MINDSPORE_EXPORTER_", "RANK_", "MS_", "PROMETHEUS_MULTIPROC"))
    }
    paths = f"{ROOT / 'exporter'}{os.pathsep}{ROOT / 'tests'}"
    return {**kept, "PYTHONPATH": paths, "GLOG_v": "3", "XDG_STATE_HOME": directory, "BENCH_DIRECTORY": directory}


def machine() -> str:
    """Size of this machine and versions, for the head of the table."""
    memory = psutil.virtual_memory().total / 2**30
    models = {
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    }
    packages = ", ".join(f"{name} {version(name)}" for name in ("mindspore", "mindformers", "prometheus-client"))
    return (
        f"{os.cpu_count()} cores ({', '.join(sorted(models)) or platform.machine()}), {memory:.0f} GiB, Python"
        f" {platform.python_version()}, {packages}"
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def comparison_table(results: dict[Case, dict[str, Any]]) -> list[str]:
    """One table a case: each monitor's hooks, what it adds, and the steps under it."""
    lines = []
    for (mode, size), result in results.items():
        lines += [
            f"### {size} model, {mode} mode: {result['rounds']} rounds of blocks of {result['steps']} steps",
            "",
            "| monitor | hook, median | hook, p99 | added to a step (95 % interval) | step, median | step, p99 |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, row in result["rows"].items():
            low, high = row["added_interval_us"]
            ours = ["", "", ""] if name == "none" else [
                f"{row['hook_median_us']:.1f} us", f"{row['hook_p99_us']:.1f} us",
                f"{row['added_us']:.0f} us ({low:.0f} .. {high:.0f})",
            ]  # fmt: skip
            cells = [name, *ours, f"{row['step_median_ms']:.2f} ms", f"{row['step_p99_ms']:.2f} ms"]
            lines.append(f"| {' | '.join(cells)} |")
        lines += [f"| {name} | could not run: {why} | | | | |" for name, why in result["failed"].items()]
        lines.append("")
    return lines


def cost_table(results: dict[Case, dict[str, Any]]) -> list[str]:
    """Throughput and CPU, one row a case."""
    lines = [
        COST_HEAD,
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (mode, size), r in results.items():
        low, high = r["ratio_interval"]
        median, p99 = r["step_median_ms"], r["step_p99_ms"]
        cells = [
            f"{size}, {mode}", f"{r['ratio']:.4f} ({low:.4f} .. {high:.4f})", f"{r['pairs']} x {r['steps']}",
            str(r["scrapes"]), f"{r['records_a_second']:.0f}", f"{r['cpu_us_a_record']:.0f} us",
            f"{100 * r['cpu_share']:.2f} %", f"{100 * r['idle_share']:.2f} %",
            f"{median['with']:.2f} / {median['without']:.2f} ms", f"{p99['with']:.2f} / {p99['without']:.2f} ms",
            str(r["dropped"]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def latency_table(results: dict[Case, dict[str, Any]]) -> list[str]:
    """The endpoint, one row a case."""
    lines = [
        "| model | p50 | p99 | slowest | scrapes | slowest during the compile (its time) | CPU of a render (series) | step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (mode, size), r in results.items():
        cells = [
            f"{size}, {mode}", f"{r['p50_ms']:.1f} ms", f"{r['p99_ms']:.1f} ms", f"{r['max_ms']:.1f} ms",
            str(r["scrapes"]), f"{r['compile_max_ms']:.0f} ms ({r['compile_s']:.1f} s)",
            f"{r['render_ms']:.2f} ms ({r['series']})", f"{r['step_median_ms']:.2f} ms",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def conversions_table(results: dict[Case, dict[str, Any]]) -> list[str]:
    """Conversions on the training thread, one row a monitor."""
    cases = list(results)
    heads = [f"{mode}, before the first step + in {results[mode, size]['steps']} steps" for mode, size in cases]
    lines = [f"| monitor | {' | '.join(heads)} |", f"| --- |{' --- |' * len(cases)}"]
    for name in results[cases[0]]["conversions"]:
        found = (results[case]["conversions"][name] for case in cases)
        cells = [f"{each['before']} + {each['in_steps']}" if "before" in each else each["failed"] for each in found]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return [*lines, ""]


def endurance_lines(results: dict[Case, dict[str, Any]]) -> list[str]:
    """One long training, in words."""
    return [
        f"- {size} model, {mode}: {r['early_mb']:.1f} MiB at step {r['early_step']:,}, {r['late_mb']:.1f} MiB at step"
        f" {r['late_step']:,}; {r['records_a_second']:.0f} records/s, {100 * r['cpu_share']:.2f} % of a core"
        f" ({r['cpu_us_a_record']:.0f} us a record), {r['dropped']} dropped"
        + (f"; without the exporter {r['grown_without_mb']:+.1f} MiB" if "grown_without_mb" in r else "")
        for (mode, size), r in results.items()
    ] + [""]


# --- bars -------------------------------------------------------------------------------------------------------------


def bars(results: Results) -> list[Bar]:
    """Every bar with its figure."""
    return [
        *hook_bars(results["compare"]),
        *conversion_bars(results["conversions"]),
        *cost_bars(results["cost"]),
        *latency_bars(results["latency"]),
        *endurance_bars(results["endurance"]),
    ]


def hook_bars(results: dict[Case, dict[str, Any]]) -> list[Bar]:
    """Time in the hooks, and what a step takes longer, against the others."""
    found = []
    for (mode, size), result in results.items():
        rows, where = result["rows"], f"{size}, {mode}"
        ours = rows.get(OURS)
        found.append(Bar(f"hook, median ({where})", 15, ours and ours["hook_median_us"], "us"))
        found.append(Bar(f"hook, p99 ({where})", 80, ours and ours["hook_p99_us"], "us"))
        theirs = rows.get("MFLossMonitor")
        share = ours["hook_median_us"] / theirs["hook_median_us"] if ours and theirs else None
        found.append(Bar(f"hook : MFLossMonitor's, medians ({where})", 0.02, share, "", 4))
        others = {name: row["added_us"] for name, row in rows.items() if name not in ("none", OURS)}
        if others and ours:
            least = min(others, key=lambda name: others[name])
            name = f"added to a step, against the least of the others, {least} ({where})"
            found.append(Bar(name, others[least], ours["added_us"], "us", 0))
    return found


def conversion_bars(results: dict[Case, dict[str, Any]]) -> list[Bar]:
    """Conversions on the training thread beyond those of a training without a monitor: in the steps, and in all."""
    found = []
    for (mode, _), result in results.items():
        ours, bare = result["conversions"][OURS], result["conversions"]["none"]
        counted = "failed" not in ours and "failed" not in bare
        in_steps = ours["in_steps"] - bare["in_steps"] if counted else None
        in_all = in_steps + ours["before"] - bare["before"] if in_steps is not None else None
        found.append(Bar(f"conversions on the training thread, in the steps ({mode})", 20, in_steps, "", 0))
        found.append(Bar(f"conversions on the training thread, the whole run ({mode})", 20, in_all, "", 0))
    return found


def cost_bars(results: dict[Case, dict[str, Any]]) -> list[Bar]:
    """CPU of the exporter's threads, step p99 of the 1 ms model, throughput of the 50 ms model."""
    found = []
    for (mode, size), r in results.items():
        where = f"{size}, {mode}, {r['records_a_second']:.0f} records/s"
        if r["records_a_second"] <= 25:
            found.append(Bar(f"exporter's CPU a record ({where})", 150, r["cpu_us_a_record"], "us", 0))
        else:
            found.append(Bar(f"exporter's CPU of a core ({where})", 5, 100 * r["cpu_share"], "%", 2))
        low, high = r["ratio_interval"]
        if size == "1 ms":
            p99 = r["step_p99_ms"]["with"] / r["step_p99_ms"]["without"]
            found.append(Bar(f"step p99 with : without ({where})", 1.3, p99, "", 2))
        else:
            away = max(abs(1 - low), abs(1 - high))
            name = f"throughput ratio's interval, furthest from 1 ({where}, {r['pairs']} pairs, width {high - low:.4f})"
            found.append(Bar(name, 0.01, away, "", 4))
    return found


def latency_bars(results: dict[Case, dict[str, Any]]) -> list[Bar]:
    """The endpoint while one rank trains."""
    found = []
    for (mode, size), r in results.items():
        found.append(Bar(f"/metrics, p99 ({size}, {mode})", 20 if mode == "graph" else 50, r["p99_ms"], "ms"))
        found.append(Bar(f"CPU of a render ({size}, {mode})", 2, r["render_ms"], "ms", 2))
    return found


def endurance_bars(results: dict[Case, dict[str, Any]]) -> list[Bar]:
    """Growth of memory, and CPU in a training without a pause."""
    found = []
    for (mode, size), r in results.items():
        name = f"memory grown from step {r['early_step']:,} to {r['late_step']:,} ({size}, {mode})"
        found.append(Bar(name, 5, r["grown_mb"], "MiB"))
        where = f"{size}, {mode}, {r['records_a_second']:.0f} records/s, one long training"
        found.append(Bar(f"exporter's CPU of a core ({where})", 5, 100 * r["cpu_share"], "%", 2))
    return found


# --- all of it --------------------------------------------------------------------------------------------------------


def page(results: Results, command: str, minutes: float) -> str:
    """The whole text of README.md."""
    found = bars(results)
    missed = sum(1 for bar in found if bar.value is None or bar.value > bar.limit)
    return "\n".join([
        "# What the callback costs", "",
        f"`{command}`, {minutes:.1f} min, {datetime.date.today().isoformat()}, on {machine()}.", "",
        HEAD, "",
        f"## Bars: {len(found) - missed} held, {missed} missed", "",
        "| bar | limit | seen | |", "| --- | --- | --- | --- |", *(bar.row() for bar in found), "",
        "## Against other monitors", "", *comparison_table(results["compare"]),
        "## Throughput and CPU", "",
        CPU, "", *cost_table(results["cost"]),
        "## The endpoint while one rank trains, asked 20 times a second by another process", "",
        *latency_table(results["latency"]),
        "## Conversions of tensors on the training thread", "", *conversions_table(results["conversions"]),
        "## One long training", "", *endurance_lines(results["endurance"]),
    ]).rstrip() + "\n"  # fmt: skip


def collect(cases: dict[str, dict[Case, tuple[int, int]]]) -> Results:
    """Run all measurements, one after the other. Where memory grew beyond its bar, it is told how much it grows without."""
    results: Results = {
        name: {case: measure(name, case, *size) for case, size in of.items()} for name, of in cases.items()
    }
    for case, result in results["endurance"].items():
        if result["grown_mb"] > 5:
            without = measure("endurance_without", case, *cases["endurance"][case])
            result["grown_without_mb"] = without["grown_mb"]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not what it costs")
    parser.add_argument("--write", action="store_true", help="write the tables to tests/benchmarks/README.md")
    arguments = parser.parse_args()
    began = time.monotonic()
    results = collect(QUICK if arguments.quick else FULL)
    options = shlex.join(sys.argv[1:])
    command = f'make bench ARGS="{options}"' if options else "make bench"
    text = page(results, command, (time.monotonic() - began) / 60)
    print(text)
    if arguments.write:
        TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
