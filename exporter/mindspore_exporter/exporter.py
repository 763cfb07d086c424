"""`TrainingExporter`: life cycle of queue, worker, collectors and server, and the API for hand-written loops.

One exporter is active in a process. What a hook may call is marked "training thread"; those calls append and return.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from . import __version__, metrics, state
from . import baseline as baselines
from .checkpoints import look_for_whole_file
from .config import MonitorConfig, load
from .decode import retain
from .discovery import TargetFile, refresh_delay
from .errors import ConfigError, EndpointError
from .fileio import FileThread
from .identity import Identity, detect, in_kubernetes, is_scheduler
from .linger import ExitLinger, linger_limit, wait_for_last_scrape
from .pipeline import Pipeline
from .reasons import classify
from .recordqueue import RecordQueue
from .records import (
    CheckpointBegan,
    CheckpointEnded,
    CompileBegan,
    EvaluationBegan,
    EvaluationEnded,
    PhaseChanged,
    Record,
    RecordedValues,
    RunBegan,
    RunEnded,
    StepRecord,
)
from .registry import Registry
from .server import Health, MetricsServer, PageRequest
from .signals import SignalWatch
from .worker import Worker

log = logging.getLogger(__name__)

PORTS_PROBED = 64
"""Ports tried above a busy one: four jobs of 16 ranks on a node."""
PROVEN_READS = 20
"""Steps in which the worker's late read is compared with one at once (decision 9 of the architecture)."""
SIGNAL_LINGER_SECONDS = 5.0
STATE_SECONDS = 30.0
"""Time between two writes of the state file: what a killed attempt may lose."""
IN_FLIGHT_SECONDS, IN_FLIGHT_FACTOR = 25.0, 10.0
"""A SIGTERM that finds a step in flight for longer than both ended a hung rank, it did not interrupt a healthy one:
MindSpore itself terminates a rank whose collective timed out (after 30 s on CPU)."""

_active: TrainingExporter | None = None
_active_lock = threading.Lock()


class TrainingExporter:
    """Exports the training of this process.

    When to use: for a training loop of your own; under `Model.train` use `PrometheusMonitor`.

        with TrainingExporter("monitor.yaml") as exporter:
            for batch in dataset:
                with exporter.step(samples=32) as step:
                    step.record(loss=train_step(batch))

    Arguments: the YAML's path (or a loaded `MonitorConfig`), and keyword arguments that go before environment and YAML.
    Raises ConfigError for a configuration that cannot be used, unless `on_config_error: warn`.
    """

    def __init__(self, config: str | Path | MonitorConfig | None = None, /, **overrides: Any) -> None:
        self.config = config if isinstance(config, MonitorConfig) else load_or_off(config, **overrides)
        self.queue = RecordQueue()
        self.read_mode = self.config.read
        self._proofs_left = PROVEN_READS if self.read_mode == "auto" else 0
        self.reads_in_hook = self.read_mode != "worker"
        """Whether the hook has more to do with a step's outputs than to keep them."""
        self.hook_errors = 0
        self.identity: Identity | None = None
        self._running = False
        self._failed_start = False
        self._files = FileThread()
        self._target: TargetFile | None = None
        self._state: state.RunState | None = None
        self._state_file: state.StateFile | None = None
        self._next_touch = self._next_state = 0.0
        self._awaited: list[tuple[str, float, int]] = []
        self._final_at: float | None = None
        self._ended = False
        self._end_told = False
        self._loop: _LoopState | None = None

    # --- life cycle -----------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether queue, worker and (where a port was to be had) endpoint are open."""
        return self._running

    @property
    def port(self) -> int | None:
        """The port really bound, None without an endpoint."""
        return self._server.port if self._running else None

    def start(self) -> TrainingExporter:
        """Open everything. Does nothing where the exporter is disabled or in msrun's scheduler; an endpoint that cannot
        be opened is logged and training goes on without. Raises ConfigError for a web configuration or a baseline that
        cannot be used, unless `on_config_error: warn`. Training thread, once."""
        if self._running or self._failed_start or not self.config.enabled or is_scheduler():
            return self
        _replace_active(self)
        try:
            self._make()
            self._open()
        except ConfigError as error:
            self._shut(0.5)
            self._failed_start = True
            if self.config.on_config_error == "fail":
                raise
            log.error("exporter: off: %s", error)
        except Exception:
            # Whatever it is, it is ours and not the training's.
            self._shut(0.5)
            self._failed_start = True
            log.exception("exporter: could not start; the training goes on without it")
        return self

    def _make(self) -> None:
        config = self.config
        self.identity = identity = detect(config.run)
        self.registry = Registry(identity.constant_labels())
        self.registry.info(metrics.BUILD_INFO, versions())
        baseline = None if config.baseline.source == "self" else baselines.load(Path(config.baseline.source))
        self.pipeline = Pipeline(config, identity, self.registry, baseline, late_read_failed=self._read_in_hook)
        self._server = MetricsServer(
            self._render,
            health=self._health,
            default_profile=config.profile,
            title=f"{identity.run} rank {identity.rank}",
            web_config=config.web_config,
            scraped=self._count_scrape,
        )
        self.worker = Worker(self.queue, self.pipeline, lambda: self.hook_errors, self._published)
        self._signals = SignalWatch(self._signalled, limit=SIGNAL_LINGER_SECONDS + 1.0)

    def _open(self) -> None:
        self._open_endpoint()
        self._announce()
        self._running = True
        self.worker.start()
        self._restore_state()
        if self.config.signals:
            self._signals.install()
        _exit_linger.add(self)
        _watch_forks()

    def _open_endpoint(self) -> None:
        config, identity = self.config, self.identity
        assert identity is not None
        probing = config.port_probe == "on" or (config.port_probe == "auto" and not in_kubernetes())
        port = config.port and config.port + identity.local_rank
        try:
            bound = self._server.start(config.listen, port, probe=PORTS_PROBED if probing else 0)
        except EndpointError as error:
            log.error("exporter: no endpoint, this rank will not be scraped: %s", error)
            return
        log.info(
            "exporter: run %s rank %d at %s://%s:%d/metrics, %s",
            identity.run,
            identity.rank,
            "https" if self._server.tls else "http",
            config.listen,
            bound,
            "authenticated" if self._server.authenticated else "unauthenticated",
        )

    def stop(self, limit: float = 2.0) -> None:
        """Close everything: afterwards no socket, thread or pipe is left. Idempotent."""
        if self._running:
            self._shut(limit)

    def _shut(self, limit: float) -> None:
        global _active
        was_running, self._running = self._running, False
        if was_running:
            self.worker.stop(limit)
            self._save_state()
        if self._target is not None:
            self._files.submit("remove target", self._target.remove, limit)
            self._files.flush(limit)
        if hasattr(self, "_signals"):
            self._signals.uninstall()
            self._server.stop()
        self._files.stop(limit)
        _exit_linger.discard(self)
        if _active is self:
            _active = None

    def __enter__(self) -> TrainingExporter:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(kind, error)

    def finish(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        *,
        stop_requested: bool = False,
    ) -> None:
        """The training ended, by itself or by an exception. Training thread; the endpoint stays as long as the process."""
        if not self._running:
            return
        try:
            reason = classify(kind, error, stop_requested=stop_requested)
            after_nonfinite = classify(kind, error, stop_requested=stop_requested, nonfinite_seen=True)
            tentative = kind is not None and issubclass(kind, SystemExit)
            self.put(RunEnded(time.monotonic(), time.time(), reason, after_nonfinite, tentative))
            self._end_told = True
        except Exception:
            self.hook_failed("finish")

    # --- what hooks call ------------------------------------------------------------------------------------------

    def put(self, record: Record) -> None:
        """Hand a record to the worker. Training thread: appends and returns."""
        if self._running:
            self.queue.put(record)

    def run_began(self, record: RunBegan) -> None:
        """A training begins, the first or another one. Training thread."""
        self._end_told = False
        self.put(record)

    def hook_failed(self, hook: str) -> None:
        """Count an error in a hook; the first is logged. Called in an `except` block, never raises."""
        self.hook_errors += 1
        if self.hook_errors == 1:
            log.exception("exporter: error in %s; the training goes on, further errors are only counted", hook)

    def read_was_proven(self) -> None:
        """One more step's outputs were read at once, for the worker to compare with. Training thread."""
        self._proofs_left -= 1
        if self._proofs_left <= 0 and self.read_mode == "auto":
            self.reads_in_hook = False

    def await_checkpoint(self, file: str, began_wall: float, step: int) -> None:
        """An asynchronous save still has to make `file` whole. Training thread."""
        self._awaited.append((file, began_wall, step))

    # --- the API for hand-written loops ---------------------------------------------------------------------------

    def begin(
        self, *, planned_steps: int | None = None, resumed_step: int = 0, steps_per_epoch: int | None = None
    ) -> None:
        """Say what is known before the first step: the global step at which the run will be done, the global step it
        resumes from. Optional; without it the loop counts from 0."""
        self._loop = _LoopState(self, resumed_step, steps_per_epoch)
        self.run_began(
            RunBegan(
                time.monotonic(),
                time.time(),
                resumed_step,
                planned_steps,
                steps_per_epoch,
                1,
                False,
                1,
                ("",),
                None,
                None,
            )
        )

    def step(self, samples: float | None = None, tokens: float | None = None) -> StepScope:
        """Scope of one training step; `samples` and `tokens` are this rank's share of it."""
        if self._loop is None:
            self.begin()
        assert self._loop is not None
        return StepScope(self._loop, samples, tokens)

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Scope of a phase that only the loop knows: `loading` or `paused`. Raises ValueError for another name."""
        if phase not in ("loading", "paused"):
            raise ValueError(f"phase {phase!r} cannot be set; allowed: loading, paused")
        self.put(PhaseChanged(time.monotonic(), time.time(), phase))
        try:
            yield
        finally:
            self.put(PhaseChanged(time.monotonic(), time.time(), ""))

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Scope of a checkpoint that the loop writes; an exception in it counts as a failed checkpoint."""
        step, failed = self._loop.step if self._loop else 0, True
        self.put(CheckpointBegan(time.monotonic(), time.time(), step))
        try:
            yield
            failed = False
        finally:
            self.put(CheckpointEnded(time.monotonic(), time.time(), step, failed))

    @contextmanager
    def evaluation(self) -> Iterator[dict[str, Any]]:
        """Scope of an evaluation; put its results into the dictionary that it gives."""
        step, values = self._loop.step if self._loop else 0, dict[str, Any]()
        self.put(EvaluationBegan(time.monotonic(), time.time(), step))
        try:
            yield values
        finally:
            self.put(EvaluationEnded(time.monotonic(), time.time(), step, values))

    # --- called in the worker -------------------------------------------------------------------------------------

    def _published(self) -> None:
        """After each publication, about once a second: everything slow goes to the file thread from here."""
        now = time.monotonic()
        if self._target is not None and now >= self._next_touch:
            self._next_touch = now + refresh_delay()
            self._files.submit("touch target", self._target.touch)
        if now >= self._next_state:
            self._next_state = now + STATE_SECONDS
            self._save_state()
        if self._awaited:
            self._files.submit(
                "look for checkpoint", functools.partial(self._look_for_checkpoints, list(self._awaited))
            )
        ended = self.pipeline.end_reason is not None
        if ended and not self._ended:
            self._final_at = now
            self._server.invalidate()
        self._ended = ended

    def _read_in_hook(self) -> None:
        """A late read was wrong once: from now on outputs are read on the training thread, every `read_every` steps."""
        if self.read_mode == "auto":
            self.read_mode = "hook"
            self.reads_in_hook = True
            log.warning(
                "exporter: an output read by the worker differs from the one read at once; from now on outputs"
                " are read in the hook every %d steps",
                self.config.read_every,
            )

    def _restore_state(self) -> None:
        directory = state.default_directory(self.config, os.environ)
        if directory is None or self.identity is None:
            return
        identity = self.identity
        self._state_file = state.StateFile(
            directory, identity.run, identity.rank, identity.world_size, state.config_hash(self.config)
        )

        def restored(found: state.RunState | None, error: BaseException | None) -> None:
            if error is None:
                self.worker.call(functools.partial(self._restored, found))
            else:
                log.warning(
                    "exporter: the state of earlier attempts cannot be read, restarts are not counted: %s", error
                )

        self._files.submit("load state", self._state_file.load, done=restored)

    def _restored(self, found: state.RunState | None) -> None:
        self._state = state.next_attempt(found)
        self.pipeline.restore(self._state)
        self._save_state()

    def _save_state(self) -> None:
        if self._state is None or self._state_file is None:
            return
        self._state = state.advance(self._state, self.pipeline.step, self.pipeline.baseline)
        self._files.submit("save state", functools.partial(self._state_file.save, self._state))

    def _announce(self) -> None:
        config, identity, server = self.config.discovery, self.identity, self._server
        if config.directory is None or identity is None or server.port is None:
            return
        labels = {
            "__meta_mindspore_world_size": str(identity.world_size),
            "__meta_mindspore_host": identity.host,
            "__meta_mindspore_local_rank": str(identity.local_rank),
            **config.labels,
        }
        self._target = TargetFile(
            config.directory,
            identity.run,
            identity.rank,
            address=config.address or identity.host,
            port=server.port,
            scheme="https" if server.tls else "http",
            labels=labels,
        )
        self._next_touch = time.monotonic() + refresh_delay()
        self._files.submit("write target", self._target.write, done=_log_file_error)

    def _look_for_checkpoints(self, awaited: list[tuple[str, float, int]]) -> None:
        """In the file thread: the file system may hang."""
        for entry in awaited:
            whole = look_for_whole_file(*entry)
            if whole is not None:
                self._awaited.remove(entry)
                self.queue.put(whole)

    # --- called in the HTTP threads -------------------------------------------------------------------------------

    def _render(self, request: PageRequest) -> bytes:
        return self.registry.render(request.openmetrics, request.profile, request.groups)

    def _health(self) -> Health:
        return Health(self.worker.alive, "" if self.worker.alive else "the worker has stopped")

    def _count_scrape(self, result: str) -> None:
        self.registry.add(metrics.SCRAPES, 1, result)

    # --- ends -----------------------------------------------------------------------------------------------------

    def _signalled(self, signum: int) -> None:
        """In the signal watcher's thread: publish the final state, wait for its scrape, take the target back."""
        deadline = time.monotonic() + SIGNAL_LINGER_SECONDS
        reason, self._end_told = self._signal_reason(), True
        self.queue.put(RunEnded(time.monotonic(), time.time(), reason, reason))
        self.worker.flush(1.0)
        self._save_state()
        self._wait_for_last_scrape(deadline - time.monotonic())
        if self._target is not None:
            self._files.submit("remove target", self._target.remove)
        self._files.flush(max(0.1, deadline - time.monotonic()))

    def _signal_reason(self) -> str:
        """Reason by the sender, where the system tells it, else by what the signal interrupted."""
        reason = self._signals.reason()
        if reason != "sigterm" or self._signals.sender_pid() is not None:
            return reason
        usual = self.pipeline.usual_record_seconds or 0.0
        in_flight = self.pipeline.phases.phase == "training" and self.queue.activity == "step"
        if in_flight and self.pipeline.silent_for(time.monotonic()) > max(IN_FLIGHT_SECONDS, IN_FLIGHT_FACTOR * usual):
            return "self_terminated"
        return "sigterm"

    def linger(self) -> None:
        """At interpreter exit: wait, bounded, until every scraper has the final page, then take the target back."""
        if not self._running:
            return
        if not self._end_told:
            self.finish()
        self.worker.flush(2.0)
        self._wait_for_last_scrape(linger_limit(self.config.linger_seconds, self._server.scrapers()))
        self.stop()

    def _wait_for_last_scrape(self, limit: float) -> None:
        final_at = self._final_at if self._final_at is not None else time.monotonic()
        wait_for_last_scrape(lambda: self._server.unserved_since(final_at), limit)

    def abandon_in_child(self) -> None:
        """In a forked child: hold neither port, lock, pipe nor tensor, and never speak for the parent."""
        self._running = False
        self.queue.clear()
        self._server.abandon_in_child()
        self._files.abandon_in_child()
        self._signals.abandon_in_child()


class _LoopState:
    """Counters of a hand-written loop, on the training thread."""

    def __init__(self, exporter: TrainingExporter, step: int, steps_per_epoch: int | None) -> None:
        self.exporter = exporter
        self.step = step
        self.steps_per_epoch = steps_per_epoch
        self.first = True


class StepScope:
    """Scope of one step of a hand-written loop; `record` says what came out of it."""

    __slots__ = ("_began", "_loop", "_samples", "_tokens", "_values")

    def __init__(self, loop: _LoopState, samples: float | None, tokens: float | None) -> None:
        self._loop = loop
        self._samples = samples
        self._tokens = tokens
        self._values: RecordedValues | None = None
        self._began = 0.0

    def record(
        self,
        *,
        loss: Any = None,
        learning_rate: Any = None,
        gradient_norm: Any = None,
        parameter_norm: Any = None,
        update_ratio: Any = None,
        loss_scale: Any = None,
        overflow: Any = None,
        components: Mapping[str, Any] | None = None,
    ) -> None:
        """Values of this step: numbers or tensors of one element, read later by the worker. `loss` is the total (or a
        dictionary of named losses), `learning_rate` a value or a sequence by group, `components` the loss's parts."""
        try:
            losses: dict[str, Any] = (
                dict(loss) if isinstance(loss, Mapping) else {} if loss is None else {"total": loss}
            )
            rates = tuple(learning_rate) if isinstance(learning_rate, (list, tuple)) else (learning_rate,)
            self._values = RecordedValues(
                losses=retain({**losses, **(components or {})}),
                learning_rates=retain(tuple(rate for rate in rates if rate is not None)),
                gradient_norm=retain(gradient_norm),
                parameter_norm=retain(parameter_norm),
                update_ratio=retain(update_ratio),
                loss_scale=retain(loss_scale),
                overflow=retain(overflow),
            )
        except Exception:
            self._loop.exporter.hook_failed("step.record")

    def __enter__(self) -> StepScope:
        loop = self._loop
        self._began = time.monotonic()
        loop.exporter.queue.activity = "step"
        if loop.first:
            loop.exporter.put(CompileBegan(self._began, time.time()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended, loop = time.monotonic(), self._loop
        if kind is not None and self._values is None:
            return
        try:
            loop.step += 1
            epoch = (loop.step - 1) // loop.steps_per_epoch + 1 if loop.steps_per_epoch else None
            loop.exporter.queue.activity = "data_wait"
            if loop.exporter.running:
                loop.exporter.queue.put_step(
                    StepRecord(
                        loop.step,
                        1,
                        epoch,
                        self._began,
                        ended,
                        time.time(),
                        0.0,
                        0.0,
                        self._values,
                        None,
                        self._samples,
                        self._tokens,
                        None,
                        None,
                        loop.first,
                    )
                )
            loop.first = False
        except Exception:
            loop.exporter.hook_failed("step")


def load_or_off(path: str | Path | None, **overrides: Any) -> MonitorConfig:
    """The configuration; a bad one ends the run, or, with `on_config_error: warn`, gives an exporter that stays off."""
    try:
        return load(path, **overrides)
    except ConfigError as error:
        if overrides.get("on_config_error", os.environ.get("MINDSPORE_EXPORTER_ON_CONFIG_ERROR")) != "warn":
            raise
        log.error("exporter: off: %s", error)
        return MonitorConfig.model_construct(enabled=False)


def versions() -> dict[str, str]:
    """Versions for `mindspore_exporter_build_info`; of MindSpore only what is imported already."""
    import platform
    import sys

    def of(module: str) -> str:
        return str(getattr(sys.modules.get(module), "__version__", ""))

    return {
        "version": __version__,
        "mindspore": of("mindspore"),
        "mindformers": of("mindformers"),
        "python": platform.python_version(),
    }


def active() -> TrainingExporter | None:
    """The exporter that runs in this process, if any."""
    return _active


def _replace_active(exporter: TrainingExporter) -> None:
    global _active
    with _active_lock:
        before, _active = _active, exporter
    if before is not None and before is not exporter:
        before.stop()


def _log_file_error(result: object, error: BaseException | None) -> None:
    if error is not None:
        log.error("exporter: the target file cannot be written, Prometheus will not find this rank by it: %s", error)


_exit_linger: ExitLinger = ExitLinger()
_forks_watched = False


def _watch_forks() -> None:
    global _forks_watched
    if not _forks_watched:
        _forks_watched = True
        os.register_at_fork(after_in_child=_abandon_in_child)


def _abandon_in_child() -> None:
    global _active
    exporter, _active = _active, None
    if exporter is not None:
        exporter.abandon_in_child()
