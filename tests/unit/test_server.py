"""The endpoint over plain HTTP, with real sockets."""

from __future__ import annotations

import gzip
import http.client
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from serving import (
    HOST,
    PAGE,
    SCRAPE,
    Reply,
    ask,
    ask_again,
    connect,
    endpoint,
    endpoint_threads,
    hung_up,
    open_descriptors,
    wait_until,
)

from mindspore_exporter import metrics, server
from mindspore_exporter.errors import ConfigError, EndpointError
from mindspore_exporter.registry import Registry
from mindspore_exporter.server import Health, MetricsServer, PageRequest

PROMETHEUS_2_ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3_TEXT_ACCEPT = (
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.5,"
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.2"
)
ROOT = Path(__file__).resolve().parents[2]


class Renders:
    """A render function that notes what it was asked for, and can be held up."""

    def __init__(self, page: bytes = PAGE) -> None:
        self.requests: list[PageRequest] = []
        self.began = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()
        self.page = page

    def __call__(self, request: PageRequest) -> bytes:
        self.requests.append(request)
        self.began.release()
        assert self.go.wait(60)
        return self.page


@pytest.fixture
def renders() -> Renders:
    return Renders()


# --- the page -----------------------------------------------------------------------------------------------------


def test_page_is_prometheus_text_when_the_client_does_not_choose(renders: Renders) -> None:
    with endpoint(renders) as opened:
        reply = ask(opened)
    assert (reply.status, reply.body) == (200, PAGE)
    assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert renders.requests == [PageRequest(False, "full", frozenset())]


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (PROMETHEUS_2_ACCEPT, True),
        ("application/openmetrics-text", True),
        ("Application/OpenMetrics-Text; Version=1.0.0; q=0.9, text/plain; q=0.8", True),
        (PROMETHEUS_3_TEXT_ACCEPT, False),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;version=1.0.0;q=0", False),
        ("application/openmetrics-text;q=nonsense", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_format_is_what_the_client_prefers(renders: Renders, accept: str, openmetrics: bool) -> None:
    with endpoint(renders) as opened:
        reply = ask(opened, headers={"Accept": accept})
    assert renders.requests[0].openmetrics is openmetrics
    assert reply.headers["Content-Type"].startswith("application/openmetrics-text" if openmetrics else "text/plain")


def test_openmetrics_page_of_the_registry_is_what_the_parser_accepts() -> None:
    registry = Registry({"run": "r", "rank": "0"})
    registry.set(metrics.STEP, 7.0)
    with endpoint(lambda r: registry.render(r.openmetrics, r.profile, r.groups)) as opened:
        reply = ask(opened, headers={"Accept": PROMETHEUS_2_ACCEPT})
    assert reply.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(reply.body.decode())}
    assert families["mindspore_train_step"].samples[0].value == 7.0


def test_page_is_compressed_when_the_client_takes_gzip() -> None:
    with endpoint() as opened:
        reply = ask(opened, headers={"Accept-Encoding": "deflate, gzip;q=0.5"})
    assert reply.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(reply.body) == PAGE


@pytest.mark.parametrize("encoding", ["", "identity", "gzip;q=0", "br"])
def test_page_is_not_compressed_when_the_client_does_not_take_gzip(encoding: str) -> None:
    with endpoint() as opened:
        reply = ask(opened, headers={"Accept-Encoding": encoding})
    assert (reply.headers["Content-Encoding"], reply.body) == (None, PAGE)


def test_page_is_compressed_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = gzip.compress
    monkeypatch.setattr(server.gzip, "compress", lambda *args, **kw: calls.append(1) or real(*args, **kw))
    monkeypatch.setattr(server, "PAGE_SECONDS", 60.0)
    with endpoint() as opened:
        for _ in range(5):
            assert gzip.decompress(ask(opened, headers={"Accept-Encoding": "gzip"}).body) == PAGE
    assert len(calls) == 1


def test_head_has_the_length_of_the_page_and_no_body() -> None:
    with endpoint() as opened, connect(opened) as client:
        client.sendall(b"HEAD /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(PAGE)}".encode() in head
    assert body == b""


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("?profile=lean", PageRequest(False, "lean", frozenset())),
        ("?collect[]=device&collect[]=run", PageRequest(False, "full", frozenset({"device", "run"}))),
        ("?collect%5B%5D=device&profile=lean", PageRequest(False, "lean", frozenset({"device"}))),
        ("?unrelated=1", PageRequest(False, "full", frozenset())),
    ],
)
def test_query_chooses_profile_and_groups(renders: Renders, query: str, wanted: PageRequest) -> None:
    with endpoint(renders) as opened:
        assert ask(opened, f"/metrics{query}").status == 200
    assert renders.requests == [wanted]


def test_profile_is_the_default_when_the_query_does_not_choose(renders: Renders) -> None:
    with endpoint(renders, default_profile="lean") as opened:
        ask(opened)
    assert renders.requests[0].profile == "lean"


@pytest.mark.parametrize("query", ["profile=slim", "collect[]=disks", "profile=", "collect[]=device&collect[]=Device"])
def test_unknown_value_in_the_query_is_named_with_what_is_allowed(renders: Renders, query: str) -> None:
    with endpoint(renders) as opened:
        reply = ask(opened, f"/metrics?{query}")
    assert reply.status == 400
    assert repr(query.rpartition("=")[2]) in reply.body.decode()
    assert ", ".join(metrics.GROUPS if "collect" in query else ("full", "lean")) in reply.body.decode()
    assert not renders.requests


def test_query_of_too_many_parameters_is_refused(renders: Renders) -> None:
    with endpoint(renders) as opened:
        assert ask(opened, "/metrics?" + "a=1&" * 500).status == 400
    assert not renders.requests


# --- other paths and methods --------------------------------------------------------------------------------------


def test_healthy_while_not_ready() -> None:
    with endpoint(health=lambda: Health(False, "the worker has stopped")) as opened:
        ready, healthy = ask(opened, "/-/ready"), ask(opened, "/-/healthy")
    assert (ready.status, ready.body) == (503, b"the worker has stopped\n")
    assert healthy.status == 200


def test_ready_when_it_is() -> None:
    with endpoint() as opened:
        assert ask(opened, "/-/ready").status == 200


def test_error_in_the_health_function_is_not_shown() -> None:
    def health() -> Health:
        raise RuntimeError("/secret/path")

    with endpoint(health=health) as opened:
        reply = ask(opened, "/-/ready")
    assert reply.status == 500
    assert b"secret" not in reply.body


def test_landing_page_shows_the_title_escaped_and_links_to_the_page() -> None:
    with endpoint(title="llm <7b> rank 0") as opened:
        reply = ask(opened, "/")
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"llm &lt;7b&gt; rank 0" in reply.body
    assert re.findall(rb'href="([^"]*)"', reply.body) == [b"metrics", b"metrics?profile=lean", b"-/ready", b"-/healthy"]


@pytest.mark.parametrize("path", ["/nope", "/metrics/", "//metrics", "/-/reload", "/../etc/passwd"])
def test_other_paths_are_not_found(path: str) -> None:
    with endpoint() as opened:
        assert ask(opened, path).status == (200 if path == "//metrics" else 404)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "BREW"])
def test_other_methods_are_refused_with_those_allowed(renders: Renders, method: str) -> None:
    with endpoint(renders) as opened:
        reply = ask(opened, method=method, body=b"a=1" if method == "POST" else None)
    assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")
    assert not renders.requests


def test_versions_are_not_told() -> None:
    with endpoint() as opened:
        replies = [ask(opened, path) for path in ("/metrics", "/nope", "/")]
    assert {reply.headers["Server"] for reply in replies} == {"mindspore-exporter"}


def test_connection_is_kept_for_further_requests() -> None:
    with endpoint() as opened:
        assert opened.port
        connection = http.client.HTTPConnection(HOST, opened.port, timeout=20)
        ask_again(connection, "/-/healthy")
        first = connection.sock
        assert ask_again(connection).body == PAGE
        assert connection.sock is first is not None
        connection.close()


# --- one render a second ------------------------------------------------------------------------------------------


def test_scrapes_share_one_render(renders: Renders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PAGE_SECONDS", 60.0)
    with endpoint(renders) as opened:
        for _ in range(5):
            assert ask(opened).body == PAGE
    assert len(renders.requests) == 1


def test_page_is_rendered_anew_when_it_is_older_than_its_time(
    renders: Renders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PAGE_SECONDS", 0.0)
    with endpoint(renders) as opened:
        ask(opened)
        ask(opened)
    assert len(renders.requests) == 2


def test_concurrent_requests_wait_for_the_one_render(renders: Renders) -> None:
    renders.go.clear()
    with endpoint(renders) as opened, ThreadPoolExecutor(8) as clients:
        replies = [clients.submit(ask, opened) for _ in range(8)]
        assert wait_until(lambda: _slots_taken(opened) == 8)
        renders.go.set()
        assert {reply.result().body for reply in replies} == {PAGE}
    assert len(renders.requests) == 1


def test_different_pages_are_rendered_apart(renders: Renders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PAGE_SECONDS", 60.0)
    with endpoint(renders) as opened:
        for _ in range(2):
            for query in ("", "?profile=lean", "?collect[]=run"):
                ask(opened, f"/metrics{query}")
    assert len(renders.requests) == 3


def test_invalidate_lets_the_next_request_render(renders: Renders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PAGE_SECONDS", 60.0)
    with endpoint(renders) as opened:
        ask(opened)
        renders.page = b"final 1\n"
        opened.invalidate()
        assert ask(opened).body == b"final 1\n"


def test_request_after_invalidate_does_not_join_the_render_that_began_before(renders: Renders) -> None:
    renders.go.clear()
    with endpoint(renders) as opened, ThreadPoolExecutor(2) as clients:
        before = clients.submit(ask, opened)
        assert renders.began.acquire(timeout=20)
        opened.invalidate()
        after = clients.submit(ask, opened)
        assert wait_until(lambda: _slots_taken(opened) == 2)
        renders.go.set()
        assert before.result().status == after.result().status == 200
    assert len(renders.requests) == 2


def test_kept_pages_are_bounded(renders: Renders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_PAGES", 2)
    with endpoint(renders) as opened:
        for group in metrics.GROUPS[:4]:
            assert ask(opened, f"/metrics?collect[]={group}").status == 200
        assert len(opened._running.pages._flights) == 2


def test_asking_for_ever_different_pages_is_slowed_down(renders: Renders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_RENDERS", 3)
    with endpoint(renders) as opened:
        statuses = [ask(opened, f"/metrics?collect[]={group}").status for group in metrics.GROUPS[:4]]
    assert statuses == [200, 200, 200, 503]


def test_failed_render_is_500_without_its_reason_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def render(request: PageRequest) -> bytes:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(server, "PAGE_SECONDS", 0.0)
    with endpoint(render) as opened, caplog.at_level(logging.ERROR):
        replies = [ask(opened) for _ in range(3)]
    assert {reply.status for reply in replies} == {500}
    assert not any(b"secret" in reply.body for reply in replies)
    assert len([record for record in caplog.records if "cannot be rendered" in record.message]) == 1


def test_page_comes_back_after_a_failed_render(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[bytes] = []

    def render(request: PageRequest) -> bytes:
        return pages[0]

    monkeypatch.setattr(server, "PAGE_SECONDS", 0.0)
    with endpoint(render) as opened:
        assert ask(opened).status == 500
        pages.append(PAGE)
        assert ask(opened).body == PAGE


# --- deadlines and caps -------------------------------------------------------------------------------------------


def test_late_page_is_503_before_the_scrape_gives_up(renders: Renders) -> None:
    renders.go.clear()
    with endpoint(renders) as opened:
        began = time.monotonic()
        reply = ask(opened, headers={"X-Prometheus-Scrape-Timeout-Seconds": "1.0"})
        took = time.monotonic() - began
        renders.go.set()
    assert reply.status == 503
    assert 0.5 <= took < 1.0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("10", 9.5), ("2.5", 2.0), ("0.5", 0.25), ("1e9", 120.0)]
    + [(header, 10.0) for header in (None, "", "soon", "nan", "inf", "-1", "0")],
)
def test_time_limit_is_that_of_the_scrape_less_half_a_second(header: str | None, seconds: float) -> None:
    assert server._time_limit(header) == seconds


def test_health_is_told_while_a_render_hangs(renders: Renders) -> None:
    renders.go.clear()
    with endpoint(renders) as opened, ThreadPoolExecutor(1) as clients:
        scrape = clients.submit(ask, opened)
        assert renders.began.acquire(timeout=20)
        assert ask(opened, "/-/healthy").status == 200
        renders.go.set()
        assert scrape.result().status == 200


def test_request_beyond_the_cap_is_503_at_once(renders: Renders) -> None:
    renders.go.clear()
    with endpoint(renders) as opened, ThreadPoolExecutor(server.MAX_REQUESTS) as clients:
        waiting = [clients.submit(ask, opened) for _ in range(server.MAX_REQUESTS)]
        assert wait_until(lambda: _slots_taken(opened) == server.MAX_REQUESTS)
        refused = ask(opened)
        renders.go.set()
        assert {scrape.result().status for scrape in waiting} == {200}
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")


def test_cap_is_free_again_after_late_pages(renders: Renders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_REQUESTS", 1)
    renders.go.clear()
    with endpoint(renders) as opened:
        assert ask(opened, headers={"X-Prometheus-Scrape-Timeout-Seconds": "0.2"}).status == 503
        renders.go.set()
        assert ask(opened).status == 200


# --- slow, silent and broken clients ------------------------------------------------------------------------------


def test_silent_client_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    with endpoint() as opened, connect(opened) as client:
        assert hung_up(client)


def test_client_that_sends_a_byte_now_and_then_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.5)
    with endpoint() as opened, connect(opened) as client:
        client.settimeout(0.05)
        deadline = time.monotonic() + 20
        for byte in b"GET /metrics HTTP/1.1\r\nX-Slow: " + b"a" * 4000:
            try:
                client.sendall(bytes([byte]))
                assert client.recv(1) == b""
            except TimeoutError:
                assert time.monotonic() < deadline
                continue
            except ConnectionError:
                pass
            break
    assert time.monotonic() < deadline


def test_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.2)
    with endpoint() as opened, connect(opened) as client:
        client.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
        assert hung_up(client)


def test_client_that_never_reads_is_hung_up_on_and_takes_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 1.0)
    monkeypatch.setattr(server, "MAX_REQUESTS", 1)
    monkeypatch.setattr(server, "PAGE_SECONDS", 60.0)
    renders = Renders(b"a" * 32_000_000)
    with endpoint(renders) as opened, connect(opened) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert renders.began.acquire(timeout=20)
        assert wait_until(lambda: _waiting_connections(opened) == 1 and _slots_taken(opened) == 0)
        assert ask(opened).status == 200
        assert wait_until(lambda: not opened._running._pool._open)


def test_client_that_reads_little_by_little_gets_the_whole_page() -> None:
    page = b"a" * 30_000_000
    with endpoint(lambda request: page) as opened, connect(opened) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert received.endswith(page)


def test_silent_connections_do_not_keep_scrapers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 6)
    with endpoint() as opened:
        silent = [connect(opened) for _ in range(20)]
        assert ask(opened).body == PAGE
        assert len(endpoint_threads()) <= 6 + 2
        for client in silent:
            client.close()


def test_connection_of_the_crowding_address_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 5)
    with endpoint() as opened:
        assert opened.port
        scraper = http.client.HTTPConnection(HOST, opened.port, timeout=20, source_address=("127.0.0.2", 0))
        assert ask_again(scraper).status == 200
        kept = scraper.sock
        silent = [connect(opened) for _ in range(10)]
        assert wait_until(lambda: len(opened._running._pool._open) == 5)
        assert ask_again(scraper).status == 200
        assert scraper.sock is kept
        scraper.close()
        for client in silent:
            client.close()


def test_clients_are_served_when_no_thread_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at interpreter exit, where the last scrape is awaited and Python 3.12 makes no thread."""
    with endpoint() as opened:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        silent = [connect(opened) for _ in range(server.BASE_THREADS + 2)]
        assert ask(opened).body == PAGE
        for client in silent:
            client.close()


def test_superfluous_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_THREAD_SECONDS", 0.1)
    with endpoint() as opened:
        clients = [connect(opened) for _ in range(12)]
        assert wait_until(lambda: len(endpoint_threads()) == 12 + 2)
        for client in clients:
            client.close()
        assert wait_until(lambda: len(endpoint_threads()) == server.BASE_THREADS + 2)
        assert ask(opened).status == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 150 + b"\r\n", 431),
        (b"POST / HTTP/1.1\r\nContent-Length: 70000\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 200),
        (b"nonsense <script>\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/9.0\r\n\r\n", 505),
        (b"GET http://[broken/ HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_request_out_of_bounds_is_refused(request_bytes: bytes, status: int) -> None:
    with endpoint() as opened, connect(opened) as client:
        client.sendall(request_bytes)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert received.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"script" not in received


def test_client_that_goes_away_without_a_word_costs_nothing() -> None:
    with endpoint() as opened:
        for payload in (b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\n\r\n"):
            with connect(opened) as client:
                client.sendall(payload)
        assert wait_until(lambda: not opened._running._pool._open)
        assert ask(opened).status == 200


def test_endpoint_outlives_an_error_with_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoint() as opened:
        with monkeypatch.context() as broken:
            broken.setattr(server, "_plain_address", lambda host: host.nonsense)
            with connect(opened) as client:
                assert hung_up(client)
        assert ask(opened).status == 200


# --- counting scrapes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "method", "result"),
    [
        ("/metrics", "GET", ["ok"]),
        ("/metrics", "HEAD", ["ok"]),
        ("/metrics?profile=x", "GET", ["error"]),
        ("/metrics", "POST", ["error"]),
        ("/-/healthy", "GET", []),
        ("/", "GET", []),
    ],
)
def test_requests_for_the_page_are_counted_once(path: str, method: str, result: list[str]) -> None:
    counted: list[str] = []
    with endpoint(scraped=counted.append) as opened:
        ask(opened, path, method)
    assert counted == result


def test_failed_render_is_counted_as_error() -> None:
    counted: list[str] = []
    with endpoint(lambda request: PAGE[:: request.nonsense], scraped=counted.append) as opened:  # type: ignore[attr-defined]
        ask(opened)
    assert counted == ["error"]


def test_error_in_the_counting_function_does_not_reach_the_scrape() -> None:
    def scraped(result: str) -> None:
        raise RuntimeError("full")

    with endpoint(scraped=scraped) as opened:
        assert opened.port
        connection = http.client.HTTPConnection(HOST, opened.port, timeout=20)
        assert [ask_again(connection).status for _ in range(2)] == [200, 200]
        connection.close()


# --- scrapers -----------------------------------------------------------------------------------------------------


def test_scraper_is_who_announces_a_timeout() -> None:
    with endpoint() as opened:
        ask(opened, headers={"User-Agent": "curl/8"})
        ask(opened, "/-/healthy", headers=SCRAPE)
        ask(opened, headers=SCRAPE)
        assert [scraper.key for scraper in opened.scrapers()] == [f"{HOST} Prometheus/2.42.0"]


def test_scraper_has_its_longest_interval() -> None:
    scrapers = server._Scrapers()
    for at in (100.0, 115.0, 175.0, 190.0):
        scrapers.saw("a", at)
    scrapers.saw("b", 200.0)
    assert [(s.last_seen, s.interval) for s in scrapers.all()] == [(190.0, 60.0), (200.0, None)]


def test_scrapers_are_bounded_and_the_one_not_seen_for_longest_goes() -> None:
    scrapers = server._Scrapers()
    for number in range(server.MAX_SCRAPERS):
        scrapers.saw(str(number), float(number))
    scrapers.saw("0", 99.0)
    scrapers.saw("new", 100.0)
    keys = [scraper.key for scraper in scrapers.all()]
    assert len(keys) == server.MAX_SCRAPERS
    assert "0" in keys
    assert "1" not in keys


def test_scraper_is_unserved_until_it_has_a_page_rendered_after_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PAGE_SECONDS", 60.0)
    with endpoint() as opened:
        ask(opened, headers=SCRAPE)
        final_at = time.monotonic()
        assert len(opened.unserved_since(final_at)) == 1
        ask(opened, headers=SCRAPE)
        assert len(opened.unserved_since(final_at)) == 1, "the page was the one from before"
        opened.invalidate()
        ask(opened, headers=SCRAPE)
        assert wait_until(lambda: not opened.unserved_since(final_at))


def test_scraper_is_unserved_after_a_failed_scrape_and_after_head(renders: Renders) -> None:
    with endpoint(renders) as opened:
        moment = time.monotonic()
        ask(opened, headers=SCRAPE, path="/metrics?profile=x")
        ask(opened, headers=SCRAPE, method="HEAD")
        assert len(opened.unserved_since(moment)) == 1


def test_scraper_that_did_not_take_the_page_is_unserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.3)
    counted: list[str] = []
    with endpoint(Renders(b"a" * 32_000_000), scraped=counted.append) as opened, connect(opened) as client:
        moment = time.monotonic()
        client.sendall(b"GET /metrics HTTP/1.1\r\nX-Prometheus-Scrape-Timeout-Seconds: 5\r\n\r\n")
        assert wait_until(lambda: counted == ["error"])
        assert len(opened.unserved_since(moment)) == 1


def test_scraper_that_has_gone_is_not_waited_for() -> None:
    with endpoint() as opened:
        ask(opened, headers=SCRAPE)
        assert wait_until(lambda: not opened.unserved_since(time.monotonic(), within=0.01))


# --- life ---------------------------------------------------------------------------------------------------------


def test_hundred_starts_and_stops_leave_no_socket_and_no_thread() -> None:
    opened = MetricsServer(lambda request: PAGE, health=lambda: Health(True, ""))
    opened.start(HOST, 0)
    opened.stop()
    before = open_descriptors()
    for number in range(100):
        port = opened.start(HOST, 0)
        client = socket.create_connection((HOST, port), timeout=20)
        if number % 2:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(65536)
        opened.stop()
        assert hung_up(client)
        client.close()
    assert open_descriptors() == before
    assert endpoint_threads() == []


def test_same_port_can_be_had_again_at_once() -> None:
    opened = MetricsServer(lambda request: PAGE, health=lambda: Health(True, ""))
    port = opened.start(HOST, 0)
    for _ in range(5):
        ask(opened)
        opened.stop()
        assert opened.start(HOST, port) == port
    opened.stop()


def test_closed_endpoint_has_no_port_and_stop_may_be_repeated() -> None:
    with endpoint() as opened:
        assert (opened.port is not None, opened.address) == (True, HOST)
        opened.stop()
        opened.stop()
        assert (opened.port, opened.address, opened.tls, opened.authenticated) == (None, None, False, False)


def test_stop_does_not_wait_for_clients(renders: Renders) -> None:
    renders.go.clear()
    with endpoint(renders) as opened, ThreadPoolExecutor(1) as clients, connect(opened) as silent:
        scrape = clients.submit(_outcome, opened)
        assert renders.began.acquire(timeout=20)
        stopping = threading.Thread(target=opened.stop)
        stopping.start()
        assert hung_up(silent)
        assert scrape.result(20) == "hung up"
        renders.go.set()
        stopping.join(20)
        assert not stopping.is_alive()
    assert endpoint_threads() == []


def test_stop_goes_on_when_a_render_never_ends(renders: Renders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_SECONDS", 0.3)
    renders.go.clear()
    with endpoint(renders) as opened:
        assert ask(opened, headers={"X-Prometheus-Scrape-Timeout-Seconds": "0.2"}).status == 503
        opened.stop()
        assert endpoint_threads() == ["mindspore-exporter-http-render"]
        renders.go.set()
        assert wait_until(lambda: not endpoint_threads())


def test_busy_port_is_probed_past_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with endpoint() as first, caplog.at_level(logging.WARNING):
        assert first.port
        second = MetricsServer(lambda request: PAGE, health=lambda: Health(True, ""))
        port = second.start(HOST, first.port, probe=20)
        assert first.port < port <= first.port + 20
        assert ask(second).status == 200
        second.stop()
    assert [record.message for record in caplog.records] == [
        f"exporter: port {first_port} of {HOST} is taken, the endpoint is at port {port}"
        for first_port in [int(caplog.records[0].args[0])]  # type: ignore[index, arg-type]
    ]


def test_busy_port_without_probing_is_an_error_that_names_it() -> None:
    with endpoint() as first:
        assert first.port
        second = MetricsServer(lambda request: PAGE, health=lambda: Health(True, ""))
        before = open_descriptors()
        with pytest.raises(EndpointError, match=f"cannot listen on {HOST} port {first.port}: Address already in use"):
            second.start(HOST, first.port)
        assert open_descriptors() == before
        assert second.port is None


def test_all_probed_ports_busy_is_an_error_that_names_them() -> None:
    first = _two_neighbours()
    try:
        opened = MetricsServer(lambda request: PAGE, health=lambda: Health(True, ""))
        low = first[0].getsockname()[1]
        with pytest.raises(EndpointError, match=f"ports {low} to {low + 1}: Address already in use"):
            opened.start(HOST, low, probe=1)
    finally:
        for listener in first:
            listener.close()


@pytest.mark.parametrize(
    ("host", "reason"),
    [("203.0.113.7", "Cannot assign requested address"), ("no-such-host.invalid", "no-such-host.invalid port 0: ")],
)
def test_address_that_cannot_be_listened_on_is_an_error(host: str, reason: str) -> None:
    opened = MetricsServer(lambda request: PAGE, health=lambda: Health(True, ""))
    with pytest.raises(EndpointError, match=re.escape(reason)):
        opened.start(host, 0)


def test_open_endpoint_cannot_be_started() -> None:
    with endpoint() as opened, pytest.raises(EndpointError, match=f"open already, at {HOST} port {opened.port}"):
        opened.start(HOST, 0)


def test_no_threads_to_be_had_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = threading.Thread.start, []

    def refuse_the_third(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
    opened = MetricsServer(lambda request: PAGE, health=lambda: Health(True, ""))
    before = open_descriptors()
    with pytest.raises(EndpointError, match="can't start new thread"):
        opened.start(HOST, 0)
    assert open_descriptors() == before
    assert endpoint_threads() == []


def test_web_configuration_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    opened = MetricsServer(lambda r: PAGE, health=lambda: Health(True, ""), web_config=tmp_path / "web.yaml")
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"web\.yaml"):
        opened.start(HOST, 0)
    assert open_descriptors() == before


@pytest.mark.skipif(not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"), reason="the host has no IPv6")
def test_listening_on_all_addresses_serves_both_families() -> None:
    opened = MetricsServer(lambda request: PAGE, health=lambda: Health(True, ""))
    port = opened.start("::", 0)
    for host in ("127.0.0.1", "::1"):
        connection = http.client.HTTPConnection(host, port, timeout=20)
        assert ask_again(connection, headers=SCRAPE).status == 200
        connection.close()
    keys = {scraper.key for scraper in opened.scrapers()}
    opened.stop()
    assert keys == {"127.0.0.1 Prometheus/2.42.0", "::1 Prometheus/2.42.0"}


# --- forked children ----------------------------------------------------------------------------------------------

PARENT = """
import os, signal, socket, sys, time
from mindspore_exporter.server import Health, MetricsServer

server = MetricsServer(lambda request: b"a 1", health=lambda: Health(True, ""))
port = server.start("127.0.0.1", 0)
client = socket.create_connection(("127.0.0.1", port))
client.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
client.recv(65536)
server._life.acquire()
server._running._pool._changed.acquire()
child = os.fork()
if child == 0:
    server.abandon_in_child()
    client.close()
    server.stop()
    names = ["/proc/self/fd/" + name for name in os.listdir("/proc/self/fd")]
    left = sum(os.readlink(name).startswith("socket:") for name in names if os.path.lexists(name))
    os.write(1, f"child {os.getpid()} {left} {server.port}\\n".encode())
    time.sleep(120)
    os._exit(0)
server._running._pool._changed.release()
server._life.release()
os.write(1, f"parent {port}\\n".encode())
command = sys.stdin.readline().strip()
if command == "stop":
    server.stop()
    print("stopped", flush=True)
    sys.stdin.readline()
"""


class Forked:
    """A process with an endpoint, and its forked child."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "exporter")},
        )
        said = dict(line.split(maxsplit=1) for line in (self.line(), self.line()))
        self.port = int(said["parent"])
        self.child, self.sockets_of_child, self.port_of_child = said["child"].split()

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def close(self) -> None:
        os.kill(int(self.child), signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()


@pytest.fixture
def forked() -> Iterator[Forked]:
    made = Forked()
    yield made
    made.close()


def test_child_holds_no_socket_even_when_locks_were_held_at_the_fork(forked: Forked) -> None:
    assert (forked.sockets_of_child, forked.port_of_child) == ("0", "None")


def test_parent_still_serves_after_its_child_gave_the_sockets_back(forked: Forked) -> None:
    connection = http.client.HTTPConnection(HOST, forked.port, timeout=20)
    assert ask_again(connection).status == 200
    connection.close()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_port_is_free_at_once_when_the_parent_ends_and_its_child_lives(forked: Forked, end: str) -> None:
    if end == "stop":
        assert forked.process.stdin
        forked.process.stdin.write("stop\n")
        forked.process.stdin.flush()
        assert forked.line() == "stopped\n"
    else:
        forked.process.kill()
        forked.process.wait()
    os.kill(int(forked.child), 0)
    again = MetricsServer(lambda request: PAGE, health=lambda: Health(True, ""))
    assert again.start(HOST, forked.port) == forked.port
    assert ask(again).status == 200
    again.stop()


# --- helpers ------------------------------------------------------------------------------------------------------


def _slots_taken(opened: MetricsServer) -> int:
    return server.MAX_REQUESTS - opened._running.slots._value  # type: ignore[union-attr, attr-defined]


def _waiting_connections(opened: MetricsServer) -> int:
    return sum(connection.waits_since is not None for connection in list(opened._running._pool._open))  # type: ignore[union-attr]


def _outcome(opened: MetricsServer) -> Reply | str:
    try:
        return ask(opened)
    except (ConnectionError, http.client.HTTPException):
        return "hung up"


def _two_neighbours() -> list[socket.socket]:
    """Two listening sockets on ports that follow each other."""
    for _ in range(50):
        first = socket.create_server((HOST, 0))
        try:
            return [first, socket.create_server((HOST, first.getsockname()[1] + 1))]
        except OSError:
            first.close()
    raise AssertionError("no two neighbouring ports are free")
