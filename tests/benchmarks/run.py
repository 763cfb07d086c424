"""`make bench`: what the callback costs, against other monitors. Prints the tables; `--write` puts them into README.md here.

Every figure is compared with its bar; a missed bar says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("README.md")

HEAD = (
    "Hook times are those of the step's two hooks on the training thread, less what the timer itself takes. Blocks of steps"
    " alternate between the monitors in an order that is drawn anew each round; `added` is the median over the rounds of the"
    " difference to the block without a monitor. SummaryCollector and MFLossMonitor change the process for good, so each was"
    " measured in one of its own, after the blocks without it. The machine is shared and noisy: read the intervals."
)

FULL = {
    "compare": {("graph", "1 ms"): (40, 300), ("pynative", "1 ms"): (12, 60), ("graph", "50 ms"): (10, 16),
                ("pynative", "50 ms"): (8, 12)},
    "cost": {("graph", "1 ms"): (40, 1500), ("graph", "50 ms"): (48, 24), ("pynative", "50 ms"): (20, 24)},
    "latency": {("graph", "50 ms"): (2, 250), ("pynative", "50 ms"): (2, 200)},
    "memory": {("graph", "1 ms"): (1, 200_000)},
}  # fmt: skip
QUICK = {
    "compare": {("graph", "1 ms"): (3, 60)},
    "cost": {("graph", "1 ms"): (3, 300)},
    "latency": {("graph", "50 ms"): (1, 40)},
    "memory": {("graph", "1 ms"): (1, 2000)},
}


def measure(name: str, mode: str, size: str, rounds: int, steps: int, *more: str) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'exporter'}:{ROOT / 'tests'}", "GLOG_v": "3"}
    environment.pop("MINDSPORE_EXPORTER_CONFIG", None)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.measure", name, mode, size, str(rounds), str(steps), *more],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"measurement {name} {mode} {size} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def machine() -> str:
    """Size of this machine and versions, for the head of the table."""
    memory = psutil.virtual_memory().total / 2**30
    names = {
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    }
    packages = ", ".join(f"{name} {version(name)}" for name in ("mindspore", "mindformers", "prometheus-client"))
    return (
        f"{os.cpu_count()} cores ({', '.join(sorted(names)) or platform.machine()}), {memory:.0f} GiB, Python"
        f" {platform.python_version()}, {packages}; {datetime.date.today().isoformat()}"
    )


def bar(name: str, value: float, limit: float, unit: str, digits: int = 1) -> str:
    """One line of the list of bars."""
    kept = value <= limit
    miss = "" if kept else f", **missed by {value - limit:.{digits}f} {unit}**"
    return f"| {name} | {limit:g} {unit} | {value:.{digits}f} {unit} | {'held' if kept else 'missed'}{miss} |"


def comparison_table(results: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
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
            added = "" if name == "none" else f"{row['added_us']:.0f} us ({low:.0f} .. {high:.0f})"
            hook = ("", "") if name == "none" else (f"{row['hook_median_us']:.1f} us", f"{row['hook_p99_us']:.1f} us")
            lines.append(
                f"| {name} | {hook[0]} | {hook[1]} | {added} | {row['step_median_ms']:.2f} ms | {row['step_p99_ms']:.2f} ms |"
            )
        lines.append("")
    return lines


def cost_table(results: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    lines = [
        "| model | throughput with : without (95 % interval, pairs) | records/s | exporter's CPU a record | of a core | step p99 with / without | dropped |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (mode, size), r in results.items():
        low, high = r["ratio_interval"]
        lines.append(
            f"| {size}, {mode} | {r['ratio']:.4f} ({low:.4f} .. {high:.4f}, {r['pairs']}) | {r['records_a_second']:.0f} |"
            f" {r['cpu_us_a_record']:.0f} us | {100 * r['cpu_share']:.1f} % | {r['p99_with_ms']:.2f} / {r['p99_without_ms']:.2f} ms |"
            f" {r['dropped']} |"
        )
    return [*lines, ""]


def latency_table(results: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    lines = [
        "| model | p50 | p99 | slowest | scrapes | slowest during the compile | CPU of a render (series) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (mode, size), r in results.items():
        lines.append(
            f"| {size}, {mode} | {r['p50_ms']:.1f} ms | {r['p99_ms']:.1f} ms | {r['max_ms']:.1f} ms | {r['scrapes']} |"
            f" {r['compile_max_ms']:.0f} ms | {r['render_ms']:.2f} ms ({r['series']}) |"
        )
    return [*lines, ""]


def bars(results: dict[str, dict[tuple[str, str], dict[str, Any]]]) -> list[str]:
    """Each bar with its figure, held or missed."""
    lines = ["| bar | limit | seen | |", "| --- | --- | --- | --- |"]
    for (mode, size), result in results["compare"].items():
        rows, where = result["rows"], f"{size}, {mode}"
        ours = rows["PrometheusMonitor"]
        lines.append(bar(f"hook, median ({where})", ours["hook_median_us"], 15, "us"))
        lines.append(bar(f"hook, p99 ({where})", ours["hook_p99_us"], 80, "us"))
        if "MFLossMonitor" in rows:
            share = ours["hook_median_us"] / rows["MFLossMonitor"]["hook_median_us"]
            lines.append(bar(f"hook against MFLossMonitor's ({where})", share, 0.02, "of it", 3))
        others = {name: row["added_us"] for name, row in rows.items() if name not in ("none", "PrometheusMonitor")}
        least = min(others, key=lambda name: others[name])
        lines.append(
            bar(
                f"added to a step, against the least of the others, {least} ({where})",
                ours["added_us"],
                others[least],
                "us",
            )
        )
    for (mode, size), r in results["cost"].items():
        where = f"{size}, {mode}, {r['records_a_second']:.0f} records/s"
        if r["records_a_second"] <= 25:
            lines.append(bar(f"exporter's CPU a record ({where})", r["cpu_us_a_record"], 150, "us", 0))
        else:
            lines.append(bar(f"exporter's CPU ({where})", 100 * r["cpu_share"], 5, "% of a core"))
        if size == "1 ms":
            lines.append(bar(f"step p99 with : without ({where})", r["p99_with_ms"] / r["p99_without_ms"], 1.3, "x", 2))
        else:
            low, high = r["ratio_interval"]
            away = max(abs(1 - low), abs(1 - high))
            lines.append(
                bar(f"throughput ratio's interval away from 1 ({where}, {r['pairs']} pairs)", away, 0.01, "", 4)
            )
    for (mode, size), r in results["latency"].items():
        lines.append(bar(f"/metrics, p99 ({size}, {mode})", r["p99_ms"], 20 if mode == "graph" else 50, "ms"))
        lines.append(bar(f"CPU of a render ({size}, {mode})", r["render_ms"], 2, "ms", 2))
    for (mode, size), r in results["memory"].items():
        grown = r["late_mb"] - r["early_mb"]
        lines.append(
            bar(f"memory grown from step {r['early_step']:,} to {r['late_step']:,} ({size}, {mode})", grown, 5, "MiB")
        )
    return [*lines, ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not what it costs")
    parser.add_argument("--write", action="store_true", help="write the tables to tests/benchmarks/README.md")
    arguments = parser.parse_args()
    began = time.monotonic()
    results: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for name, cases in (QUICK if arguments.quick else FULL).items():
        results[name] = {}
        for (mode, size), (rounds, steps) in cases.items():
            print(f"{name}: {size} model, {mode} mode, {rounds} x {steps} steps", file=sys.stderr, flush=True)
            results[name][mode, size] = measure(name, mode, size, rounds, steps)
    for (mode, size), (rounds, steps) in (QUICK if arguments.quick else FULL)["compare"].items():
        for name in ("SummaryCollector(1)", "MFLossMonitor"):
            print(f"compare: {name}, {size} model, {mode} mode", file=sys.stderr, flush=True)
            alone = measure("compare_lasting", mode, size, max(2, rounds // 4), steps, name)
            results["compare"][mode, size]["rows"][name] = alone["rows"][name]
    minutes = (time.monotonic() - began) / 60
    text = "\n".join([
        "# What the callback costs", "",
        f"Written by `make bench ARGS=--write` in {minutes:.0f} min on {machine()}.", "",
        HEAD, "",
        "## Bars", "", *bars(results),
        "## Against other monitors", "", *comparison_table(results["compare"]),
        "## Throughput and CPU, with a scrape each second", "", *cost_table(results["cost"]),
        "## The endpoint while one rank trains, asked ten times a second by another process", "", *latency_table(results["latency"]),
    ])  # fmt: skip
    print(text)
    if arguments.write:
        TABLE.write_text(text.rstrip() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
