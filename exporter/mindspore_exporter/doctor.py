"""`mindspore-exporter doctor`: why is a training not seen? Run on a training node; each finding comes with its remedy.

A check is one function that gives findings and one row in `CHECKS`. Nothing is changed and every request has a time limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from . import __version__, config, targets
from .assets import asset_root
from .config import MonitorConfig
from .errors import ConfigError, ExporterError
from .identity import LOCAL_RANK_VARIABLES, RANK_VARIABLES, SIZE_VARIABLES, is_scheduler

Status = Literal["ok", "warning", "problem", "skipped"]

TIMEOUT_SECONDS = 3.0
PORTS_SCANNED = 16
"""Ranks of one node at most."""
CLOCK_SECONDS = 5.0
MARKS = {"ok": "ok", "warning": "WARN", "problem": "FAIL", "skipped": "-"}


@dataclass(frozen=True)
class Finding:
    """What a check saw; `remedy` says what to do about it, empty where nothing is to be done."""

    check: str
    status: Status
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class Rank:
    """A rank whose endpoint answered: the samples of its page by name and label values, run and rank left out."""

    port: int
    run: str
    rank: str
    samples: dict[tuple[str, ...], float]

    def value(self, *key: str) -> float | None:
        """One sample's value."""
        return self.samples.get(key)

    def label(self, family: str) -> str:
        """The label value of the series of a state set that is 1, or of the only series."""
        return next((key[1] for key, value in self.samples.items() if key[0] == family and value), "")


@dataclass
class Patient:
    """What the checks look at, and what the earlier ones found for the later."""

    file: str | None
    host: str
    prometheus: str | None
    run: str | None
    ports: range | None
    config: MonitorConfig = field(default_factory=MonitorConfig.model_construct)
    ranks: list[Rank] = field(default_factory=list)


def check_configuration(patient: Patient) -> Iterator[Finding]:
    """The YAML and the environment of this shell can be used."""
    try:
        patient.config = config.load(patient.file)
    except ConfigError as error:
        yield Finding(
            "configuration", "problem", str(error), "mend the key that is named; `check --reference` lists all keys"
        )
        return
    if not patient.config.enabled:
        yield Finding("configuration", "problem", "enabled is false: the exporter does nothing", "set enabled: true")
    yield Finding("configuration", "ok", f"{patient.file or 'environment and defaults'} can be used")


def check_versions(patient: Patient) -> Iterator[Finding]:
    """The packages of this Python fit together."""
    found = {name: _version(name) for name in ("mindspore", "mindformers", "numpy")}
    shown = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    yield Finding("versions", "ok", f"mindspore-exporter {__version__}, {shown or 'no MindSpore in this Python'}")
    if found["mindspore"] and found["numpy"] and int(found["numpy"].split(".")[0]) >= 2:
        yield Finding("versions", "problem", f"numpy {found['numpy']}: MindSpore 2.9 and 2.10 are built for numpy 1",
                      "pip install 'numpy<2'")  # fmt: skip
    if find_spec_failed("mindspore"):
        yield Finding(
            "versions", "skipped", "MindSpore is not in this Python: run doctor in the training's environment"
        )


def find_spec_failed(module: str) -> bool:
    """Whether a module is missing, without importing it."""
    return importlib.util.find_spec(module) is None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def check_rank_environment(patient: Patient) -> Iterator[Finding]:
    """What a training started from this shell would take for its rank."""
    seen = {
        name: os.environ[name]
        for name in (*RANK_VARIABLES, *SIZE_VARIABLES, *LOCAL_RANK_VARIABLES)
        if name in os.environ
    }
    if is_scheduler():
        yield Finding("rank environment", "warning", "MS_ROLE says this is msrun's scheduler: nothing is exported there",
                      "look at the workers")  # fmt: skip
    elif "RANK_ID" in seen and not any(name in seen for name in SIZE_VARIABLES):
        yield Finding("rank environment", "warning", f"RANK_ID is {seen['RANK_ID']} but nothing tells the number of ranks",
                      "start by msrun, or set RANK_SIZE")  # fmt: skip
    else:
        shown = " ".join(f"{name}={value}" for name, value in seen.items())
        yield Finding("rank environment", "ok", shown or "none set in this shell; msrun sets it for each rank")


def check_endpoints(patient: Patient) -> Iterator[Finding]:
    """Which ranks of this host answer, and which ports are taken by something else."""
    base = patient.config.port
    for port in patient.ports or range(base, base + PORTS_SCANNED):
        try:
            rank = read_rank(patient.host, port, patient.config)
        except ConnectionError:
            continue
        except TimeoutError:
            yield Finding("endpoint", "warning", f"port {port} accepts but does not answer within {TIMEOUT_SECONDS:.0f} s",
                          "a compile holds Python's interpreter lock: try again in a minute")  # fmt: skip
            continue
        except PermissionError as error:
            yield Finding("endpoint", "warning", f"port {port}: {error}", "look at it with the scrape's credentials")
            continue
        except ValueError as error:
            yield Finding("endpoint", "warning", f"port {port} is something else: {error}", "choose another port: base")
            continue
        patient.ranks.append(rank)
        yield Finding(
            "endpoint", "ok", f"port {port}: run {rank.run} rank {rank.rank}, {rank.label('mindspore_train_phase')}"
        )
    if not patient.ranks:
        yield from _explain_no_endpoint(patient)


def _explain_no_endpoint(patient: Patient) -> Iterator[Finding]:
    trainings = [process for process in psutil.process_iter() if _is_rank(process)]
    where = f"no rank answers on {patient.host}"
    if trainings:
        yield Finding("endpoint", "problem", f"{where}, but {len(trainings)} MindSpore processes run here",
                      "add PrometheusMonitor() to the callbacks; look for lines with 'exporter:' in the ranks' logs (a"
                      " configuration that only warns, another port, a training that is still loading)")  # fmt: skip
    else:
        yield Finding("endpoint", "problem", f"{where}, and no MindSpore training is seen here",
                      "run doctor on a training node, or give --host and --ports")  # fmt: skip


def _is_rank(process: psutil.Process) -> bool:
    try:
        return process.environ().get("MS_ROLE") == "MS_WORKER" or any("msrun" in word for word in process.cmdline()[:3])
    except psutil.Error:
        return False


def read_rank(host: str, port: int, settings: MonitorConfig) -> Rank:
    """The page of one rank. Raises ConnectionError where nobody listens, TimeoutError, PermissionError where a password or
    TLS is wanted, ValueError where something else answers."""
    try:
        text = fetch(f"http://{host}:{port}/metrics")
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise PermissionError("the endpoint wants a password") from None
        raise ValueError(f"HTTP status {error.code}") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise TimeoutError from None
        raise ConnectionError(str(error.reason)) from None
    except TimeoutError:
        raise
    except (OSError, ValueError) as error:
        if settings.web_config is not None:
            raise PermissionError("the endpoint speaks TLS") from None
        raise ValueError(str(error) or type(error).__name__) from None
    samples, run, rank = {}, "", ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            run, rank = sample.labels.get("run", run), sample.labels.get("rank", rank)
            labels = [value for name, value in sorted(sample.labels.items()) if name not in ("run", "rank")]
            key = (sample.name, *labels)
            samples[key] = sample.value
    if not any(key[0] == "mindspore_train_phase" for key in samples):
        raise ValueError("its page has no mindspore_train_phase")
    return Rank(port, run, rank, samples)


def fetch(url: str) -> str:
    """A document over HTTP, within the time limit."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310 - http and https URLs of the user's own
        return str(answer.read().decode("utf-8", "replace"))


def check_callback(patient: Patient) -> Iterator[Finding]:
    """The callback is not only registered but called."""
    for rank in patient.ranks:
        name, phase = f"rank {rank.rank}", rank.label("mindspore_train_phase")
        steps = rank.value("mindspore_train_steps_total") or 0
        now, last = (
            rank.value("mindspore_exporter_time_seconds") or 0,
            rank.value("mindspore_train_last_step_timestamp_seconds"),
        )
        limit = rank.value("mindspore_train_stall_timeout_seconds") or 180
        since = now - (rank.value("mindspore_train_phase_start_timestamp_seconds") or now)
        if phase == "training" and last is not None and now - last > limit:
            yield Finding("callback", "problem", f"{name}: no step for {now - last:.0f} s in phase training",
                          "the rank hangs, or the hooks are no longer called: see its log and stack")  # fmt: skip
        elif phase in ("starting", "loading", "compiling") and since > 3600:
            yield Finding("callback", "problem", f"{name}: {phase} for {since / 60:.0f} min",
                          "the callback is there but no step ended: look at the rank's log")  # fmt: skip
        elif phase in ("finished", "failed"):
            reason = rank.label("mindspore_train_end_timestamp_seconds")
            yield Finding("callback", "ok", f"{name}: {phase} ({reason}) after {steps:.0f} steps")
        else:
            yield Finding("callback", "ok", f"{name}: {phase}, {steps:.0f} steps done")


def check_exporter_itself(patient: Patient) -> Iterator[Finding]:
    """The exporter's own counters are quiet."""
    for rank in patient.ranks:
        counts = {key[1]: value for key, value in rank.samples.items() if key[0] == "mindspore_exporter_errors_total"}
        errors = {stage: count for stage, count in counts.items() if count}
        dropped = rank.value("mindspore_exporter_records_dropped_total") or 0
        if errors:
            shown = ", ".join(f"{stage} {count:.0f}" for stage, count in errors.items())
            yield Finding(
                "exporter", "problem", f"rank {rank.rank}: errors: {shown}", "the first of each is in the rank's log"
            )
        if dropped:
            yield Finding("exporter", "warning", f"rank {rank.rank}: {dropped:.0f} records dropped",
                          "the worker did not get the processor: give the rank one more core")  # fmt: skip
        here = time.time() - (rank.value("mindspore_exporter_time_seconds") or time.time())
        if abs(here) > CLOCK_SECONDS:
            yield Finding(
                "exporter", "warning", f"rank {rank.rank}: its clock is {here:.0f} s off this one's", "mend NTP"
            )


def check_world(patient: Patient) -> Iterator[Finding]:
    """The expected run is here, and one run does not show as two."""
    runs = sorted({rank.run for rank in patient.ranks})
    if patient.run and patient.ranks and patient.run not in runs:
        yield Finding(
            "run", "problem", f"run {patient.run} is not here; seen: {', '.join(runs)}", "set run: in the configuration"
        )
    for run in runs:
        ranks = [rank for rank in patient.ranks if rank.run == run]
        world = max(rank.value("mindspore_train_world_size") or 0 for rank in ranks)
        yield Finding("run", "ok", f"run {run}: {len(ranks)} of {world:.0f} ranks answer on this host")


def check_discovery(patient: Patient) -> Iterator[Finding]:
    """The directory that Prometheus reads has this host's ranks, fresh."""
    directory = patient.config.discovery.directory
    if directory is None:
        yield Finding("discovery", "skipped", "discovery.directory is not set: the ranks announce themselves nowhere")
        return
    try:
        listing = targets.read_directory(directory, time.time(), targets.AllowedNetworks())
    except ExporterError as error:
        yield Finding(
            "discovery", "problem", str(error), "make the directory, writable for the training, readable for Prometheus"
        )
        return
    for refused in listing.refused:
        yield Finding(
            "discovery", "problem", f"{refused.file}: {refused.reason}", "`targets` shows what it accepts and why"
        )
    if patient.ranks and not listing.entries:
        yield Finding(
            "discovery", "problem", f"{directory} has no fresh entry", "look for 'target file' in the ranks' logs"
        )
    else:
        yield Finding("discovery", "ok", f"{directory}: {len(listing.entries)} entries")


def check_prometheus(patient: Patient) -> Iterator[Finding]:
    """Prometheus reaches every rank that answers here, and keeps the exporter's labels apart from its own."""
    if patient.prometheus is None:
        yield Finding("prometheus", "skipped", "--prometheus URL was not given")
        return
    try:
        version = _ask(patient, "status/buildinfo")["version"]
        active = _ask(patient, "targets?state=active")["activeTargets"]
        settings = yaml.safe_load(_ask(patient, "status/config")["yaml"])
    except (OSError, ValueError, KeyError, yaml.YAMLError) as error:
        yield Finding(
            "prometheus", "problem", f"{patient.prometheus} does not answer: {error}", "is the URL right, is it up?"
        )
        return
    yield Finding("prometheus", "ok", f"version {version}, {len(active)} targets")
    yield from _check_targets(patient, active)
    for job in settings.get("scrape_configs") or ():
        if job.get("honor_labels") and any(one["labels"].get("job") == job["job_name"] for one in active):
            yield Finding("prometheus", "warning", f"job {job['job_name']} has honor_labels: true",
                          "set honor_labels: false, as the shipped prometheus.yml does")  # fmt: skip
    rules = _ask(patient, "rules")["groups"]
    ours = [rule for group in rules for rule in group["rules"] if "mindspore_" in rule.get("query", "")]
    shipped = any(path.name.endswith(".yaml") for path in _shipped_rules())
    if ours:
        yield Finding("rules", "ok", f"{len(ours)} rules about mindspore_ metrics are loaded")
    elif shipped:
        yield Finding(
            "rules",
            "problem",
            "no rule about mindspore_ metrics is loaded",
            "`assets --out DIR`, then rule_files: in prometheus.yml",
        )
    else:
        yield Finding("rules", "skipped", "no rule about mindspore_ metrics is loaded; this version ships none")


def _check_targets(patient: Patient, active: list[dict[str, Any]]) -> Iterator[Finding]:
    for rank in patient.ranks:
        mine = [one for one in active if one["scrapeUrl"].split("/metrics")[0].endswith(f":{rank.port}")]
        if not mine:
            yield Finding("prometheus", "problem", f"rank {rank.rank} (port {rank.port}) is no target of this Prometheus",
                          "give it discovery.directory (file_sd), `targets --serve` (HTTP SD), or a PodMonitor")  # fmt: skip
        for one in mine:
            if one["health"] != "up":
                yield Finding("prometheus", "problem", f"target {one['scrapeUrl']} is {one['health']}: {one['lastError']}",
                              "try curl from Prometheus's host: address, firewall, TLS, password, sample_limit")  # fmt: skip
            else:
                yield Finding("prometheus", "ok", f"target {one['scrapeUrl']} is up")


def _ask(patient: Patient, path: str) -> dict[str, Any]:
    answer = json.loads(fetch(f"{(patient.prometheus or '').rstrip('/')}/api/v1/{path}"))
    return dict(answer["data"])


def _shipped_rules() -> list[Path]:
    directory = Path(str(asset_root())) / "prometheus" / "rules"
    return sorted(directory.glob("*.yaml"))


CHECKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    check_configuration,
    check_versions,
    check_rank_environment,
    check_endpoints,
    check_callback,
    check_exporter_itself,
    check_world,
    check_discovery,
    check_prometheus,
)


def examine(patient: Patient) -> list[Finding]:
    """All findings, in the order of the checks; a check that fails itself is a finding too."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings.extend(check(patient))
        except Exception as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            findings.append(
                Finding(name, "problem", f"the check failed: {type(error).__name__}: {error}", "report this")
            )
    return findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `mindspore-exporter doctor`."""
    parser.add_argument("file", nargs="?", help="the training's YAML")
    parser.add_argument("--prometheus", metavar="URL", help="the Prometheus that should scrape the training")
    parser.add_argument("--host", default="127.0.0.1", help="where the ranks are (default: this host)")
    parser.add_argument(
        "--ports", metavar="FIRST-LAST", help=f"ports of the ranks (default: {PORTS_SCANNED} from the base port)"
    )
    parser.add_argument("--run", help="the run that is looked for")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Examine and print; 1 where there is a problem. Raises ConfigError for arguments that cannot be used."""
    patient = Patient(arguments.file, arguments.host, arguments.prometheus, arguments.run, _port_range(arguments.ports))
    try:
        socket.getaddrinfo(patient.host, None)
    except OSError as error:
        raise ConfigError(f"--host {patient.host}: {error.strerror or error}") from None
    findings = examine(patient)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))  # noqa: T201 - a program's output
    else:
        print(report(findings))  # noqa: T201 - a program's output
    return int(any(finding.status == "problem" for finding in findings))


def _port_range(text: str | None) -> range | None:
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal() and 0 < int(first) <= int(last or first) < 65536):
        raise ConfigError(f"--ports {text!r}; allowed: FIRST-LAST, for example 19440-19455")
    return range(int(first), int(last or first) + 1)


def report(findings: list[Finding]) -> str:
    """The findings as text: problems last, so that they stand above the prompt."""
    order = {"skipped": 0, "ok": 1, "warning": 2, "problem": 3}
    lines = []
    for finding in sorted(findings, key=lambda one: order[one.status]):
        lines.append(f"{MARKS[finding.status]:5}{finding.check:18}{finding.what}")
        if finding.remedy:
            lines.append(f"{'':23}-> {finding.remedy}")
    problems = sum(finding.status == "problem" for finding in findings)
    return "\n".join([*lines, "", f"{problems} problem{'' if problems == 1 else 's'}"])
