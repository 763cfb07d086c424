"""The endpoint behind a web configuration: TLS, client certificates, basic auth, and their change while it is open."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import bcrypt
import pytest
from serving import (
    HOST,
    PAGE,
    SCRAPE,
    Authority,
    ask,
    ask_again,
    connect,
    endpoint,
    endpoint_threads,
    hung_up,
    open_descriptors,
    wait_until,
)

from mindspore_exporter import server, webconfig
from mindspore_exporter.server import Health, MetricsServer

TLS = "tls_server_config: {cert_file: server.crt, key_file: server.key}\n"
MUTUAL = (
    "tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: authority.crt,"
    " client_auth_type: RequireAndVerifyClientCert%s}\n"
)
USERS = f"basic_auth_users: {{prometheus: {bcrypt.hashpw(b'secret', bcrypt.gensalt(4)).decode()}}}\n"
LOGIN = {"Authorization": "Basic " + base64.b64encode(b"prometheus:secret").decode()}
WRONG = {"Authorization": "Basic " + base64.b64encode(b"prometheus:wrong").decode()}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path)
    made.issue("server")
    return made


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def _write(text: str) -> Path:
        temporary = tmp_path / "web.yaml.new"
        temporary.write_text(text)
        return temporary.replace(tmp_path / "web.yaml")

    return _write


# --- TLS ----------------------------------------------------------------------------------------------------------


def test_page_is_served_over_tls(authority: Authority, write: Callable[[str], Path]) -> None:
    with endpoint(web_config=write(TLS)) as opened:
        reply = ask(opened, context=authority.trusting_context())
        assert (opened.tls, opened.authenticated) == (True, False)
    assert (reply.status, reply.body) == (200, PAGE)


def test_large_page_is_served_whole_over_tls(authority: Authority, write: Callable[[str], Path]) -> None:
    page = bytes(range(256)) * 20_000
    with endpoint(lambda request: page, web_config=write(TLS)) as opened:
        assert ask(opened, context=authority.trusting_context()).body == page


def test_connection_is_kept_over_tls(authority: Authority, write: Callable[[str], Path]) -> None:
    with endpoint(web_config=write(TLS)) as opened:
        assert opened.port
        connection = http.client.HTTPSConnection(HOST, opened.port, timeout=20, context=authority.trusting_context())
        ask_again(connection)
        first = connection.sock
        assert ask_again(connection, headers={"Connection": "close"}).status == 200
        assert first is not None
        connection.close()


def test_connection_ends_by_the_rules_of_tls(authority: Authority, write: Callable[[str], Path]) -> None:
    context = authority.trusting_context()
    with endpoint(web_config=write(TLS)) as opened, connect(opened) as plain:
        client = context.wrap_socket(plain, server_hostname=HOST, suppress_ragged_eofs=False)
        client.sendall(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
        received = b"".join(iter(lambda: client.recv(65536), b""))
        client.close()
    assert received.endswith(PAGE)


@pytest.mark.parametrize(
    ("minimum", "maximum", "client_maximum", "agreed"),
    [
        ("TLS12", "TLS13", "TLSv1_3", "TLSv1.3"),
        ("TLS12", "TLS12", "TLSv1_3", "TLSv1.2"),
        ("TLS13", "TLS13", "TLSv1_2", ""),
    ],
)
def test_tls_versions_are_those_allowed(
    authority: Authority,
    write: Callable[[str], Path],
    minimum: str,
    maximum: str,
    client_maximum: str,
    agreed: str,
) -> None:
    context = authority.trusting_context()
    context.maximum_version = ssl.TLSVersion[client_maximum]
    text = TLS.replace("}", f", min_version: {minimum}, max_version: {maximum}}}")
    version = ""
    with endpoint(web_config=write(text)) as opened, connect(opened) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=HOST) as client:
                version = client.version() or ""
        except ssl.SSLError:
            version = ""
    assert version == agreed


def test_plain_http_is_not_answered_on_a_tls_port(authority: Authority, write: Callable[[str], Path]) -> None:
    with endpoint(web_config=write(TLS)) as opened:
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            ask(opened)
        assert ask(opened, context=authority.trusting_context()).status == 200


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00"])
def test_client_that_stops_in_the_handshake_is_hung_up_on(
    authority: Authority, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.2)
    with endpoint(web_config=write(TLS)) as opened, connect(opened) as client:
        client.sendall(sent)
        assert hung_up(client)


def test_clients_silent_in_the_handshake_do_not_keep_scrapers_out(
    authority: Authority, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 6)
    with endpoint(web_config=write(TLS)) as opened:
        silent = [connect(opened) for _ in range(15)]
        assert ask(opened, context=authority.trusting_context()).status == 200
        for client in silent:
            client.close()


def test_client_that_never_reads_is_hung_up_on_under_tls(
    authority: Authority, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.5)
    counted: list[str] = []
    with (
        endpoint(lambda request: b"a" * 32_000_000, web_config=write(TLS), scraped=counted.append) as opened,
        connect(opened) as plain,
        authority.trusting_context().wrap_socket(plain, server_hostname=HOST) as client,
    ):
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert wait_until(lambda: counted == ["error"])
        assert wait_until(lambda: not opened._running._pool._open)  # type: ignore[union-attr]


def test_hundred_starts_and_stops_under_tls_leave_no_socket_and_no_thread(
    authority: Authority, write: Callable[[str], Path]
) -> None:
    opened = MetricsServer(lambda r: PAGE, health=lambda: Health(True, ""), web_config=write(TLS))
    context = authority.trusting_context()
    before = open_descriptors()
    for number in range(100):
        port = opened.start(HOST, 0)
        client = socket.create_connection((HOST, port), timeout=20)
        if number % 2:
            client = context.wrap_socket(client, server_hostname=HOST)
        opened.stop()
        client.close()
    assert open_descriptors() == before
    assert endpoint_threads() == []


def test_renewed_certificate_is_shown_to_new_connections(
    authority: Authority, write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webconfig, "CHECK_SECONDS", 0.0)
    with endpoint(web_config=write(TLS)) as opened:
        ask(opened, context=authority.trusting_context())
        other = Authority(tmp_path, "other")
        other.issue("server")
        assert ask(opened, context=other.trusting_context()).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(opened, context=authority.trusting_context())


# --- client certificates ------------------------------------------------------------------------------------------


def test_client_with_a_certificate_of_the_authority_is_served(
    authority: Authority, write: Callable[[str], Path]
) -> None:
    context = authority.trusting_context(authority.issue("client", client=True))
    with endpoint(web_config=write(MUTUAL % "")) as opened:
        assert ask(opened, context=context).status == 200
        assert opened.authenticated


def test_client_without_a_certificate_is_not_served(authority: Authority, write: Callable[[str], Path]) -> None:
    with endpoint(web_config=write(MUTUAL % "")) as opened, pytest.raises((ssl.SSLError, ConnectionError)):
        ask(opened, context=authority.trusting_context())


def test_client_with_a_certificate_of_another_authority_is_not_served(
    authority: Authority, write: Callable[[str], Path], tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger").issue("client", client=True)
    with endpoint(web_config=write(MUTUAL % "")) as opened, pytest.raises((ssl.SSLError, ConnectionError)):
        ask(opened, context=authority.trusting_context(stranger))


def test_certificate_verified_if_given(authority: Authority, write: Callable[[str], Path], tmp_path: Path) -> None:
    text = (MUTUAL % "").replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")
    stranger = Authority(tmp_path, "stranger").issue("client", client=True)
    with endpoint(web_config=write(text)) as opened:
        assert ask(opened, context=authority.trusting_context()).status == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask(opened, context=authority.trusting_context(stranger))


@pytest.mark.parametrize(
    ("allowed", "served"),
    [("prometheus.example", True), ("127.0.0.1", True), ("other.example", False), ("example", False)],
)
def test_client_is_served_when_one_of_its_names_is_allowed(
    authority: Authority, write: Callable[[str], Path], allowed: str, served: bool
) -> None:
    context = authority.trusting_context(authority.issue("client", client=True, dns="prometheus.example"))
    with endpoint(web_config=write(MUTUAL % f", client_allowed_sans: [{allowed}]")) as opened:
        try:
            assert ask(opened, context=context).status == 200
        except (ConnectionError, http.client.HTTPException, ssl.SSLError):
            assert not served
        else:
            assert served


# --- basic auth ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/metrics", "/-/healthy", "/-/ready", "/", "/nope"])
def test_every_path_needs_the_password(write: Callable[[str], Path], path: str) -> None:
    with endpoint(web_config=write(USERS)) as opened:
        refused, served = ask(opened, path), ask(opened, path, headers=LOGIN)
        assert (opened.tls, opened.authenticated) == (False, True)
    assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, 'Basic realm="metrics"')
    assert served.status == (404 if path == "/nope" else 200)


def test_wrong_password_is_401_for_every_method(write: Callable[[str], Path]) -> None:
    with endpoint(web_config=write(USERS)) as opened:
        assert ask(opened, headers=WRONG).status == 401
        assert ask(opened, method="POST", headers=WRONG).status == 401


def test_who_is_not_let_in_is_no_scraper_and_starts_no_render(write: Callable[[str], Path]) -> None:
    rendered: list[object] = []
    with endpoint(lambda request: rendered.append(request) or PAGE, web_config=write(USERS)) as opened:
        ask(opened, headers={**SCRAPE, **WRONG})
        ask(opened, headers=SCRAPE)
        assert opened.scrapers() == ()
    assert rendered == []


def test_scrapes_with_the_password_cost_one_check(
    authority: Authority, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[bytes] = []
    real = bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", lambda password, hashed: checks.append(hashed) or real(password, hashed))
    with endpoint(web_config=write(TLS + USERS)) as opened:
        for _ in range(5):
            assert ask(opened, headers=LOGIN, context=authority.trusting_context()).status == 200
    assert len(checks) == 1


def test_request_for_whose_password_there_is_no_time_is_503(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webconfig, "FIRST_DELAY", 60.0)
    monkeypatch.setattr(webconfig, "MAX_DELAY", 60.0)
    with endpoint(web_config=write(USERS)) as opened:
        assert ask(opened, headers=WRONG).status == 401
        reply = ask(opened, headers={**LOGIN, "X-Prometheus-Scrape-Timeout-Seconds": "1"})
    assert (reply.status, reply.headers["Retry-After"]) == (503, "2")


def test_stop_does_not_wait_for_delayed_clients(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webconfig, "FIRST_DELAY", 60.0)
    monkeypatch.setattr(webconfig, "MAX_DELAY", 60.0)
    with endpoint(web_config=write(USERS)) as opened, connect(opened) as client:
        ask(opened, headers=WRONG)
        headers = {**LOGIN, "X-Prometheus-Scrape-Timeout-Seconds": "120"}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        client.sendall(f"GET / HTTP/1.1\r\n{head}\r\n".encode())
        assert wait_until(lambda: bool(opened._running._web.passwords._waiting))  # type: ignore[union-attr]
        stopping = threading.Thread(target=opened.stop)
        stopping.start()
        stopping.join(20)
        assert not stopping.is_alive()
    assert endpoint_threads() == []


def test_changed_users_are_in_force_for_kept_connections(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webconfig, "CHECK_SECONDS", 0.0)
    with endpoint(web_config=write(USERS)) as opened:
        assert opened.port
        connection = http.client.HTTPConnection(HOST, opened.port, timeout=20)
        assert ask_again(connection, headers=LOGIN).status == 200
        write(USERS.replace("prometheus", "bob"))
        assert ask_again(connection, headers=LOGIN).status == 401
        connection.close()


def test_configured_headers_are_on_every_answer(write: Callable[[str], Path]) -> None:
    text = USERS + "http_server_config: {headers: {X-Frame-Options: deny, Content-Security-Policy: sandbox}}\n"
    with endpoint(web_config=write(text)) as opened:
        replies = [
            ask(opened, headers=LOGIN),
            ask(opened),
            ask(opened, "/nope", headers=LOGIN),
            ask(opened, "/", headers=LOGIN),
        ]
    assert {reply.headers["X-Frame-Options"] for reply in replies} == {"deny"}
    assert {reply.headers["Content-Security-Policy"] for reply in replies} == {"sandbox"}
