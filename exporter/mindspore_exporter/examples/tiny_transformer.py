"""A small Transformer language model that trains on a CPU in seconds, monitored: the script that `make demo` runs.

    python tiny_transformer.py --steps 300
    msrun --worker_num=2 --local_worker_num=2 --join=True tiny_transformer.py --steps 300

The text is a Markov chain: each token has a few likely successors, so the loss falls from ln(vocabulary) towards the
chain's entropy. Under msrun the ranks train data parallel, each on text of its own. All that the monitor needs is one
more callback.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model
from mindspore.train.callback import Callback
from numpy.typing import NDArray

from mindspore_exporter import PrometheusMonitor

VOCABULARY = 32
LENGTH = 32
WIDTH = 64
HEADS = 4
LAYERS = 2
BATCH = 16
SEQUENCES = 4096
"""Different sequences a rank has; a longer run sees them again."""
WARMUP_STEPS = 20
PEAK_RATE = 3e-3


class MarkovText:
    """`rows` pairs (tokens, the same tokens one later), each of shape (LENGTH,), int32; `seed` makes a rank's own text
    of the one language that all ranks share."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        language = np.random.default_rng(0).dirichlet(np.full(VOCABULARY, 0.08), size=VOCABULARY)
        cumulative = np.cumsum(language, axis=1)
        chance = np.random.default_rng(1000 + seed)
        tokens = np.empty((SEQUENCES, LENGTH + 1), np.int32)
        tokens[:, 0] = chance.integers(VOCABULARY, size=SEQUENCES)
        for position in range(LENGTH):
            drawn = chance.random((SEQUENCES, 1))
            following = (cumulative[tokens[:, position]] < drawn).sum(axis=1)
            tokens[:, position + 1] = np.minimum(following, VOCABULARY - 1)
        self._tokens = tokens

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        row = self._tokens[index % SEQUENCES]
        return row[:-1], row[1:]

    def __len__(self) -> int:
        return self._rows


class Block(nn.Cell):  # type: ignore[misc]
    """Causal self-attention and a feed-forward network, each behind a layer norm; (batch, LENGTH, WIDTH) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm((WIDTH,))
        self.projections = nn.Dense(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Dense(WIDTH, WIDTH)
        self.feed_norm = nn.LayerNorm((WIDTH,))
        self.feed = nn.SequentialCell(nn.Dense(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dense(4 * WIDTH, WIDTH))
        self.future = Tensor(np.triu(np.full((LENGTH, LENGTH), -1e9, np.float32), 1))

    def construct(self, x: Any) -> Any:
        x = x + self.attend(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))

    def attend(self, x: Any) -> Any:
        heads = self.projections(x).reshape(-1, LENGTH, 3, HEADS, WIDTH // HEADS).transpose(2, 0, 3, 1, 4)
        query, key, value = heads[0], heads[1], heads[2]
        scores = ops.matmul(query, key.swapaxes(-1, -2)) / math.sqrt(WIDTH // HEADS) + self.future
        mixed = ops.matmul(ops.softmax(scores, -1), value)
        return self.attention_out(mixed.transpose(0, 2, 1, 3).reshape(-1, LENGTH, WIDTH))


class TinyTransformer(nn.Cell):  # type: ignore[misc]
    """Tokens (batch, LENGTH) to logits (batch, LENGTH, VOCABULARY)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = Parameter(Tensor(np.zeros((LENGTH, WIDTH), np.float32)), name="position")
        self.blocks = nn.SequentialCell(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm((WIDTH,))
        self.head = nn.Dense(WIDTH, VOCABULARY)

    def construct(self, tokens: Any) -> Any:
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.position)))


class TokenLoss(nn.Cell):  # type: ignore[misc]
    """Mean cross entropy of the next token, in nats."""

    def construct(self, logits: Any, labels: Any) -> Any:
        return ops.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def learning_rate(step: int) -> float:
    """Rate of a step, counted from 1: linear warm-up, then the inverse square root. It needs no planned end."""
    return PEAK_RATE * min(step / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / step))


class RunLog(Callback):  # type: ignore[misc]
    """What the run itself sees, step by step, as JSON lines: `step`, `loss`, `learning_rate`, `samples` (this rank's, so
    far), `time` (end of the step, Unix seconds), `clock` (the same, monotonic)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def on_train_step_end(self, run_context: Any) -> None:
        clock, now = time.monotonic(), time.time()
        params = run_context.original_args()
        step = params.cur_step_num
        line = {
            "step": step,
            "loss": float(params.net_outputs.asnumpy()),
            "learning_rate": float(np.float32(learning_rate(step))),
            "samples": step * BATCH,
            "time": now,
            "clock": clock,
        }
        self._file.write(json.dumps(line) + "\n")

    def on_train_end(self, run_context: Any) -> None:
        self._file.close()


class StopTogether(Callback):  # type: ignore[misc]
    """Ends the training `seconds` after its first step (and so its compile), at the same step on all ranks.

    Rank 0 writes the number of its next step into `file` before it begins that step. No rank can end a step that rank 0
    has not begun, because their gradients are summed: each rank finds the number at the end of that step at the latest.
    """

    def __init__(self, seconds: float, file: Path, rank: int) -> None:
        super().__init__()
        self._seconds = seconds
        self._file = file
        self._leads = rank == 0
        self._ends_at = math.inf

    def on_train_begin(self, run_context: Any) -> None:
        if self._leads:
            self._file.unlink(missing_ok=True)

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        float(params.net_outputs.asnumpy())  # the step has ended, and not only been sent to the device
        step = params.cur_step_num
        if self._leads and step == 1:
            self._ends_at = time.monotonic() + self._seconds
        elif self._leads and time.monotonic() >= self._ends_at:
            self._ends_at = math.inf
            written = self._file.with_suffix(".new")
            written.write_text(str(step + 1), encoding="utf-8")
            written.replace(self._file)
        elif self._file.exists() and step >= int(self._file.read_text(encoding="utf-8")):
            run_context.request_stop()


def main() -> None:
    options = _options()
    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE if options.pynative else ms.GRAPH_MODE)
    rank, ranks = 0, 1
    if os.environ.get("MS_ROLE"):  # msrun's: the ranks have to find each other
        init()
        rank, ranks = get_rank(), get_group_size()
        ms.set_auto_parallel_context(
            parallel_mode="data_parallel",
            gradients_mean=True,
            device_num=ranks,
            # Megabytes: all gradients in one message. On a CPU a message for each parameter doubles the step.
            comm_fusion={"allreduce": {"mode": "size", "config": 64}},
        )
    ms.set_seed(1)  # the same weights on all ranks
    network = TinyTransformer()
    rates = [learning_rate(step) for step in range(1, options.steps + 1)]
    optimizer = nn.Adam(network.trainable_params(), rates)
    text = GeneratorDataset(MarkovText(options.steps * BATCH, seed=rank), ["tokens", "labels"], shuffle=False)
    callbacks: list[Callback] = [PrometheusMonitor(options.config)]
    if options.log is not None:
        callbacks.append(RunLog(options.log / f"rank{rank}.jsonl"))
    if options.seconds is not None:
        callbacks.append(StopTogether(options.seconds, (options.log or Path()) / "stop-at", rank))
    Model(network, TokenLoss(), optimizer).train(1, text.batch(BATCH), callbacks=callbacks, dataset_sink_mode=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train a small Transformer, monitored")
    parser.add_argument("--steps", type=int, default=300, help="steps to train (default: 300)")
    parser.add_argument("--seconds", type=float, help="end this long after the first step, at the latest after --steps")
    parser.add_argument("--config", help="configuration of the monitor (default: environment only)")
    parser.add_argument("--log", type=Path, metavar="DIR", help="directory for the run's own log, one file a rank")
    parser.add_argument("--pynative", action="store_true", help="PyNative mode instead of graph mode")
    return parser.parse_args()


if __name__ == "__main__":
    main()
