"""One measurement in a process of its own: `python -m benchmarks.measure NAME MODE MODEL ROUNDS STEPS`.

The result is JSON on standard output. What is measured prints to nowhere: LossMonitor prints, and a terminal is not its
cost.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import psutil
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model
from mindspore.train.callback import Callback

from benchmarks.figures import interval, percentile
from benchmarks.monitors import LASTING, Ends, Timed, alternating
from mindspore_exporter import PrometheusMonitor

SCRAPER = {"X-Prometheus-Scrape-Timeout-Seconds": "1", "User-Agent": "bench", "Accept-Encoding": "gzip"}
WIDTHS = {"1 ms": (64, 1), "50 ms": (1536, 4)}
"""Width and number of hidden layers; the measured step time is in the table, the name is only a name."""


class Rows:
    def __init__(self, rows: int, width: int) -> None:
        draw = np.random.default_rng(7)
        self.x = draw.normal(size=(8, width)).astype(np.float32)
        self.y = draw.normal(size=(8, 1)).astype(np.float32)
        self.rows = rows

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index % 8], self.y[index % 8]

    def __len__(self) -> int:
        return self.rows


def dataset(steps: int, width: int, batch: int = 8) -> Any:
    return GeneratorDataset(Rows(steps * batch, width), ["x", "y"], shuffle=False, num_parallel_workers=1).batch(batch)


def model(size: str, mode: str) -> tuple[Any, int]:
    width, layers = WIDTHS[size]
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE, device_target="CPU")
    cells = [cell for _ in range(layers) for cell in (nn.Dense(width, width), nn.Tanh())]
    net = nn.SequentialCell(*cells, nn.Dense(width, 1))
    return Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 1e-5, 0.9)), width


class Silence:
    """Standard output and error to nowhere, for C++ too."""

    def __enter__(self) -> Silence:
        sys.stdout.flush()
        self.saved = [os.dup(1), os.dup(2)]
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.close(null)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        for number, saved in zip((1, 2), self.saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)


def block(trained: Any, data: Any, monitor: Any) -> tuple[list[float], list[int]]:
    """One `train` call: seconds between step ends, nanoseconds in the monitor's hooks (both without the first step)."""
    timed, ends = Timed(monitor), Ends()
    trained.train(1, data, callbacks=[timed, ends])
    return [b - a for a, b in pairwise(ends.at)], timed.took[1:]


def compare(mode: str, size: str, rounds: int, steps: int) -> dict[str, Any]:
    """The monitors that can alternate, in rounds of blocks whose order is drawn anew; each is compared with the block of its
    round that has none."""
    trained, width = model(size, mode)
    data, monitors = dataset(steps, width), alternating(Path(tempfile.mkdtemp(prefix="bench-")))
    taken: dict[str, list[tuple[list[float], list[int]]]] = {name: [] for name in monitors}
    draw = random.Random(1)
    for number in range(-1, rounds):
        for name in draw.sample(list(monitors), len(monitors)):
            measured = block(trained, data, monitors[name])
            if number >= 0:  # the round before the first warms everything up
                taken[name].append(measured)
    return rows(taken, rounds, steps)


def compare_lasting(mode: str, size: str, rounds: int, steps: int, name: str) -> dict[str, Any]:
    """One of the monitors that change the process for good, after the blocks without it."""
    trained, width = model(size, mode)
    data, monitor = dataset(steps, width), LASTING[name](Path(tempfile.mkdtemp(prefix="bench-")), steps)
    taken = {
        each: [block(trained, data, one) for _ in range(rounds + 1)][1:]
        for each, one in (("none", Callback()), (name, monitor))
    }
    return rows(taken, rounds, steps)


def rows(taken: dict[str, list[tuple[list[float], list[int]]]], rounds: int, steps: int) -> dict[str, Any]:
    """Rows of the table from each monitor's blocks."""
    hooks = {name: [took for _, each in blocks for took in each] for name, blocks in taken.items()}
    medians = {name: [statistics.median(between) for between, _ in blocks] for name, blocks in taken.items()}
    empty = statistics.median(hooks["none"])
    result = {}
    for name, blocks in taken.items():
        added = [ours - bare for ours, bare in zip(medians[name], medians["none"], strict=True)]
        seconds = [second for between, _ in blocks for second in between]
        result[name] = {
            "hook_median_us": max(0.0, statistics.median(hooks[name]) - empty) / 1e3,
            "hook_p99_us": max(0.0, percentile(hooks[name], 0.99) - empty) / 1e3,
            "added_us": statistics.median(added) * 1e6,
            "added_interval_us": [bound * 1e6 for bound in interval(added)],
            "step_median_ms": statistics.median(seconds) * 1e3,
            "step_p99_ms": percentile(seconds, 0.99) * 1e3,
        }
    return {"rows": result, "rounds": rounds, "steps": steps}


class Scraping(threading.Thread):
    """A process beside this one that fetches the page every `every` seconds and tells how long each took."""

    def __init__(self, port: int, every: float) -> None:
        super().__init__(daemon=True)
        body = (
            "import sys, time, http.client, json\n"
            f"c = http.client.HTTPConnection('127.0.0.1', {port}, timeout=30); took = []\n"
            f"headers = {SCRAPER!r}\n"
            "print('ready', flush=True)\n"
            "import threading\n"
            "stop = threading.Event()\n"
            "threading.Thread(target=lambda: (sys.stdin.read(), stop.set())).start()\n"
            "while not stop.is_set():\n"
            "    began = time.perf_counter(); c.request('GET', '/metrics', headers=headers); c.getresponse().read()\n"
            f"    took.append(time.perf_counter() - began); stop.wait({every})\n"
            "print(json.dumps(took))\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def finish(self) -> list[float]:
        output, _ = self.process.communicate()
        return list(json.loads(output))


def exporter_cpu() -> float:
    """CPU seconds of all threads of the exporter in this process."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name.startswith("mindspore-exporter") and thread.ident is not None
    )


def cost(mode: str, size: str, rounds: int, steps: int) -> dict[str, Any]:
    """Throughput with a scrape each second against none, in pairs of alternating blocks; CPU of the exporter's threads."""
    trained, width = model(size, mode)
    data = dataset(steps, width)
    bare, watch = Callback(), PrometheusMonitor(None, port=0, listen="127.0.0.1", run="bench", signals=False)
    block(trained, data, bare)
    block(trained, data, watch)
    ratios, cpu, records, wall = [], 0.0, 0, 0.0
    p99s: dict[str, list[float]] = {"with": [], "without": []}
    scraping = Scraping(watch.exporter.port or 0, 1.0)
    for number in range(rounds):
        spent: dict[str, float] = {}
        for name in ("with", "without") if number % 2 else ("without", "with"):
            before, began = exporter_cpu(), time.perf_counter()
            between, _ = block(trained, data, watch if name == "with" else bare)
            spent[name] = sum(between)
            p99s[name].extend(between)
            if name == "with":
                cpu += exporter_cpu() - before
                records += steps
                wall += time.perf_counter() - began
        ratios.append(spent["without"] / spent["with"])
    scraping.finish()
    dropped = watch.exporter.queue.dropped
    watch.exporter.stop()
    return {
        "ratio": statistics.fmean(ratios),
        "ratio_interval": interval(ratios),
        "pairs": rounds,
        "cpu_us_a_record": cpu / records * 1e6,
        "cpu_share": cpu / wall,
        "records_a_second": records / wall,
        "p99_with_ms": percentile(p99s["with"], 0.99) * 1e3,
        "p99_without_ms": percentile(p99s["without"], 0.99) * 1e3,
        "dropped": dropped,
    }


def latency(mode: str, size: str, rounds: int, steps: int) -> dict[str, Any]:
    """How long another process waits for the page while this one trains, compile excluded; CPU of one render."""
    trained, width = model(size, mode)
    watch = PrometheusMonitor(None, port=0, listen="127.0.0.1", run="bench", signals=False)
    watch.exporter.start()
    compiling = Scraping(watch.exporter.port or 0, 0.1)
    block(trained, dataset(2, width), watch)
    slowest_in_compile = max(compiling.finish())
    scraping = Scraping(watch.exporter.port or 0, 0.1)
    for _ in range(rounds):
        block(trained, dataset(steps, width), watch)
    took = scraping.finish()
    registry = watch.exporter.registry
    began = time.thread_time()
    for _ in range(100):
        registry.render()
    render = (time.thread_time() - began) / 100
    series = registry.series()
    watch.exporter.stop()
    return {
        "p50_ms": statistics.median(took) * 1e3,
        "p99_ms": percentile(took, 0.99) * 1e3,
        "max_ms": max(took) * 1e3,
        "scrapes": len(took),
        "compile_max_ms": slowest_in_compile * 1e3,
        "render_ms": render * 1e3,
        "series": series,
    }


def memory(mode: str, size: str, rounds: int, steps: int) -> dict[str, Any]:
    """Resident memory after a tenth of the steps and after all of them."""
    trained, width = model(size, mode)
    watch = PrometheusMonitor(None, port=0, listen="127.0.0.1", run="bench", signals=False)
    watch.exporter.start()
    scraping = Scraping(watch.exporter.port or 0, 1.0)
    process, seen = psutil.Process(), {}
    marks = {steps // 10: "early", steps: "late"}

    class Looks(Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            name = marks.get(run_context.original_args().cur_step_num)
            if name:
                seen[name] = process.memory_info().rss

    trained.train(1, dataset(steps, width), callbacks=[watch, Looks()])
    scraping.finish()
    watch.exporter.stop()
    return {
        "early_mb": seen["early"] / 2**20,
        "late_mb": seen["late"] / 2**20,
        "early_step": steps // 10,
        "late_step": steps,
    }


MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "compare": compare,
    "compare_lasting": compare_lasting,
    "cost": cost,
    "latency": latency,
    "memory": memory,
}


def main() -> None:
    name, mode, size, rounds, steps, *more = sys.argv[1:]
    os.chdir(tempfile.mkdtemp(prefix="bench-"))
    with Silence():
        result = MEASUREMENTS[name](mode, size, int(rounds), int(steps), *more)
    print("RESULT " + json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # nothing of what was compared may hold up the end


if __name__ == "__main__":
    main()
