"""One YAML plus environment, validated.

`load` merges keyword arguments over environment over YAML over defaults and gives a frozen `MonitorConfig`. Each part's
own section is declared beside the part where that part has one; the fields' docstrings are the reference that
`mindspore-exporter check --reference` prints.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from .discovery import host_fault, labels_fault
from .errors import ConfigError

PREFIX = "MINDSPORE_EXPORTER_"
CONFIG_VARIABLE = "MINDSPORE_EXPORTER_CONFIG"
"""Environment variable that names the YAML where the code does not."""
MAX_BYTES = 256 * 1024
"""A configuration is a page of text; a larger file is a mistake (or an alias bomb)."""
RUN_PATTERN = r"^[A-Za-z0-9._-]{1,63}$"


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True)


class LossConfig(Section):
    """How the outputs of the train cell become named losses."""

    total: str | None = None
    """Name of the part that is the total: a dict's key, or the index in a tuple. Default: of a tuple the element 0, of a
    dict `loss`, else `total`, else the only scalar, else the sum."""
    names: tuple[str, ...] = ()
    """Names of a tuple's parts, in order. Default: `1`, `2`, ..."""


class DataConfig(Section):
    """What one step trains on, where the dataset does not say."""

    samples_per_step: float | None = Field(default=None, gt=0)
    """Samples of one step on this rank. Default: from the batch."""
    tokens_per_sample: float | None = Field(default=None, gt=0)
    """Tokens of one sample. Default: the second dimension of a two-dimensional integer batch."""


class StallConfig(Section):
    """When silence counts as a stall."""

    floor_seconds: float = Field(default=180.0, gt=0)
    """Least stall timeout."""
    factor: float = Field(default=10.0, ge=2)
    """Stall timeout as a multiple of the usual time between records."""


class BaselineConfig(Section):
    """What the run is compared with."""

    source: str = Field(default="self", alias="from")
    """`self`: learnt from the run's first steps after warm-up. Else a file written by
    `mindspore-exporter baseline save`."""
    steps: int = Field(default=100, ge=20, le=100_000)
    """Records that a baseline is learnt from."""
    warmup_steps: int = Field(default=20, ge=0)
    """Records skipped before learning."""


class EvaluationConfig(Section):
    """An evaluation that the exporter runs itself, on the training thread."""

    every_steps: int = Field(gt=0)
    """Global steps between two evaluations."""
    dataset: Any = None
    """A MindSpore dataset (from Python), or `module:function` that returns one."""
    max_batches: int = Field(default=50, gt=0)
    """Batches of one evaluation at most."""


class DiscoveryConfig(Section):
    """How Prometheus finds this rank without Kubernetes."""

    directory: Path | None = None
    """Directory for one file_sd entry a rank. Default: none is written."""
    address: str | None = None
    """Address that Prometheus should scrape. Default: the host's name."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Target labels added to the entry."""

    @field_validator("labels")
    @classmethod
    def _label_names(cls, value: dict[str, str]) -> dict[str, str]:
        fault = labels_fault(value)
        if fault:
            raise ValueError(fault)
        return value

    @field_validator("address")
    @classmethod
    def _address_is_one_host(cls, value: str | None) -> str | None:
        fault = host_fault(value) if value is not None else None
        if fault:
            raise ValueError(fault)
        return value


THRESHOLDS = (
    "attention_density",
    "checkpoint_interval_seconds",
    "data_wait_ratio",
    "device_memory_ratio",
    "device_memory_temperature_celsius",
    "device_temperature_celsius",
    "device_utilization_ratio",
    "goodput_ratio",
    "gradient_norm",
    "gradient_norm_floor",
    "hook_time_ratio",
    "loss_diverging_ratio",
    "overflow_ratio",
    "plateau_steps",
    "sample_seconds",
    "startup_seconds",
    "step_skew_steps",
    "throughput_degraded_ratio",
    "throughput_halved_ratio",
    "update_ratio",
)
"""The closed list of bounds that a run can set; each has its unit in its name."""


class MonitorConfig(BaseSettings):
    """Configuration of one rank's exporter."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        populate_by_name=True,
    )

    enabled: bool = True
    """False: the callback does nothing at all."""
    run: str | None = Field(default=None, pattern=RUN_PATTERN)
    """Name of the run, the same on all ranks and across restarts. Default: the scheduler's job name, else made from
    msrun's scheduler address."""
    port: int = Field(default=19440, ge=0, le=65535)
    """Base port; the local rank is added. 0 lets the system choose."""
    port_probe: Literal["auto", "on", "off"] = "auto"
    """Whether a busy port is probed past. auto: on, but off in Kubernetes, where the port is announced beforehand."""
    listen: str = "0.0.0.0"  # noqa: S104 - every Prometheus exporter listens so by default; the start line says "unauthenticated"
    """Address to listen on."""
    web_config: Path | None = None
    """Web configuration in the Prometheus exporter-toolkit format: TLS and basic auth."""
    profile: Literal["full", "lean"] = "full"
    """Series that `/metrics` shows when the scrape does not choose."""
    linger_seconds: float | None = Field(default=None, ge=0, le=600)
    """Longest wait at interpreter exit for the last scrape. Default: 2.5 x the longest scrape interval seen, 20 to 90."""
    signals: bool = True
    """Whether SIGTERM and SIGINT are watched, so that the final state is published."""
    read: Literal["auto", "worker", "hook", "off"] = "auto"
    """Where outputs become numbers. auto: in the worker, proven in the first steps against reads at once; hook: on the
    training thread every `read_every` steps; off: never."""
    read_every: int = Field(default=10, gt=0)
    """Steps between two reads in the hook."""
    on_config_error: Literal["fail", "warn"] = "fail"
    """warn: a bad configuration is logged and the exporter stays off, instead of ending the run."""
    state_dir: Path | None = None
    """Directory for what survives a restart. Default: `$XDG_STATE_HOME/mindspore-exporter`; none in Kubernetes."""
    window: int = Field(default=100, ge=10, le=10_000)
    """Records in the windows of the detectors."""
    gradient_norm_floor: float = Field(1e-6, ge=0)
    """Gradient norm under which a step counts as a small-gradient step."""
    loss: LossConfig = LossConfig()
    """How outputs become losses."""
    data: DataConfig = DataConfig()
    """What one step trains on."""
    stall: StallConfig = StallConfig()
    """When silence counts as a stall."""
    baseline: BaselineConfig = BaselineConfig()
    """What the run is compared with."""
    evaluation: EvaluationConfig | None = None
    """An evaluation that the exporter runs itself. Default: none."""
    discovery: DiscoveryConfig = DiscoveryConfig()
    """How Prometheus finds this rank without Kubernetes."""
    thresholds: dict[str, float] = Field(default_factory=dict)
    """Bounds of this run, which the alert rules prefer to their defaults."""

    @field_validator("thresholds")
    @classmethod
    def _known_thresholds(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if name not in THRESHOLDS:
                raise ValueError(f"no threshold is named {name!r}; {_suggest(name, THRESHOLDS)}")
        return value

    @model_validator(mode="after")
    def _loss_total_is_named(self) -> MonitorConfig:
        total, names = self.loss.total, self.loss.names
        if total is not None and names and total not in names and not total.isdigit():
            raise ValueError(f"loss.total is {total!r} but loss.names has only {', '.join(names)}")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keyword arguments beat environment, environment beats YAML."""
        return init_settings, env_settings, _YamlSource(settings_cls)


class _YamlSource(PydanticBaseSettingsSource):
    """The values of the YAML that `load` is reading; a class attribute because the settings class makes the source."""

    values: Mapping[str, Any] = {}

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(self.values)


def load(path: str | Path | None = None, /, **overrides: Any) -> MonitorConfig:
    """Read, merge and validate a configuration.

    `path`: the YAML; None reads the file that MINDSPORE_EXPORTER_CONFIG names, or none. Raises ConfigError with one
    line for each fault: key, value, what is allowed, and where the value came from.
    """
    path = path if path is not None else os.environ.get(CONFIG_VARIABLE) or None
    values = {} if path is None else _read_yaml(Path(path))
    _refuse_unknown_variables()
    source = f"{path}" if path is not None else "keyword arguments and environment"
    try:
        _YamlSource.values = values
        return MonitorConfig(**{key: value for key, value in overrides.items() if value is not None})
    except ValidationError as error:
        lines = [_explain(fault, overrides, values) for fault in error.errors()]
        raise ConfigError(f"the configuration ({source}) cannot be used:\n" + "\n".join(lines)) from None
    except ConfigError:
        raise
    except Exception as error:  # pydantic-settings raises its own type for a variable that is not JSON
        raise ConfigError(f"the configuration ({source}) cannot be used:\n  {error}") from None
    finally:
        _YamlSource.values = {}


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes, which no configuration is")
    try:
        if any(
            isinstance(token, (yaml.AliasToken, yaml.AnchorToken)) for token in yaml.scan(text, Loader=yaml.SafeLoader)
        ):
            raise ConfigError(f"{path}: anchors and aliases are not allowed in a configuration")
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold keys and values at its top, has a {type(value).__name__}")
    unknown = [key for key in value if not isinstance(key, str)]
    if unknown:
        raise ConfigError(f"{path}: the key {unknown[0]!r} must be a text")
    return value


def _refuse_unknown_variables() -> None:
    """A misspelt variable would be silently without effect."""
    for name in os.environ:
        if name.startswith(PREFIX) and name != CONFIG_VARIABLE:
            key = name[len(PREFIX) :].split("__")[0].lower()
            if key not in MonitorConfig.model_fields:
                raise ConfigError(f"environment variable {name}: {_suggest(key, tuple(MonitorConfig.model_fields))}")


def _explain(fault: Any, overrides: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    path = [str(part) for part in fault["loc"]]
    key = ".".join(path) or "(whole)"
    variable = PREFIX + "__".join(path).upper()
    top = path[0] if path else ""
    where = "argument" if top in overrides else f"environment {variable}" if variable in os.environ else "YAML"
    if fault["type"] == "extra_forbidden":
        return f"  {key} ({where}): no such key; {_suggest(path[-1], _keys_beside(path))}"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "string_pattern_mismatch":
        message = "allowed: 1 to 63 letters, digits and . _ -"
    return f"  {key} ({where}) = {fault['input']!r}: {message}"


def _keys_beside(path: list[str]) -> tuple[str, ...]:
    model: type[BaseModel] = MonitorConfig
    for part in path[:-1]:
        annotation = model.model_fields[part].annotation
        candidates = [
            c for c in (annotation, *get_args(annotation)) if isinstance(c, type) and issubclass(c, BaseModel)
        ]
        if not candidates:
            return ()
        model = candidates[0]
    return tuple(field.alias or name for name, field in model.model_fields.items())


def _suggest(word: str, allowed: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, allowed, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(allowed)}"


def reference() -> list[tuple[str, str, str, str]]:
    """Rows of the configuration reference: key, type, default, meaning."""
    return _rows(MonitorConfig, "")


def _rows(model: type[BaseModel], prefix: str) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        annotation = field.annotation
        sections = [c for c in (annotation, *get_args(annotation)) if isinstance(c, type) and issubclass(c, BaseModel)]
        if sections:
            rows.extend(_rows(sections[0], key + "."))
            continue
        kind = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
        default = field.get_default(call_default_factory=True)
        shown = "(required)" if field.is_required() else "" if default is None else repr(default)
        rows.append(
            (
                key,
                kind.replace("pathlib._local.", "").replace("pathlib.", ""),
                shown,
                " ".join((field.description or "").split()),
            )
        )
    return rows
