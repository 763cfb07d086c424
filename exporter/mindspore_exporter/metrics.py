"""The catalogue: every metric family of the exporter, declared once.

A new family is declared here first; the reference (`mindspore-exporter metrics`), the page, the dashboards' and the rules'
checks all read this declaration. Values live in `registry.py`; this module holds no state.

Units are base units and part of the name. A value that is unknown, unsupported or invalid is absent from the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["gauge", "counter", "histogram", "summary", "info", "stateset"]

Labels = tuple[str, ...]

PHASES = ("starting", "loading", "compiling", "training", "evaluating", "checkpointing", "paused", "finished", "failed")
END_REASONS = (
    "finished",
    "stop_requested",
    "sigterm",
    "self_terminated",
    "keyboard_interrupt",
    "out_of_memory",
    "collective_timeout",
    "device_error",
    "data_error",
    "checkpoint_error",
    "non_finite",
    "exception",
)
ACTIVITIES = ("startup", "load", "compile", "step", "data_wait", "checkpoint", "evaluation", "paused", "other")
ERROR_STAGES = ("hook", "decode", "collector", "publish")
LEAN_ACTIVITIES = ("step", "data_wait", "checkpoint", "compile", "other")

CONSTANT_LABELS = ("run", "rank")
"""Carried by every series; their values are the process's and never change."""

FORBIDDEN_LABELS = ("job", "instance", "namespace", "pod", "container", "node", "cluster")
"""Target labels: the scrape attaches them, the exporter never emits them."""


@dataclass(frozen=True)
class Family:
    """One metric family.

    `values` gives the closed set of values of the (only) label of a counter or state set; a counter exists at 0 for
    each of them as soon as its group is active. `cap` bounds the number of values of a user-named label. `lean` says
    which series the lean profile keeps: all, none, or those whose label values are listed. In lean a histogram or
    summary keeps `_sum` and `_count` only.
    """

    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    group: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    cap: int | None = None
    lean: bool | tuple[str, ...] = False
    lean_sum: bool = False
    nan_allowed: bool = False
    sample_names: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        suffixes = {"counter": ("",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
        object.__setattr__(self, "sample_names", tuple(self.name + s for s in suffixes.get(self.kind, ("",))))


CATALOGUE: dict[str, Family] = {}


def _declare(group: str, *families: Family) -> None:
    for family in families:
        if family.name in CATALOGUE:
            raise ValueError(f"metric family {family.name} is declared twice")
        object.__setattr__(family, "group", group)
        CATALOGUE[family.name] = family


def _gauge(
    name: str,
    help_text: str,
    *labels: str,
    lean: bool | tuple[str, ...] = False,
    cap: int | None = None,
    nan_allowed: bool = False,
) -> Family:
    return Family(name, "gauge", help_text, labels, lean=lean, cap=cap, nan_allowed=nan_allowed)


def _counter(
    name: str,
    help_text: str,
    label: str = "",
    values: tuple[str, ...] = (),
    *,
    lean: bool | tuple[str, ...] = False,
    lean_sum: bool = False,
) -> Family:
    return Family(name, "counter", help_text, (label,) if label else (), values=values, lean=lean, lean_sum=lean_sum)


# --- run and rank -------------------------------------------------------------------------------------------------

RANK_INFO = Family(
    "mindspore_rank_info",
    "info",
    "Identity of this rank: host, local rank, run id and parallel coordinates. Join with max by (cluster, namespace, job,"
    " run, rank, <label>).",
    ("host", "local_rank", "run_id", "dp_rank", "tp_rank", "pp_rank", "cp_rank", "ep_rank", "pp_stages"),
    lean=True,
)
BUILD_INFO = Family(
    "mindspore_exporter_build_info",
    "info",
    "Versions of the exporter, MindSpore, MindSpore Transformers and Python.",
    ("version", "mindspore", "mindformers", "python"),
    lean=True,
)
WORLD_SIZE = _gauge("mindspore_train_world_size", "Ranks that the run should have.", lean=True)
PHASE = Family(
    "mindspore_train_phase", "stateset", "Phase of this rank; exactly one is 1.", ("phase",), values=PHASES, lean=True
)
PHASE_START = _gauge("mindspore_train_phase_start_timestamp_seconds", "When the present phase began.", lean=True)
END_TIMESTAMP = _gauge(
    "mindspore_train_end_timestamp_seconds",
    "When training ended, with the reason; absent before the end and removed when training goes on.",
    "reason",
)
ATTEMPT = _gauge(
    "mindspore_train_attempt",
    "1, and 1 more for each restart of the run on this rank; absent where no state survives a restart.",
    lean=True,
)
START_TIMESTAMP = _gauge("mindspore_train_start_timestamp_seconds", "When this attempt started.", lean=True)
RESUMED_STEP = _gauge("mindspore_train_resumed_step", "Global step from which this attempt began.", lean=True)
REPEATED_STEPS = _counter(
    "mindspore_train_repeated_steps_total", "Steps done again that an earlier attempt of the run had done."
)
NETWORK_TRAINING = _gauge(
    "mindspore_train_network_training",
    "1 when the network was in training mode at the last step, 0 when it was not (dropout off).",
)

_declare(
    "run",
    RANK_INFO,
    BUILD_INFO,
    WORLD_SIZE,
    PHASE,
    PHASE_START,
    END_TIMESTAMP,
    ATTEMPT,
    START_TIMESTAMP,
    RESUMED_STEP,
    REPEATED_STEPS,
    NETWORK_TRAINING,
)

# --- progress and speed -------------------------------------------------------------------------------------------

STEP = _gauge("mindspore_train_step", "Global step last done, resumed steps included.", lean=True)
EPOCH = _gauge("mindspore_train_epoch", "Epoch of the last step, counted from 1.")
STEPS_PLANNED = _gauge(
    "mindspore_train_steps_planned", "Global step at which the run will be done, where it is known.", lean=True
)
STEPS = _counter("mindspore_train_steps_total", "Steps done by this process.", lean=True)
SAMPLES = _counter(
    "mindspore_train_samples_total",
    "This rank's share of the samples trained on: the sum over the run's ranks is the run's in every layout.",
    lean=True,
)
TOKENS = _counter("mindspore_train_tokens_total", "This rank's share of the tokens trained on.", lean=True)
LAST_STEP_TIMESTAMP = _gauge(
    "mindspore_train_last_step_timestamp_seconds", "Wall time at which the last step ended on the host.", lean=True
)
STEPS_PER_RECORD = _gauge(
    "mindspore_train_steps_per_record",
    "Steps that one callback covers (sink size); everything per step is per record when it is above 1.",
)
STEP_SECONDS = Family(
    "mindspore_train_step_seconds",
    "histogram",
    "Host time from the end of a step to the end of the next, without intervals that hold a checkpoint, an evaluation or"
    " a compile.",
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0),
    lean=True,
)
DATA_WAIT_SECONDS = Family(
    "mindspore_train_data_wait_seconds",
    "histogram",
    "Time from the end of a step to the begin of the next, less the time of other callbacks; absent in sink mode.",
    buckets=(0.001, 0.01, 0.1, 0.5, 2.0, 10.0),
    lean=True,
)
COMPILE_SECONDS = _gauge("mindspore_train_compile_seconds", "First step (or build) of each graph, summed.")
ACTIVITY_SECONDS = _counter(
    "mindspore_train_activity_seconds_total",
    "Where the wall time of this process went.",
    "activity",
    ACTIVITIES,
    lean=LEAN_ACTIVITIES,
)
STALL_TIMEOUT = _gauge(
    "mindspore_train_stall_timeout_seconds",
    "Silence after which a training rank counts as stalled: the larger of a floor and 10 times the"
    " usual time between records.",
    lean=True,
)
MODEL_FLOPS = _gauge(
    "mindspore_train_model_flops_per_step", "Floating-point operations of one step, this rank's share."
)
PEAK_FLOPS = _gauge(
    "mindspore_train_peak_flops", "Peak floating-point operations per second of the device in the run's precision."
)

_declare(
    "progress",
    STEP,
    EPOCH,
    STEPS_PLANNED,
    STEPS,
    SAMPLES,
    TOKENS,
    LAST_STEP_TIMESTAMP,
    STEPS_PER_RECORD,
    STEP_SECONDS,
    DATA_WAIT_SECONDS,
    COMPILE_SECONDS,
    ACTIVITY_SECONDS,
    STALL_TIMEOUT,
    MODEL_FLOPS,
    PEAK_FLOPS,
)

# --- optimisation -------------------------------------------------------------------------------------------------

LOSS = _gauge(
    "mindspore_train_loss",
    "Loss of the last step: component total, then the parts; NaN when it is NaN.",
    "component",
    lean=("total",),
    cap=17,
    nan_allowed=True,
)
LOSS_VALID = _gauge("mindspore_train_loss_valid", "1 where this rank's loss is the run's loss.", lean=True)
LEARNING_RATE = _gauge(
    "mindspore_train_learning_rate",
    "Learning rate of the step just done, by optimiser group.",
    "group",
    lean=("0",),
    cap=8,
)
GRADIENT_NORM = _gauge(
    "mindspore_train_gradient_norm",
    "Global norm of the gradients, before clipping where the training reports it so.",
    lean=True,
    nan_allowed=True,
)
PARAMETER_NORM = _gauge("mindspore_train_parameter_norm", "Global norm of the parameters.")
UPDATE_RATIO = _gauge("mindspore_train_update_ratio", "Norm of the last update divided by the norm of the parameters.")
LOSS_SCALE = _gauge("mindspore_train_loss_scale", "Loss scale of the last step.")
LOSS_SCALE_FLOOR = _gauge(
    "mindspore_train_loss_scale_floor", "Lowest loss scale the scaler goes to; absent for a fixed scale."
)
OVERFLOW_STEPS = _counter(
    "mindspore_train_overflow_steps_total",
    "Steps whose update was skipped or flagged for overflow by the loss scaler.",
    lean=True,
)
NONFINITE = _counter(
    "mindspore_train_nonfinite_total",
    "Steps whose value was NaN or infinite, counted at the source;"
    " steps skipped by the loss scaler are not among them.",
    "quantity",
    ("loss", "gradient_norm"),
    lean=True,
)
LOSS_WINDOW = _gauge(
    "mindspore_train_loss_window",
    "Statistics of the finite losses of the last window of records.",
    "stat",
    lean=("mean", "stddev"),
)
LOSS_SLOPE = _gauge("mindspore_train_loss_slope", "Robust slope of the loss over the window, per 1,000 steps.")
LOSS_BEST = _gauge("mindspore_train_loss_best", "Lowest window mean of this attempt.", lean=True)
STEPS_SINCE_BEST = _gauge("mindspore_train_steps_since_best", "Steps since the lowest window mean.", lean=True)
GRADIENT_NORM_WINDOW_MAX = _gauge(
    "mindspore_train_gradient_norm_window_max", "Largest finite gradient norm of the window."
)
SPIKES = _counter(
    "mindspore_train_spikes_total",
    "Values above the window's median by 10 median absolute deviations and 5 % of the median.",
    "quantity",
    ("loss", "gradient_norm", "step_seconds"),
    lean=("loss",),
)
SMALL_GRADIENT_STEPS = _gauge(
    "mindspore_train_small_gradient_steps", "Consecutive steps whose gradient norm was under the floor."
)
BASELINE_LOSS = _gauge(
    "mindspore_train_baseline_loss",
    "Loss of the baseline: mean, standard deviation of the detrended"
    " loss, maximum; absent until the baseline is ready.",
    "stat",
    lean=("stddev", "max"),
)
BASELINE_STEP_SECONDS = _gauge("mindspore_train_baseline_step_seconds", "Median step time of the baseline.")
BASELINE_SAMPLES = _gauge(
    "mindspore_train_baseline_samples_per_second", "Samples per second of the baseline, this rank's share.", lean=True
)
BASELINE_GRADIENT_NORM = _gauge("mindspore_train_baseline_gradient_norm", "Median gradient norm of the baseline.")
BASELINE_UTILIZATION = _gauge("mindspore_train_baseline_utilization_ratio", "Mean device utilisation of the baseline.")
THRESHOLD = _gauge(
    "mindspore_train_threshold",
    "A bound that this run sets or learnt; rules prefer it to their own default. Rank 0 only.",
    "name",
)

_declare(
    "optimisation",
    LOSS,
    LOSS_VALID,
    LEARNING_RATE,
    GRADIENT_NORM,
    PARAMETER_NORM,
    UPDATE_RATIO,
    LOSS_SCALE,
    LOSS_SCALE_FLOOR,
    OVERFLOW_STEPS,
    NONFINITE,
    LOSS_WINDOW,
    LOSS_SLOPE,
    LOSS_BEST,
    STEPS_SINCE_BEST,
    GRADIENT_NORM_WINDOW_MAX,
    SPIKES,
    SMALL_GRADIENT_STEPS,
    BASELINE_LOSS,
    BASELINE_STEP_SECONDS,
    BASELINE_SAMPLES,
    BASELINE_GRADIENT_NORM,
    BASELINE_UTILIZATION,
    THRESHOLD,
)

# --- checkpoints, evaluation, guards ------------------------------------------------------------------------------

CHECKPOINT_LAST_TIMESTAMP = _gauge(
    "mindspore_checkpoint_last_timestamp_seconds", "When the last checkpoint was whole.", lean=True
)
CHECKPOINT_LAST_STEP = _gauge("mindspore_checkpoint_last_step", "Global step of the last whole checkpoint.")
CHECKPOINT_LAST_DURATION = _gauge(
    "mindspore_checkpoint_last_duration_seconds",
    "Duration of the last checkpoint; asynchronous saves until the file was whole.",
)
CHECKPOINT_LONGEST = _gauge("mindspore_checkpoint_longest_seconds", "Longest checkpoint of this process.")
CHECKPOINT_SECONDS = Family("mindspore_checkpoint_seconds", "summary", "Time spent saving checkpoints.")
CHECKPOINT_FAILURES = _counter("mindspore_checkpoint_failures_total", "Checkpoints that failed.", lean=True)
_declare(
    "checkpoint",
    CHECKPOINT_LAST_TIMESTAMP,
    CHECKPOINT_LAST_STEP,
    CHECKPOINT_LAST_DURATION,
    CHECKPOINT_LONGEST,
    CHECKPOINT_SECONDS,
    CHECKPOINT_FAILURES,
)

EVAL_VALUE = _gauge("mindspore_eval_value", "Result of the last evaluation.", "metric", cap=16, nan_allowed=True)
EVAL_LAST_STEP = _gauge("mindspore_eval_last_step", "Global step of the last evaluation.")
EVAL_LAST_DURATION = _gauge("mindspore_eval_last_duration_seconds", "Duration of the last evaluation.")
_declare("evaluation", EVAL_VALUE, EVAL_LAST_STEP, EVAL_LAST_DURATION)

GUARD_ACTIONS = Family("mindspore_guard_actions_total", "counter", "Actions taken by the guards.", ("guard", "action"))
_declare("guard", GUARD_ACTIONS)

# --- model internals (opt-in) -------------------------------------------------------------------------------------

MODEL_PARAMETER_MEAN = _gauge("mindspore_model_parameter_mean", "Mean of a parameter.", "parameter", cap=64)
MODEL_PARAMETER_STDDEV = _gauge(
    "mindspore_model_parameter_stddev", "Standard deviation of a parameter.", "parameter", cap=64
)
MODEL_PARAMETER_NORM = _gauge("mindspore_model_parameter_norm", "Norm of a parameter.", "parameter", cap=64)
MODEL_GRADIENT_NORM = _gauge(
    "mindspore_model_gradient_norm", "Norm of a parameter's gradient.", "parameter", cap=64, nan_allowed=True
)
MODEL_LOCAL_GRADIENT_NORM = _gauge(
    "mindspore_model_local_gradient_norm",
    "Norm of a parameter's gradient on this rank, before the all-reduce.",
    "parameter",
    cap=64,
    nan_allowed=True,
)
MODEL_STABLE_RANK = _gauge(
    "mindspore_model_stable_rank", "Squared Frobenius norm over squared spectral norm.", "parameter", cap=64
)
MODEL_ATTENTION_DENSITY = _gauge(
    "mindspore_model_attention_density",
    "Share of attention probabilities above epsilon among unmasked positions.",
    "layer",
    cap=64,
)
MODEL_ATTENTION_ENTROPY = _gauge(
    "mindspore_model_attention_entropy", "Mean entropy of the attention rows, in nats.", "layer", cap=64
)
MODEL_ATTENTION_ENTROPY_BASELINE = _gauge(
    "mindspore_model_attention_entropy_baseline", "Baseline of the attention entropy, in nats.", "layer", cap=64
)
MODEL_MAX_ATTENTION_LOGIT = _gauge("mindspore_model_max_attention_logit", "Largest attention logit.", "layer", cap=64)
MODEL_TOKEN_LOSS = Family(
    "mindspore_model_token_loss", "histogram", "Loss by token.", buckets=(0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
)
MODEL_CLASS_LOSS = _gauge("mindspore_model_class_loss", "Loss by class.", "class", cap=64)
MODEL_PERPLEXITY = _gauge("mindspore_model_perplexity", "Exponential of the token loss.")
MODEL_EXPERT_LOAD = Family(
    "mindspore_model_expert_load", "gauge", "Share of tokens routed to an expert.", ("layer", "expert"), cap=64
)
_declare(
    "model",
    MODEL_PARAMETER_MEAN,
    MODEL_PARAMETER_STDDEV,
    MODEL_PARAMETER_NORM,
    MODEL_GRADIENT_NORM,
    MODEL_LOCAL_GRADIENT_NORM,
    MODEL_STABLE_RANK,
    MODEL_ATTENTION_DENSITY,
    MODEL_ATTENTION_ENTROPY,
    MODEL_ATTENTION_ENTROPY_BASELINE,
    MODEL_MAX_ATTENTION_LOGIT,
    MODEL_TOKEN_LOSS,
    MODEL_CLASS_LOSS,
    MODEL_PERPLEXITY,
    MODEL_EXPERT_LOAD,
)

# --- device and allocator -----------------------------------------------------------------------------------------

_SENSORS = ("core", "memory")
_LINKS = ("nvlink", "hccs", "roce")
DEVICE_INFO = Family(
    "mindspore_device_info",
    "info",
    "The device of this rank.",
    ("vendor", "model", "uuid", "pci_bus_id", "driver_version", "device_id", "device_phy_id", "mig"),
)
DEVICE_TEMPERATURE = _gauge(
    "mindspore_device_temperature_celsius", "Temperature of the device.", "sensor", lean=("core",)
)
DEVICE_TEMPERATURE_LIMIT = _gauge(
    "mindspore_device_temperature_limit_celsius", "Temperature at which the device slows down.", "sensor"
)
DEVICE_POWER = _gauge("mindspore_device_power_watts", "Power drawn by the device.")
DEVICE_POWER_LIMIT = _gauge("mindspore_device_power_limit_watts", "Power limit of the device.")
DEVICE_ENERGY = _counter("mindspore_device_energy_joules_total", "Energy used by the device.")
DEVICE_MEMORY_USED = _gauge(
    "mindspore_device_memory_used_bytes", "Device memory in use, as the driver sees it.", lean=True
)
DEVICE_MEMORY_TOTAL = _gauge("mindspore_device_memory_total_bytes", "Device memory in all.", lean=True)
DEVICE_UTILIZATION = _gauge(
    "mindspore_device_utilization_ratio",
    "Utilisation of an engine. For memory, NVML's figure is a share of time, DCMI's a share of bandwidth.",
    "engine",
    lean=("core",),
)
DEVICE_CLOCK = _gauge("mindspore_device_clock_hertz", "Clock of the device.", "domain")
DEVICE_CLOCK_LIMIT = _gauge("mindspore_device_clock_limit_hertz", "Highest clock of the device.", "domain")
DEVICE_THROTTLED = Family(
    "mindspore_device_throttled",
    "gauge",
    "1 while the device is slowed down for the reason.",
    ("reason",),
    values=("thermal", "hardware", "power_brake", "power_cap", "other"),
)
DEVICE_HEALTH = Family(
    "mindspore_device_health",
    "stateset",
    "Health that the device reports.",
    ("health",),
    values=("ok", "warning", "alarm", "critical"),
)
DEVICE_HEALTH_LEVEL = _gauge(
    "mindspore_device_health_level",
    "Health as a number, in the lean profile only: 0 ok, 1 warning, 2 alarm, 3 critical.",
    lean=True,
)
DEVICE_FAULTS = _counter(
    "mindspore_device_faults_total",
    "Faults of the device, by the shipped table of XID and DCMI codes.",
    "severity",
    ("warning", "critical"),
    lean=("critical",),
)
DEVICE_FAULT_LAST = _gauge(
    "mindspore_device_fault_last_timestamp_seconds", "When the fault code was last seen.", "code", cap=16
)
DEVICE_ECC = _counter("mindspore_device_ecc_errors_total", "ECC errors.", "kind", ("corrected", "uncorrected"))
DEVICE_ISOLATED_PAGES = _gauge("mindspore_device_isolated_pages", "Remapped rows or isolated pages.", "kind")
DEVICE_LINKS_UP = _gauge("mindspore_device_links_up", "Links that are up.", "kind")
DEVICE_LINKS_EXPECTED = _gauge("mindspore_device_links_expected", "The most links seen up since the start.", "kind")
DEVICE_LINK_RECEIVE = _counter(
    "mindspore_device_link_receive_bytes_total", "Bytes received, summed over links.", "kind", _LINKS
)
DEVICE_LINK_TRANSMIT = _counter(
    "mindspore_device_link_transmit_bytes_total", "Bytes sent, summed over links.", "kind", _LINKS
)
DEVICE_LINK_ERRORS = _counter("mindspore_device_link_errors_total", "Link errors, summed over links.", "kind", _LINKS)
_declare(
    "device",
    DEVICE_INFO,
    DEVICE_TEMPERATURE,
    DEVICE_TEMPERATURE_LIMIT,
    DEVICE_POWER,
    DEVICE_POWER_LIMIT,
    DEVICE_ENERGY,
    DEVICE_MEMORY_USED,
    DEVICE_MEMORY_TOTAL,
    DEVICE_UTILIZATION,
    DEVICE_CLOCK,
    DEVICE_CLOCK_LIMIT,
    DEVICE_THROTTLED,
    DEVICE_HEALTH,
    DEVICE_HEALTH_LEVEL,
    DEVICE_FAULTS,
    DEVICE_FAULT_LAST,
    DEVICE_ECC,
    DEVICE_ISOLATED_PAGES,
    DEVICE_LINKS_UP,
    DEVICE_LINKS_EXPECTED,
    DEVICE_LINK_RECEIVE,
    DEVICE_LINK_TRANSMIT,
    DEVICE_LINK_ERRORS,
)

ALLOCATOR_ALLOCATED = _gauge(
    "mindspore_allocator_allocated_bytes", "Device memory that MindSpore's pool has handed out."
)
ALLOCATOR_RESERVED = _gauge("mindspore_allocator_reserved_bytes", "Device memory that MindSpore's pool holds.")
ALLOCATOR_PEAK = _gauge("mindspore_allocator_allocated_peak_bytes", "Most device memory handed out at once.")
ALLOCATOR_LIMIT = _gauge("mindspore_allocator_limit_bytes", "Most device memory the pool may hold.")
_declare("allocator", ALLOCATOR_ALLOCATED, ALLOCATOR_RESERVED, ALLOCATOR_PEAK, ALLOCATOR_LIMIT)

# --- the exporter about itself ------------------------------------------------------------------------------------

HOOK_SECONDS = Family(
    "mindspore_exporter_hook_seconds",
    "summary",
    "Time in the exporter's hooks on the training thread, by record.",
    lean=True,
)
HOOK_MAX_SECONDS = _gauge("mindspore_exporter_hook_max_seconds", "Longest time in the hooks of the last 100 records.")
QUEUE_LENGTH = _gauge("mindspore_exporter_queue_length", "Records waiting for the worker.")
RECORDS_DROPPED = _counter(
    "mindspore_exporter_records_dropped_total", "Records dropped because the queue was full.", lean=True
)
ERRORS = _counter(
    "mindspore_exporter_errors_total",
    "Errors of the exporter, by stage; none of them touched the training.",
    "stage",
    ERROR_STAGES,
    lean=True,
    lean_sum=True,
)
COLLECTOR_SUCCESS = _gauge(
    "mindspore_exporter_collector_success", "1 when the collector's last read succeeded.", "collector"
)
COLLECTOR_LAST_SUCCESS = _gauge(
    "mindspore_exporter_collector_last_success_timestamp_seconds", "When the collector last succeeded.", "collector"
)
LAST_UPDATE = _gauge("mindspore_exporter_last_update_timestamp_seconds", "When the worker last published.", lean=True)
TIME = _gauge("mindspore_exporter_time_seconds", "This process's clock when the page was rendered.")
SERIES_DROPPED = _counter("mindspore_exporter_series_dropped_total", "Label values dropped by a cap.")
SCRAPES = _counter("mindspore_exporter_scrapes_total", "Requests for the page.", "result", ("ok", "error"))
_declare(
    "exporter",
    HOOK_SECONDS,
    HOOK_MAX_SECONDS,
    QUEUE_LENGTH,
    RECORDS_DROPPED,
    ERRORS,
    COLLECTOR_SUCCESS,
    COLLECTOR_LAST_SUCCESS,
    LAST_UPDATE,
    TIME,
    SERIES_DROPPED,
    SCRAPES,
)

RELAY_MESSAGES = Family("mindspore_relay_messages_total", "counter", "Messages of the relay.", ("receiver", "result"))
RELAY_TRUNCATED = _counter("mindspore_relay_truncated_total", "Messages that the relay had to shorten.")
RELAY_LAST_SUCCESS = _gauge(
    "mindspore_relay_last_success_timestamp_seconds", "When the relay last delivered.", "receiver"
)
_declare("relay", RELAY_MESSAGES, RELAY_TRUNCATED, RELAY_LAST_SUCCESS)

GROUPS = tuple(dict.fromkeys(family.group for family in CATALOGUE.values()))
"""Names that `collect[]` accepts."""

RANK_GROUPS = ("run", "progress", "optimisation", "checkpoint", "exporter")
"""Groups whose counters exist at 0 on every training rank from the start; the others when their source is there."""


def reference() -> list[Mapping[str, object]]:
    """The catalogue as plain data, for the reference page and for checks outside Python."""
    return [
        {
            "name": family.name,
            "type": family.kind,
            "group": family.group,
            "labels": list(family.labels),
            "values": list(family.values),
            "help": family.help,
            "lean": family.lean if isinstance(family.lean, bool) else list(family.lean),
        }
        for family in CATALOGUE.values()
    ]
