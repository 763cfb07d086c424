"""Which entries are believed, what becomes of stale ones, and what is served while the directory cannot be read."""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspore_exporter import targets
from mindspore_exporter.discovery import EXPIRY_SECONDS, MAX_BYTES, TargetFile
from mindspore_exporter.errors import ExporterError
from mindspore_exporter.targets import (
    AllowedNetworks,
    DirectoryError,
    DirectoryReader,
    Listing,
    TargetServer,
    groups,
    read_directory,
    remove_expired,
)

NAME = "llm-7b-rank3.json"


def entry_value() -> list[dict[str, Any]]:
    labels = {"__meta_mindspore_run": "llm-7b", "__meta_mindspore_rank": "3", "__meta_mindspore_host": "node-1"}
    return [{"targets": ["10.0.0.7:19443"], "labels": labels}]


def write(directory: Path, value: Any, name: str = NAME, mode: int = 0o640) -> Path:
    path = directory / name
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    path.chmod(mode)
    return path


def age(path: Path, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(path, (moment, moment))


def no_names(host: str) -> tuple[targets.Address, ...]:
    raise socket.gaierror(socket.EAI_NONAME, f"no name server in this test knows {host}")


def read(directory: Path, allowed: AllowedNetworks | None = None) -> Listing:
    return read_directory(directory, time.time(), allowed or AllowedNetworks(resolve=no_names))


def refusal(directory: Path) -> str:
    """The reason of the only file, which must not be a target."""
    listing = read(directory)
    assert listing.entries == ()
    (refused,) = listing.refused
    return refused.reason


# --- believed -----------------------------------------------------------------------------------------------------


def test_entry_written_by_a_rank_is_a_target(tmp_path: Path) -> None:
    TargetFile(tmp_path, "llm-7b", 3, address="10.0.0.7", port=19443, scheme="https", labels={"cluster": "a"}).write()
    listing = read(tmp_path)
    (group,) = groups(listing)
    assert listing.refused == ()
    assert group == {
        "targets": ["10.0.0.7:19443"],
        "labels": {
            "__meta_mindspore_run": "llm-7b",
            "__meta_mindspore_rank": "3",
            "__scheme__": "https",
            "cluster": "a",
        },
    }


def test_entries_are_ordered_by_run_and_number_of_the_rank(tmp_path: Path) -> None:
    for rank in (10, 9, 1):
        TargetFile(tmp_path, "b", rank, address="10.0.0.7", port=19000 + rank, labels={}).write()
    TargetFile(tmp_path, "a", 2, address="10.0.0.7", port=18000, labels={}).write()
    assert [(entry.run, entry.rank) for entry in read(tmp_path).entries] == [("a", 2), ("b", 1), ("b", 9), ("b", 10)]


def test_files_that_are_no_entries_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("hello")
    assert read(tmp_path) == Listing()


# --- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o660, 0o642, 0o666])
def test_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    write(tmp_path, entry_value(), mode=mode)
    assert f"{mode:04o}" in refusal(tmp_path)


def test_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / NAME).symlink_to(write(tmp_path / "else", entry_value()))
    assert refusal(tmp_path) == "not a regular file"


def test_pipe_is_refused_and_does_not_hold_the_reading(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME, 0o640)
    assert refusal(tmp_path) == "not a regular file"


def test_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    assert refusal(tmp_path) == "not a regular file"


def test_huge_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / NAME).chmod(0o640)
    assert str(MAX_BYTES) in refusal(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 16_000, b"1" * 16_000, b"NaN garbage"])
def test_what_is_not_json_is_refused(tmp_path: Path, data: bytes) -> None:
    write(tmp_path, data)
    assert refusal(tmp_path) == "not JSON"


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        "text",
        [None],
        [[]],
        [{}],
        entry_value() * 2,
        [{**entry_value()[0], "targets": []}],
        [{**entry_value()[0], "targets": ["10.0.0.7:1", "10.0.0.8:1"]}],
        [{**entry_value()[0], "targets": [7]}],
        [{**entry_value()[0], "targets": "10.0.0.7:1"}],
        [{**entry_value()[0], "labels": []}],
        [{**entry_value()[0], "labels": {"team": 7}}],
        [{**entry_value()[0], "labels": {"team": None}}],
        [{**entry_value()[0], "source": "x"}],
    ],
)
def test_wrong_shape_is_refused(tmp_path: Path, value: Any) -> None:
    write(tmp_path, value)
    assert refusal(tmp_path)


@pytest.mark.parametrize(
    "label",
    [
        "__address__",
        "__metrics_path__",
        "__param_target",
        "__scrape_interval__",
        "__meta_mindspore_other",
        "__meta_kubernetes_namespace",
        "job",
        "instance",
        "run",
        "rank",
        "component",
        "not a name",
        "",
    ],
)
def test_label_that_steers_the_scrape_is_refused(tmp_path: Path, label: str) -> None:
    value = entry_value()
    value[0]["labels"][label] = "x"
    write(tmp_path, value)
    assert "label" in refusal(tmp_path)


@pytest.mark.parametrize("scheme", ["file", "HTTPS", ""])
def test_scheme_other_than_http_and_https_is_refused(tmp_path: Path, scheme: str) -> None:
    value = entry_value()
    value[0]["labels"]["__scheme__"] = scheme
    write(tmp_path, value)
    assert "__scheme__" in refusal(tmp_path)


@pytest.mark.parametrize(
    "target",
    [
        "10.0.0.7",
        "10.0.0.7:0",
        "10.0.0.7:65536",
        "10.0.0.7:80/path",
        "http://10.0.0.7:80",
        "user@10.0.0.7:80",
        "10.0.0.7:80 ",
        "fd00::7:80",
        "[fd00::7%eth0]:80",
        "[10.0.0.7:80",
        ":80",
        "10.0.0.7:\u0661\u0662",
        "10.0.0.7:80\n",
        "",
        "-x:80",
    ],
)
def test_target_other_than_host_and_port_is_refused(tmp_path: Path, target: str) -> None:
    value = entry_value()
    value[0]["targets"] = [target]
    write(tmp_path, value)
    assert "target" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["llm-8b-rank3.json", "llm-7b-rank4.json"])
def test_entry_that_speaks_of_another_rank_than_its_name_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, entry_value(), name=name)
    assert "its name of another" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["x.json", "llm-7b-rank03.json", "llm-7b-rank.json", "-rank3.json", "\x1b[2J-rank3.json"]
)
def test_name_that_no_rank_writes_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, entry_value(), name=name)
    assert "name" in refusal(tmp_path)


def test_time_far_in_the_future_is_refused_because_it_would_never_expire(tmp_path: Path) -> None:
    age(write(tmp_path, entry_value()), -2 * EXPIRY_SECONDS)
    assert "future" in refusal(tmp_path)


def test_older_entry_of_the_same_address_is_refused(tmp_path: Path) -> None:
    TargetFile(tmp_path, "dead", 0, address="10.0.0.7", port=19440, labels={}).write()
    age(tmp_path / "dead-rank0.json", 120)
    TargetFile(tmp_path, "alive", 0, address="10.0.0.7", port=19440, labels={}).write()
    listing = read(tmp_path)
    assert [entry.run for entry in listing.entries] == ["alive"]
    assert [refused.file for refused in listing.refused] == ["dead-rank0.json"]


def test_directory_with_too_many_files_is_an_error_rather_than_a_part_of_its_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "MAX_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.json").touch()
    with pytest.raises(DirectoryError, match="more than 3 files"):
        read(tmp_path)


def test_missing_directory_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="absent: cannot be read: No such file or directory"):
        read(tmp_path / "absent")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["targets", "labels"]) | st.text(), inner)
    ),
    max_leaves=8,
)


@given(data=st.binary(max_size=200) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_content_of_a_file_breaks_the_reading(tmp_path: Path, data: bytes) -> None:
    write(tmp_path, data)
    assert len(read(tmp_path).refused) == 1


# --- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.255.0.1", "172.31.0.1", "192.168.1.1", "::1", "fd00::7", "::ffff:10.0.0.7"]
)
def test_loopback_and_private_addresses_are_allowed_by_default(host: str) -> None:
    assert AllowedNetworks().refusal(host) is None


@pytest.mark.parametrize(
    "host", ["8.8.8.8", "169.254.169.254", "172.32.0.1", "fe80::1", "2001:db8::1", "::ffff:169.254.169.254", "0.0.0.0"]
)
def test_public_and_link_local_addresses_are_refused_by_default(host: str) -> None:
    assert "outside the allowed networks" in str(AllowedNetworks().refusal(host))


def test_given_networks_replace_the_default() -> None:
    allowed = AllowedNetworks([ipaddress.ip_network("100.64.0.0/10")])
    assert allowed.refusal("100.64.1.1") is None
    assert allowed.refusal("10.0.0.7")


class NameServer:
    """Answers for names, with a time for each question; `now` is the clock that `AllowedNetworks` sees."""

    def __init__(self, answers: dict[str, list[str]], seconds: float = 0.0) -> None:
        self.answers = answers
        self.seconds = seconds
        self.asked: list[str] = []
        self.now = 1000.0

    def __call__(self, host: str) -> tuple[targets.Address, ...]:
        self.asked.append(host)
        self.now += self.seconds
        if host not in self.answers:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return tuple(ipaddress.ip_address(text) for text in self.answers[host])

    def allowed(self) -> AllowedNetworks:
        return AllowedNetworks(resolve=self, clock=lambda: self.now)


def test_name_is_allowed_only_when_every_address_of_it_is() -> None:
    allowed = NameServer({"inside": ["10.0.0.7", "fd00::7"], "mixed": ["10.0.0.7", "8.8.8.8"]}).allowed()
    assert allowed.refusal("inside") is None
    assert "8.8.8.8" in str(allowed.refusal("mixed"))


def test_answer_is_asked_for_again_after_five_minutes() -> None:
    names = NameServer({"node": ["10.0.0.7"]})
    allowed = names.allowed()
    assert allowed.refusal("node") is None
    names.answers["node"] = ["8.8.8.8"]
    assert allowed.refusal("node") is None
    names.now += 301
    assert allowed.refusal("node")
    assert names.asked == ["node", "node"]


def test_answer_is_kept_for_an_hour_while_the_name_server_fails() -> None:
    names = NameServer({"node": ["10.0.0.7"]})
    allowed = names.allowed()
    assert allowed.refusal("node") is None
    names.answers.clear()
    names.now += 3000
    assert allowed.refusal("node") is None
    names.now += 700
    assert allowed.refusal("node") == "host name node is not resolved"


def test_silent_name_server_holds_one_question_and_not_every_name() -> None:
    names = NameServer({}, seconds=20.0)
    allowed = names.allowed()
    assert all(allowed.refusal(f"node-{number}") for number in range(100))
    assert len(names.asked) == 1


def test_name_that_is_slow_to_fail_lets_the_other_names_have_their_turn() -> None:
    names = NameServer({"good": ["10.0.0.7"]}, seconds=20.0)
    allowed = names.allowed()
    assert allowed.refusal("bad")
    names.now += 31
    assert allowed.refusal("bad")
    assert allowed.refusal("good") is None


# --- stale --------------------------------------------------------------------------------------------------------


def test_entry_that_was_not_refreshed_for_ten_minutes_is_dropped_and_removed(tmp_path: Path) -> None:
    path = write(tmp_path, entry_value())
    age(path, EXPIRY_SECONDS + 10)
    listing = read(tmp_path)
    assert listing.entries == ()
    assert [entry.file for entry in listing.expired] == [NAME]
    assert remove_expired(tmp_path, listing, time.time()) == (NAME,)
    assert not path.exists()


def test_entry_refreshed_within_ten_minutes_stays(tmp_path: Path) -> None:
    path = write(tmp_path, entry_value())
    age(path, EXPIRY_SECONDS - 60)
    listing = read(tmp_path)
    assert remove_expired(tmp_path, listing, time.time()) == ()
    assert len(listing.entries) == 1
    assert path.exists()


def test_entry_refreshed_between_reading_and_removal_stays(tmp_path: Path) -> None:
    path = write(tmp_path, entry_value())
    age(path, EXPIRY_SECONDS + 10)
    listing = read(tmp_path)
    age(path, 0)
    assert remove_expired(tmp_path, listing, time.time()) == ()
    assert path.exists()


def test_old_file_that_is_not_an_entry_is_never_removed(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, {"my": "data"}),
        write(tmp_path, entry_value(), name="package.json"),
        tmp_path / "notes.tmp",
    ]
    paths[2].touch()
    for path in paths:
        age(path, 10 * EXPIRY_SECONDS)
    assert remove_expired(tmp_path, read(tmp_path), time.time()) == ()
    assert all(path.exists() for path in paths)


def test_temporary_file_of_an_interrupted_write_is_removed_when_old(tmp_path: Path) -> None:
    old, new = tmp_path / f".{NAME}.abcd1234.tmp", tmp_path / f".{NAME}.efgh5678.tmp"
    old.touch()
    new.touch()
    age(old, EXPIRY_SECONDS + 10)
    remove_expired(tmp_path, read(tmp_path), time.time())
    assert list(tmp_path.iterdir()) == [new]


# --- serving ------------------------------------------------------------------------------------------------------


@contextmanager
def served(reader: DirectoryReader) -> Iterator[TargetServer]:
    with TargetServer(("127.0.0.1", 0), reader) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: TargetServer, path: str = "/targets", method: str = "GET") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()
    finally:
        connection.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in 10 s"
        time.sleep(0.01)


def reader_of(directory: Path) -> DirectoryReader:
    return DirectoryReader(lambda: read(directory))


def test_list_is_served_as_prometheus_expects_it(tmp_path: Path) -> None:
    write(tmp_path, entry_value())
    reader = reader_of(tmp_path)
    reader.read_once()
    with served(reader) as server:
        status, content_type, body = ask(server)
    assert (status, content_type) == (200, "application/json")
    assert json.loads(body) == entry_value()


def test_empty_directory_is_an_empty_list(tmp_path: Path) -> None:
    reader = reader_of(tmp_path)
    reader.read_once()
    with served(reader) as server:
        assert ask(server)[::2] == (200, b"[]")


def test_before_the_first_reading_the_answer_is_an_error_and_not_an_empty_list(tmp_path: Path) -> None:
    with served(reader_of(tmp_path)) as server:
        assert ask(server)[0] == 500
        assert ask(server, "/-/healthy")[::2] == (200, b"ok\n")


def test_head_has_no_body_and_other_methods_and_paths_are_refused(tmp_path: Path) -> None:
    with served(reader_of(tmp_path)) as server:
        assert ask(server, "/-/healthy", "HEAD")[::2] == (200, b"")
        assert ask(server, "/-/healthy", "POST")[0] == 501
        assert ask(server, "/etc/passwd")[0] == 404


def test_last_good_list_is_served_while_readings_fail_and_an_error_after_two_minutes(tmp_path: Path) -> None:
    now = [1000.0]
    directory = tmp_path / "targets"
    directory.mkdir()
    write(directory, entry_value())
    reader = DirectoryReader(lambda: read(directory), clock=lambda: now[0])
    reader.read_once()
    directory.rename(tmp_path / "unmounted")
    reader.read_once()
    with served(reader) as server:
        now[0] += 119
        assert ask(server)[0] == 200
        now[0] += 2
        status, _, body = ask(server)
    assert status == 500
    assert b"No such file or directory" in body


def test_reading_that_hangs_holds_neither_the_answer_nor_the_stop() -> None:
    now, release, hangs = [1000.0], threading.Event(), threading.Event()

    def hung() -> Listing:
        if reader_has_listed:
            hangs.set()
            release.wait(60)
        reader_has_listed.append(True)
        return Listing()

    reader_has_listed: list[bool] = []
    reader = DirectoryReader(hung, clock=lambda: now[0])
    reader.read_once()
    reader.start()
    try:
        assert hangs.wait(10)
        with served(reader) as server:
            assert ask(server)[0] == 200
            now[0] += 121
            status, _, body = ask(server)
        assert status == 500
        assert b"does not end" in body
    finally:
        release.set()
        reader.stop()


def test_refused_file_is_named_once_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, entry_value(), mode=0o666)
    reader = reader_of(tmp_path)
    reader.read_once()
    reader.read_once()
    assert [NAME in record.getMessage() for record in caplog.records] == [True]


def test_many_refused_files_do_not_flood_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(100):
        write(tmp_path, b"", name=f"{number}.json")
    reader_of(tmp_path).read_once()
    assert len(caplog.records) == targets.MAX_LOG_LINES + 1
    assert caplog.records[-1].getMessage() == "80 more files are refused"


@pytest.mark.parametrize(("took", "pause"), [(0.01, 5.0), (1.6, 14.4), (60.0, 30.0)])
def test_slow_reading_is_repeated_less_often_but_before_the_list_grows_old(took: float, pause: float) -> None:
    assert targets.reading_pause(took) == pytest.approx(pause)


def test_reading_goes_on_after_a_failure_that_nobody_foresaw() -> None:
    results: list[Listing | Exception] = [ValueError("surprise"), Listing()]

    def surprising() -> Listing:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    reader = DirectoryReader(surprising)
    reader.read_once()
    with pytest.raises(DirectoryError, match="ValueError: surprise"):
        reader.current()
    reader.read_once()
    assert reader.current() == Listing()


def test_clients_that_send_nothing_do_not_take_more_than_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "MAX_REQUESTS", 2)
    with served(reader_of(tmp_path)) as server:
        before = threading.active_count()
        silent = [socket.create_connection(("127.0.0.1", server.server_port), timeout=10) for _ in range(5)]
        try:
            wait_until(lambda: threading.active_count() == before + 2)
            assert [connection.recv(1) for connection in silent[2:]] == [b"", b"", b""]
        finally:
            for connection in silent:
                connection.close()
        wait_until(lambda: threading.active_count() == before)
        assert ask(server, "/-/healthy")[0] == 200


def test_busy_address_is_one_readable_error(tmp_path: Path) -> None:
    with (
        served(reader_of(tmp_path)) as server,
        pytest.raises(ExporterError, match=r"cannot listen on 127\.0\.0\.1 port"),
    ):
        TargetServer(("127.0.0.1", server.server_port), reader_of(tmp_path))


# --- command line -------------------------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    targets.add_arguments(parser)
    return targets.main(parser.parse_args(arguments))


def test_table_shows_every_file_with_its_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, entry_value())
    TargetFile(tmp_path, "old", 0, address="10.0.0.8", port=19440, labels={}).write()
    age(tmp_path / "old-rank0.json", EXPIRY_SECONDS + 10)
    write(tmp_path, entry_value(), name="\x1b[2J.json")
    assert run(str(tmp_path)) == 1
    header, good, old, bad, summary = capsys.readouterr().out.splitlines()
    assert header.split() == ["RUN", "RANK", "TARGET", "AGE", "STATE"]
    assert good.split()[:3] == ["llm-7b", "3", "10.0.0.7:19443"]
    assert good.endswith("ok")
    assert old.endswith("expired, removed")
    assert bad.startswith(r"'\x1b[2J.json'")
    assert "refused: the name" in bad
    assert summary == "1 targets, 1 expired, 1 refused"


def test_json_holds_what_the_table_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, entry_value())
    assert run(str(tmp_path), "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert [entry["target"] for entry in value["entries"]] == ["10.0.0.7:19443"]
    assert (value["refused"], value["expired"], value["removed"]) == ([], [], [])


def test_given_cidr_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, entry_value())
    assert run(str(tmp_path), "--allow-cidr", "192.168.0.0/16") == 1
    assert "outside the allowed networks 192.168.0.0/16" in capsys.readouterr().out
    assert run(str(tmp_path), "--allow-cidr", "192.168.0.0/16", "--allow-cidr", "10.0.0.0/24") == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--allow-cidr", "10.0.0.1/8"],
        ["--allow-cidr", "all"],
        ["--serve", "19439"],
        ["--serve", "127.0.0.1:99999"],
        ["--serve", "127.0.0.1:"],
        ["--serve", "127.0.0.1:0", "--watch"],
    ],
)
def test_bad_argument_is_refused(tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(str(tmp_path), *arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err
