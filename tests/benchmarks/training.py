"""What is trained in the bench, one block of steps of it, and what is watched beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from benchmarks.monitors import Ends, Timed

WIDTHS = {"1 ms": (64, 1), "50 ms": (1536, 4)}
"""Width and number of hidden layers. The names are those of graph mode on the machine of the committed table; the step time
that was measured is in the table."""
MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
BATCH = 8


class Rows:
    """`rows` rows of `width` numbers, the same in every run."""

    def __init__(self, rows: int, width: int) -> None:
        draw = np.random.default_rng(7)
        self.x = draw.normal(size=(BATCH, width)).astype(np.float32)
        self.y = draw.normal(size=(BATCH, 1)).astype(np.float32)
        self.rows = rows

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index % BATCH], self.y[index % BATCH]

    def __len__(self) -> int:
        return self.rows


class Training:
    """One network of a size, in one mode, that is trained block by block."""

    def __init__(self, size: str, mode: str) -> None:
        self.width, layers = WIDTHS[size]
        self.mode = MODES[mode]
        ms.set_context(mode=self.mode, device_target="CPU")
        cells = [cell for _ in range(layers) for cell in (nn.Dense(self.width, self.width), nn.Tanh())]
        net = nn.SequentialCell(*cells, nn.Dense(self.width, 1))
        self.model = Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 1e-5, 0.9))

    def dataset(self, steps: int) -> Any:
        """Batches for `steps` steps."""
        rows = Rows(steps * BATCH, self.width)
        return GeneratorDataset(rows, ["x", "y"], shuffle=False, num_parallel_workers=1).batch(BATCH)

    def block(self, data: Any, monitor: Any) -> Block:
        """One `train` call under a monitor. Raises RuntimeError where something changed the mode: the block would be of
        another mode than its row says."""
        ends = Ends()
        with Timed(monitor) as timed:
            self.model.train(1, data, callbacks=[monitor, ends], dataset_sink_mode=False)
        if ms.get_context("mode") != self.mode:
            raise RuntimeError(f"the mode was {self.mode} and is {ms.get_context('mode')} after a block of {monitor}")
        settle(monitor)
        return Block([after - before for before, after in pairwise(ends.at)], timed.took[1:])


@dataclass(frozen=True)
class Block:
    """Seconds from step end to step end, and nanoseconds in the monitor's two hooks, both without the first step."""

    seconds: list[float]
    hooks: list[int]


def settle(monitor: Any) -> None:
    """Wait until the exporter has taken in what the block left in its queue: no other block is to pay for that."""
    exporter = getattr(monitor, "exporter", None)
    if exporter is not None and exporter.running and not exporter.worker.flush(20.0):
        raise RuntimeError("the exporter's worker did not take in a block's records in 20 s")


def exporter_cpu() -> float:
    """CPU seconds of the exporter's threads, by the scheduler's own count in nanoseconds."""
    return sum(
        thread_cpu(thread.native_id)
        for thread in threading.enumerate()
        if thread.name.startswith("mindspore-exporter") and thread.native_id is not None
    )


def thread_cpu(native_id: int) -> float:
    """CPU seconds of a thread of this process; 0 for one that has ended."""
    try:
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        return 0.0


SCRAPER = r"""
import http.client, json, sys, threading, time
port, every = int(sys.argv[1]), float(sys.argv[2])
headers = {"X-Prometheus-Scrape-Timeout-Seconds": "10", "User-Agent": "bench", "Accept-Encoding": "gzip"}
wanted, over, took, failed = threading.Event(), threading.Event(), [], []
def listen():
    for line in sys.stdin:
        wanted.set() if line.strip() == "on" else wanted.clear()
    over.set(); wanted.set()
threading.Thread(target=listen, daemon=True).start()
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
print("ready", flush=True)
while wanted.wait() and not over.is_set():
    if over.wait(every / 2) or not wanted.is_set():
        continue
    began = time.perf_counter()
    try:
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        took.append(time.perf_counter() - began) if answer.status == 200 and body else failed.append(str(answer.status))
    except OSError as error:
        failed.append(repr(error)); connection.close()
    over.wait(every / 2)
print(json.dumps([took, failed]))
"""


class Scraping:
    """A process beside this one that fetches /metrics every `every` seconds while it is switched on."""

    def __init__(self, port: int, every: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRAPER, str(port), str(every)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def switch(self, state: str) -> None:
        """`on` or `off`. A scrape comes half an interval after each `on`, then every interval."""
        assert self._process.stdin is not None
        self._process.stdin.write(state + "\n")
        self._process.stdin.flush()

    def finish(self) -> list[float]:
        """Seconds that each scrape took. Raises RuntimeError where one failed: its time would be missing."""
        output, _ = self._process.communicate(timeout=60)
        took, failed = json.loads(output)
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(took) + len(failed)} scrapes failed: {failed[:3]}")
        return list(took)


class Silence:
    """Standard output and error to nowhere, for C++ too: printing to a terminal is not a monitor's cost."""

    def __enter__(self) -> Silence:
        sys.stdout.flush()
        self._saved = [os.dup(1), os.dup(2)]
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.close(null)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        for number, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)


def pooled(blocks: Sequence[Block]) -> list[float]:
    """Step seconds of all blocks."""
    return [second for block in blocks for second in block.seconds]
