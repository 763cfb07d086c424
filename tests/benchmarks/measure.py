"""One measurement in a process of its own: `python -m benchmarks.measure NAME MODE MODEL ROUNDS STEPS`.

The last line of standard output is `RESULT` and JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import psutil
from mindspore.train.callback import Callback

from benchmarks.figures import interval, mean, median, paired_differences, paired_ratios, percentile
from benchmarks.monitors import OURS, Nothing, all_of_them, build_transformers_context, ours
from benchmarks.training import MODES, Block, Scraping, Silence, Training, exporter_cpu, pooled, settle

CONVERSIONS = ("asnumpy", "item", "__float__", "__int__", "__bool__", "__array__")


def compare(mode: str, size: str, rounds: int, steps: int) -> dict[str, Any]:
    """All monitors in rounds of alternating blocks whose order is drawn anew; each is compared with the block of its round
    that has none. A monitor that cannot run is named with its error and left out from then on."""
    directory = Path.cwd()
    build_transformers_context(MODES[mode], directory)
    training = Training(size, mode)
    data, monitors = training.dataset(steps), all_of_them(directory, steps)
    taken: dict[str, list[Block]] = {name: [] for name in monitors}
    failed: dict[str, str] = {}
    draw = random.Random(1)
    for number in range(-1, rounds):
        for name in draw.sample(list(monitors), len(monitors)):
            try:
                block = training.block(data, monitors[name])
            except Exception as error:
                failed[name] = reason(error)
                del monitors[name]
                continue
            if number >= 0:  # the round before the first warms everything up, our 20 proven reads too
                taken[name].append(block)
    return {"rows": rows({name: taken[name] for name in monitors}), "failed": failed, "rounds": rounds, "steps": steps}


def rows(taken: dict[str, list[Block]]) -> dict[str, Any]:
    """Rows of the table from each monitor's blocks."""
    bare = [median(block.seconds) for block in taken["none"]]
    empty = median([took for block in taken["none"] for took in block.hooks])
    result = {}
    for name, blocks in taken.items():
        hooks = [took - empty for block in blocks for took in block.hooks]
        added = paired_differences([median(block.seconds) for block in blocks], bare)
        seconds = pooled(blocks)
        result[name] = {
            "hook_median_us": median(hooks) / 1e3,
            "hook_p99_us": percentile(hooks, 0.99) / 1e3,
            "added_us": median(added) * 1e6,
            "added_interval_us": [bound * 1e6 for bound in interval(added, median)],
            "step_median_ms": median(seconds) * 1e3,
            "step_p99_ms": percentile(seconds, 0.99) * 1e3,
            "timer_us": empty / 1e3,
        }
    return result


def cost(mode: str, size: str, rounds: int, steps: int) -> dict[str, Any]:
    """Pairs of blocks with the exporter and a scrape each second, and with neither: throughput, CPU of the exporter's
    threads. In the blocks without, its threads are there and idle; what they take then is told beside."""
    training, watch = Training(size, mode), ours()
    data, bare = training.dataset(steps), Nothing()
    training.block(data, bare)
    training.block(data, watch)
    scraping = Scraping(watch.exporter.port or 0, 1.0)
    taken: dict[str, list[Block]] = {"with": [], "without": []}
    cpu, wall = {"with": 0.0, "without": 0.0}, {"with": 0.0, "without": 0.0}
    for number in range(rounds):
        for name in ("with", "without") if number % 2 else ("without", "with"):
            scraping.switch("on" if name == "with" else "off")
            spent, began = exporter_cpu(), time.perf_counter()
            taken[name].append(training.block(data, watch if name == "with" else bare))
            cpu[name] += exporter_cpu() - spent
            wall[name] += time.perf_counter() - began
    scrapes = len(scraping.finish())
    dropped = watch.exporter.queue.dropped
    watch.exporter.stop()
    busy = sum(pooled(taken["with"]))
    ratios = paired_ratios(*([sum(block.seconds) for block in taken[name]] for name in ("without", "with")))
    p99 = {name: [percentile(block.seconds, 0.99) for block in blocks] for name, blocks in taken.items()}
    p99_ratios = paired_ratios(p99["with"], p99["without"])
    return {
        "ratio": mean(ratios),
        "ratio_interval": interval(ratios, mean),
        "pairs": rounds,
        "steps": steps,
        "scrapes": scrapes,
        "cpu_us_a_record": cpu["with"] / (rounds * steps) * 1e6,
        "cpu_share": cpu["with"] / wall["with"],
        "idle_share": cpu["without"] / wall["without"],
        "records_a_second": rounds * (steps - 1) / busy,
        "step_median_ms": {name: median(pooled(blocks)) * 1e3 for name, blocks in taken.items()},
        "step_p99_ms": {name: percentile(pooled(blocks), 0.99) * 1e3 for name, blocks in taken.items()},
        "p99_ratio_of_pairs": median(p99_ratios),
        "p99_ratio_interval": interval(p99_ratios, median),
        "dropped": dropped,
    }


def latency(mode: str, size: str, rounds: int, steps: int) -> dict[str, Any]:
    """How long another process waits for the page, 20 times a second, while this one trains; during the compile apart. CPU
    of one render."""
    training, watch = Training(size, mode), ours()
    watch.exporter.start()
    compiling = Scraping(watch.exporter.port or 0, 0.05)
    compiling.switch("on")
    began = time.perf_counter()
    training.block(training.dataset(2), watch)
    compile_seconds = time.perf_counter() - began
    in_compile = compiling.finish()
    scraping, data = Scraping(watch.exporter.port or 0, 0.05), training.dataset(steps)
    scraping.switch("on")
    blocks = [training.block(data, watch) for _ in range(rounds)]
    took = scraping.finish()
    render, series = render_cpu(watch.exporter.registry), watch.exporter.registry.series()
    watch.exporter.stop()
    return {
        "p50_ms": median(took) * 1e3,
        "p99_ms": percentile(took, 0.99) * 1e3,
        "max_ms": max(took) * 1e3,
        "scrapes": len(took),
        "step_median_ms": median(pooled(blocks)) * 1e3,
        "compile_s": compile_seconds,
        "compile_max_ms": max(in_compile) * 1e3,
        "render_ms": render * 1e3,
        "series": series,
    }


def render_cpu(registry: Any, renders: int = 100) -> float:
    """CPU seconds of this thread for one render of the page, the median of many."""
    spent = []
    for _ in range(renders):
        began = time.thread_time_ns()
        registry.render()
        spent.append((time.thread_time_ns() - began) / 1e9)
    return median(spent)


def endurance(mode: str, size: str, rounds: int, steps: int) -> dict[str, Any]:
    """One long training with a scrape each second: resident memory after a tenth of the steps and after all of them, CPU of
    the exporter's threads between the two."""
    training, watch = Training(size, mode), ours()
    watch.exporter.start()
    scraping = Scraping(watch.exporter.port or 0, 1.0)
    scraping.switch("on")
    early, late = looked_at(training, steps, [watch])
    scraping.finish()
    dropped = watch.exporter.queue.dropped
    watch.exporter.stop()
    return {
        "grown_mb": (late["rss"] - early["rss"]) / 2**20,
        "early_mb": early["rss"] / 2**20,
        "late_mb": late["rss"] / 2**20,
        "early_step": steps // 10,
        "late_step": steps,
        "records_a_second": (steps - steps // 10) / (late["at"] - early["at"]),
        "cpu_share": (late["cpu"] - early["cpu"]) / (late["at"] - early["at"]),
        "cpu_us_a_record": (late["cpu"] - early["cpu"]) / (steps - steps // 10) * 1e6,
        "dropped": dropped,
    }


def endurance_without(mode: str, size: str, rounds: int, steps: int) -> dict[str, Any]:
    """Growth of resident memory over the same steps of the same training without an exporter: MindSpore's own."""
    early, late = looked_at(Training(size, mode), steps, [])
    return {"grown_mb": (late["rss"] - early["rss"]) / 2**20}


def looked_at(training: Training, steps: int, callbacks: list[Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Resident bytes, time and CPU of the exporter after a tenth of `steps` steps and after all of them."""
    process, seen = psutil.Process(), []

    class Looks(Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            if run_context.original_args().cur_step_num in (steps // 10, steps):
                seen.append(
                    {"rss": process.memory_info().rss, "at": time.perf_counter(), "cpu": exporter_cpu()},
                )

    training.model.train(1, training.dataset(steps), callbacks=[*callbacks, Looks()], dataset_sink_mode=False)
    early, late = seen
    return early, late


def conversions(mode: str, size: str, rounds: int, steps: int) -> dict[str, Any]:
    """Tensors that were converted on the training thread in one training of `steps` steps, by monitor: each waits for the
    device. Untimed; a conversion that another one makes is not counted again."""
    directory = Path.cwd()
    build_transformers_context(MODES[mode], directory)
    training = Training(size, mode)
    data, monitors = training.dataset(steps), all_of_them(directory, steps)
    training.block(data, monitors["none"])
    seen = {name: conversions_under(training, data, monitor) for name, monitor in monitors.items()}
    watch = monitors[OURS].exporter
    return {"conversions": seen, "steps": steps, "read_mode": watch.read_mode, "hook_errors": watch.hook_errors}


def conversions_under(training: Training, data: Any, monitor: Any) -> dict[str, Any]:
    """Conversions before the first step and in the steps of one training, or why it failed."""
    before: list[int] = []

    class Marks(Callback):
        def on_train_step_begin(self, run_context: Any) -> None:
            if not before:
                before.append(counted[0])

    try:
        with counted_conversions() as counted:
            training.model.train(1, data, callbacks=[Marks(), monitor], dataset_sink_mode=False)
    except Exception as error:
        return {"failed": reason(error)}
    settle(monitor)
    return {"before": before[0], "in_steps": counted[0] - before[0]}


def reason(error: Exception) -> str:
    """An error in one line of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".replace("|", "/")[:160]


@contextmanager
def counted_conversions() -> Iterator[list[int]]:
    """Count the conversions that this thread makes meanwhile, in the list's one element."""
    counted, inside, thread = [0], False, threading.get_ident()
    kept = {name: getattr(ms.Tensor, name) for name in CONVERSIONS if hasattr(ms.Tensor, name)}

    def counting(convert: Any) -> Any:
        def convert_and_count(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if threading.get_ident() != thread or inside:
                return convert(tensor, *args, **kwargs)
            inside = True
            counted[0] += 1
            try:
                return convert(tensor, *args, **kwargs)
            finally:
                inside = False

        return convert_and_count

    for name, convert in kept.items():
        setattr(ms.Tensor, name, counting(convert))
    try:
        yield counted
    finally:
        for name, convert in kept.items():
            setattr(ms.Tensor, name, convert)


MEASUREMENTS = {each.__name__: each for each in (compare, cost, latency, endurance, endurance_without, conversions)}


def main() -> None:
    name, mode, size, rounds, steps = sys.argv[1:]
    os.chdir(tempfile.mkdtemp(prefix="bench-", dir=os.environ.get("BENCH_DIRECTORY")))
    with Silence():
        result = MEASUREMENTS[name](mode, size, int(rounds), int(steps))
    print("RESULT " + json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # nothing of what was compared may hold up the end


if __name__ == "__main__":
    main()
