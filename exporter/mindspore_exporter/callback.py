"""`PrometheusMonitor`: translates MindSpore's hooks into records. Nothing is decoded, written or waited for here.

How MindSpore calls it (2.9 and 2.10): `__enter__`, `on_train_begin`, per step `on_train_step_begin` (after the batch was
fetched) and `on_train_step_end`, `on_train_end`, `__exit__`. `Model.fit` enters and exits the same object again for each
evaluation; an exception skips `on_train_end` and reaches `__exit__` only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspore import Tensor
from mindspore.train.callback import Callback

from . import exporter as exporters
from .checkpoints import CheckpointWatch
from .config import MonitorConfig
from .decode import freeze, read_now, retain
from .evaluation import OwnEvaluation
from .exporter import TrainingExporter
from .learning_rate import LearningRates, needs_hook_read
from .records import CompileBegan, EvaluationBegan, EvaluationEnded, RunBegan, StepRecord

monotonic = time.monotonic
new_record = tuple.__new__
"""Makes a named tuple without its own `__new__`, which is a Python function: 0.3 us instead of 0.9, in every step."""


class PrometheusMonitor(Callback):  # type: ignore[misc]
    """Exports the training that it is a callback of.

        model.train(epochs, dataset, callbacks=[PrometheusMonitor()])
        model.train(epochs, dataset, callbacks=[PrometheusMonitor("monitor.yaml", port=19440, run="llm-7b")])

    Arguments: the YAML's path, and keyword arguments that go before environment and YAML (see `config.MonitorConfig`).
    Raises ConfigError for a configuration that cannot be used, unless `on_config_error: warn`. Whatever goes wrong
    later is counted and logged once; it never reaches the training.
    """

    def __init__(self, config: str | Path | MonitorConfig | None = None, **overrides: Any) -> None:
        super().__init__()
        loaded = config if isinstance(config, MonitorConfig) else exporters.load_or_off(config, **overrides)
        self.exporter = TrainingExporter(loaded)
        self._own_evaluation = OwnEvaluation(loaded.evaluation) if loaded.enabled and loaded.evaluation else None
        self._depth = 0
        self._run: _Run | None = None
        self._stop_requested = False

    # --- the run --------------------------------------------------------------------------------------------------

    def __enter__(self) -> PrometheusMonitor:
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        try:
            if self._run is not None:
                if kind is not None:
                    self._run.take_unseen_step()
                self._run.release()
                self._run = None
            self.exporter.finish(kind, error, stop_requested=self._stop_requested)
        except Exception:
            self.exporter.hook_failed("__exit__")

    def on_train_begin(self, run_context: Any) -> None:
        self._open()
        try:
            if self.exporter.running:
                self._stop_requested = False
                self._run = _Run(self.exporter, self, run_context.original_args())
        except Exception:
            self.exporter.hook_failed("on_train_begin")

    def on_train_step_begin(self, run_context: Any) -> None:
        run = self._run
        if run is not None:
            try:
                run.step_begins(monotonic())
            except Exception:
                self.exporter.hook_failed("on_train_step_begin")

    def on_train_step_end(self, run_context: Any) -> None:
        run = self._run
        if run is not None:
            try:
                run.step_ended(monotonic())
                if self._own_evaluation is not None:
                    self._evaluate(run, self._own_evaluation)
            except Exception:
                self.exporter.hook_failed("on_train_step_end")

    def on_train_end(self, run_context: Any) -> None:
        try:
            self._stop_requested = bool(run_context.get_stop_requested())
        except Exception:
            self.exporter.hook_failed("on_train_end")

    # --- evaluations ----------------------------------------------------------------------------------------------

    def on_eval_begin(self, run_context: Any) -> None:
        self._open()
        try:
            self.exporter.put(EvaluationBegan(monotonic(), time.time(), self._step()))
        except Exception:
            self.exporter.hook_failed("on_eval_begin")

    def on_eval_end(self, run_context: Any) -> None:
        try:
            values = evaluation_values(run_context.original_args())
            self.exporter.put(EvaluationEnded(monotonic(), time.time(), self._step(), values))
        except Exception:
            self.exporter.hook_failed("on_eval_end")

    def _evaluate(self, run: _Run, evaluation: OwnEvaluation) -> None:
        if not evaluation.due(run.step, run.steps_of_last_record):
            return
        values: dict[str, Any] = {}
        self.exporter.put(EvaluationBegan(monotonic(), time.time(), run.step))
        try:
            values = evaluation.run(run.params["train_network"], run.params["network"], run.params.get("loss_fn"))
        finally:
            self.exporter.put(EvaluationEnded(monotonic(), time.time(), run.step, values))

    def _step(self) -> int:
        return self._run.step if self._run is not None else 0

    def _open(self) -> None:
        """Start the exporter. A second monitor of the same configuration in one process goes on with the endpoint of the
        first. Only a configuration that cannot be used comes through."""
        active = exporters.active()
        if active is not None and active.running and active.config == self.exporter.config:
            self.exporter = active
        self.exporter.start()


class _Run:
    """One call of `Model.train`, on the training thread: what a step's record needs besides the step's own values."""

    def __init__(self, exporter: TrainingExporter, monitor: Callback, params: Any) -> None:
        at, wall = monotonic(), time.time()
        self.params = params
        self._exporter = exporter
        self._queue = exporter.queue
        train_network = params["train_network"]
        optimizer = params.get("optimizer") or getattr(train_network, "optimizer", None)
        callbacks = list(params.get("list_callback") or ())
        self._rates = LearningRates(optimizer) if optimizer is not None else None
        self._reads_rate = self._rates is not None and needs_hook_read(optimizer, callbacks)
        schedule_step = _global_step(optimizer)
        initial = params.get("initial_step")
        self._offset = initial if isinstance(initial, int) else schedule_step or 0
        self._sink = bool(params.get("dataset_sink_mode"))
        per_epoch = params.get("batch_num")
        steps = per_epoch if self._sink and per_epoch else 1
        self.step = self._offset
        self.steps_of_last_record = 0
        self._local_step = 0
        self._network = params.get("network") or train_network
        self._shares = _Shares(exporter, params, steps)
        self._first = not _is_compiled(train_network)
        self._get = params.get
        self._outputs_seen = id(params.get("net_outputs"))
        self._looks = True
        self._measures = False
        self._rate: float | None = None
        self._began_at = self._hook_seconds = self._others_seconds = 0.0
        self._left_at = at
        self._clock = _OtherCallbacks(callbacks, monitor, self._queue)
        self._checkpoints = CheckpointWatch(callbacks, exporter.put, lambda: self.step, exporter.await_checkpoint)
        epochs = params.get("epoch_num")
        planned = self._offset + epochs * per_epoch if epochs and per_epoch and per_epoch > 0 else None
        exporter.run_began(
            RunBegan(
                at,
                wall,
                self._offset,
                planned,
                per_epoch,
                params.get("cur_epoch_num") or 1,
                self._sink,
                steps,
                tuple(kind.__name__ for kind in type(train_network).__mro__),
                self._rates,
                schedule_step,
            )
        )

    def step_begins(self, now: float) -> None:
        """The batch is there and the step is about to run."""
        self._began_at = now
        if self._looks:
            self._look_before_step(now)
        self._queue.activity = "step"
        self._hook_seconds += monotonic() - now

    def _look_before_step(self, now: float) -> None:
        """What not every training needs at the begin of a step."""
        if not self._measures:
            batch = self._get("train_dataset_element")
            self._measures = isinstance(batch, (tuple, list)) and bool(batch) and hasattr(batch[0], "shape")
        if self._first:
            self._exporter.put(CompileBegan(now, time.time()))
        elif self._clock.watching:
            self._others_seconds = self._clock.seconds_of_others(self._left_at, now)
        if self._reads_rate and self._rates is not None:
            rates = self._rates.read_live()
            self._rate = rates[0] if rates else None
        self._looks = self._clock.watching or self._reads_rate

    def step_ended(self, now: float) -> None:
        """The step returned: keep references of its outputs, append one record."""
        get, queue = self._get, self._queue
        local = get("cur_step_num")
        steps = local - self._local_step if self._sink else 1
        self._local_step = local
        self.step = step = self._offset + local
        self.steps_of_last_record = steps
        outputs, immediate = get("net_outputs"), None
        self._outputs_seen = id(outputs)
        if self._exporter.reads_in_hook:
            outputs, immediate = self._read_here(outputs)
        elif type(outputs) is not Tensor or outputs.size > 1:
            outputs = retain(outputs)
        shares = self._shares
        if self._measures:
            first = get("train_dataset_element")[0]
            if first.shape != shares.shape:
                shares.measure(first)
        queue.put_step(
            new_record(
                StepRecord,
                (
                    step,
                    steps,
                    get("cur_epoch_num"),
                    self._began_at,
                    now,
                    time.time(),
                    self._others_seconds,
                    self._hook_seconds,
                    outputs,
                    immediate,
                    shares.samples,
                    shares.tokens,
                    self._network.training,
                    self._rate,
                    self._first,
                ),
            )
        )
        self._first = False
        queue.activity = self._clock.activity_after_step
        self._left_at = left_at = monotonic()
        self._hook_seconds = left_at - now

    def _read_here(self, outputs: Any) -> tuple[Any, tuple[float, ...] | None]:
        """Outputs of a step in which they are not simply kept: one of the proven first, or in another read mode."""
        exporter = self._exporter
        if exporter.read_mode == "off":
            return None, None
        kept = retain(outputs)
        if exporter.read_mode == "hook":
            due = self.step % exporter.config.read_every < self.steps_of_last_record
            return (freeze(kept) if due else None), None
        exporter.read_was_proven()
        return kept, read_now(kept)

    def take_unseen_step(self) -> None:
        """A callback before this one may raise at the end of a step (LossMonitor does, on NaN): its step counts too.
        The parameters hold that step's outputs; where the step itself failed, they still hold the one before."""
        if self._queue.activity == "step" and id(self._get("net_outputs")) != self._outputs_seen:
            self.step_ended(monotonic())

    def release(self) -> None:
        """Put back what was wrapped around the other callbacks."""
        self._clock.release()
        self._checkpoints.release()


class _Shares:
    """Samples and tokens of a record, this rank's share; None where neither batch nor configuration tells.

    `shape` is that of the batch they were measured on; without batches (sink mode) they are those of `steps` steps.
    """

    def __init__(self, exporter: TrainingExporter, params: Any, steps: int) -> None:
        data = exporter.config.data
        self._samples = data.samples_per_step
        self._tokens_per_sample = data.tokens_per_sample
        self._share = 1.0 / exporter.identity.world_size if exporter.identity and _feeds_whole_batch() else 1.0
        self.shape: object = None
        self.samples: float | None = None
        self.tokens: float | None = None
        self._set(_batch_size(params.get("train_dataset")), self._tokens_per_sample, steps)

    def measure(self, first: Any) -> None:
        """Take the measure of a batch by its first tensor, of shape (samples, ...)."""
        shape = self.shape = first.shape
        tokens = self._tokens_per_sample
        if tokens is None and len(shape) == 2 and "Int" in str(first.dtype):
            tokens = shape[1]
        self._set(shape[0] if shape else None, tokens, 1)

    def _set(self, batch: float | None, tokens_per_sample: float | None, steps: int) -> None:
        samples = self._samples if self._samples is not None else None if batch is None else batch * self._share
        self.samples = None if samples is None else samples * steps
        self.tokens = None if self.samples is None or tokens_per_sample is None else self.samples * tokens_per_sample


class _OtherCallbacks:
    """When the other callbacks' hooks around a step begin and end, so that their time is not taken for data wait.

    The last callback that ends a step after ours, and the first that begins one before ours, get their method wrapped on
    the instance (0.3 us a step); `release` puts it back. Where a callback does not allow that, its time counts as wait.
    """

    def __init__(self, callbacks: Sequence[Any], monitor: Any, queue: Any) -> None:
        self._tail_at = self._head_at = 0.0
        self.activity_after_step = "data_wait"
        self._wrapped: list[tuple[Any, str]] = []
        position = callbacks.index(monitor) if monitor in callbacks else len(callbacks)
        after = [one for one in callbacks[position + 1 :] if _overrides(one, "step_end")]
        before = [one for one in callbacks[:position] if _overrides(one, "step_begin")]
        if after and self._wrap(after[-1], "on_train_step_end", lambda method: _then(method, self._tail, queue)):
            self.activity_after_step = "other"
        if before:
            self._wrap(before[0], "on_train_step_begin", lambda method: _first(method, self._head))
        self.watching = bool(self._wrapped)

    def seconds_of_others(self, left_at: float, now: float) -> float:
        """Time that the other callbacks had since our hook ended at `left_at`: until the last one after us returned, and
        from the first one before us until now."""
        after = self._tail_at - left_at if self._tail_at > left_at else 0.0
        return after + (now - self._head_at if self._head_at > left_at else 0.0)

    def _tail(self, queue: Any) -> None:
        self._tail_at = monotonic()
        queue.activity = "data_wait"

    def _head(self) -> None:
        self._head_at = monotonic()

    def _wrap(self, callback: Any, name: str, wrapper: Callable[[Any], Any]) -> bool:
        try:
            setattr(callback, name, wrapper(getattr(callback, name)))
        except AttributeError:
            return False
        self._wrapped.append((callback, name))
        return True

    def release(self) -> None:
        for callback, name in self._wrapped:
            callback.__dict__.pop(name, None)
        self._wrapped.clear()


def _then(method: Callable[[Any], Any], mark: Callable[[Any], None], queue: Any) -> Callable[[Any], Any]:
    def marked(run_context: Any) -> Any:
        try:
            return method(run_context)
        finally:
            mark(queue)

    return marked


def _first(method: Callable[[Any], Any], mark: Callable[[], None]) -> Callable[[Any], Any]:
    def marked(run_context: Any) -> Any:
        mark()
        return method(run_context)

    return marked


def _overrides(callback: Any, hook: str) -> bool:
    kind = type(callback)
    return any(getattr(kind, name, None) is not getattr(Callback, name) for name in (hook, f"on_train_{hook}"))


def evaluation_values(params: Any) -> dict[str, Any]:
    """Results of an evaluation from the callback's parameters: `metrics`, and in `Model.fit` `eval_results`, whose names
    begin with `eval_`."""
    values = dict(params.get("metrics") or {})
    for name, value in (params.get("eval_results") or {}).items():
        values.setdefault(str(name).removeprefix("eval_"), value)
    return {name: value for name, value in values.items() if _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _global_step(optimizer: Any) -> int | None:
    """The optimiser's own step number, restored with its state. Read once, before any step is under way."""
    try:
        return int(optimizer.global_step.asnumpy()[0])
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return None


def _is_compiled(train_network: Any) -> bool:
    """Whether the network's graph (or, in PyNative mode, its first pass) was made before: by `Model.build`, or by an
    earlier `train`. MindSpore keeps the compiled graphs' names on the cell."""
    if getattr(train_network, "compile_cache", None):
        return True
    if getattr(train_network, _SEEN, False):
        return True
    object.__setattr__(train_network, _SEEN, True)
    return False


_SEEN = "_mindspore_exporter_seen"


def _batch_size(dataset: Any) -> int | None:
    try:
        return int(dataset.get_batch_size())
    except Exception:
        return None


def _feeds_whole_batch() -> bool:
    """Under semi-automatic parallelism with full_batch every rank is fed the global batch."""
    from mindspore import get_auto_parallel_context

    try:
        parallel = get_auto_parallel_context("parallel_mode") in ("semi_auto_parallel", "auto_parallel")
        return parallel and bool(get_auto_parallel_context("full_batch"))
    except (RuntimeError, ValueError):
        return False
