"""The web configuration file: what it may say, how it is read again, how passwords are checked."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import pty
import select
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bcrypt
import pytest
from serving import Authority, wait_until

from mindspore_exporter import webconfig
from mindspore_exporter.errors import ConfigError
from mindspore_exporter.webconfig import PasswordChecks, Verdict, WebConfigFile

HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
USERS = {b"prometheus": HASH.encode()}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a web configuration beside a certificate `server` and an authority."""
    authority = Authority(tmp_path)
    authority.issue("server")
    authority.issue("other")
    authority.issue("locked", password=b"secret")

    def _write(text: str) -> Path:
        path = tmp_path / "web.yaml"
        temporary = tmp_path / "web.yaml.new"
        temporary.write_text(text)
        temporary.replace(path)
        return path

    return _write


def tls(*lines: str) -> str:
    return "\n  ".join(["tls_server_config:", "cert_file: server.crt", "key_file: server.key", *lines]) + "\n"


# --- the file -----------------------------------------------------------------------------------------------------


def test_tls_with_paths_relative_to_the_file(write: Callable[[str], Path]) -> None:
    config = WebConfigFile(write(tls())).current()
    assert config.tls is not None
    assert config.tls.minimum_version is ssl.TLSVersion.TLSv1_2
    assert config.tls.maximum_version is ssl.TLSVersion.TLSv1_3
    assert config.tls.verify_mode is ssl.CERT_NONE
    assert not config.authenticated


def test_users_and_headers(write: Callable[[str], Path]) -> None:
    text = f"basic_auth_users: {{prometheus: {HASH}}}\nhttp_server_config:\n  http2: true\n  headers:\n"
    text += "    X-Frame-Options: deny\n    X-XSS-Protection: ''\n    Content-Security-Policy: default-src 'self'\n"
    config = WebConfigFile(write(text)).current()
    assert config.users == USERS
    assert config.headers == {"X-Frame-Options": "deny", "Content-Security-Policy": "default-src 'self'"}
    assert config.tls is None
    assert config.authenticated


def test_client_certificates(write: Callable[[str], Path]) -> None:
    text = tls("client_auth_type: RequireAndVerifyClientCert", "client_ca_file: authority.crt")
    config = WebConfigFile(write(text)).current()
    assert config.tls is not None
    assert config.tls.verify_mode is ssl.CERT_REQUIRED
    assert config.authenticated


def test_certificate_that_is_verified_only_if_given_authenticates_nobody(write: Callable[[str], Path]) -> None:
    text = tls("client_auth_type: VerifyClientCertIfGiven", "client_ca_file: authority.crt")
    config = WebConfigFile(write(text)).current()
    assert config.tls is not None
    assert config.tls.verify_mode is ssl.CERT_OPTIONAL
    assert not config.authenticated


def test_versions_and_suites(write: Callable[[str], Path]) -> None:
    suites = "cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256]"
    text = tls("min_version: TLS12", "max_version: TLS12", "prefer_server_cipher_suites: false", suites)
    context = WebConfigFile(write(text)).current().tls
    assert context is not None
    assert context.maximum_version is ssl.TLSVersion.TLSv1_2
    assert not context.options & ssl.OP_CIPHER_SERVER_PREFERENCE
    names = [cipher["name"] for cipher in context.get_ciphers() if not cipher["name"].startswith("TLS_")]
    assert names == ["ECDHE-ECDSA-AES256-GCM-SHA384", "ECDHE-RSA-CHACHA20-POLY1305"]


@pytest.mark.parametrize("name", webconfig.CIPHERS)
def test_every_suite_that_may_be_named_is_one_that_openssl_has(write: Callable[[str], Path], name: str) -> None:
    context = WebConfigFile(write(tls(f"cipher_suites: [{name}]"))).current().tls
    assert context is not None
    assert webconfig.CIPHERS[name] in [cipher["name"] for cipher in context.get_ciphers()]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "says nothing"),
        ("{}", "says nothing"),
        ("[1]", "says nothing"),
        ("a: [", "is not YAML"),
        ("basic_auth_users: &a {a: *a}", "aliases are not allowed"),
        ("rate_limit: {burst: 1}", "rate_limit: not supported"),
        ("basic_auth: {a: b}", "basic_auth: no such key"),
        (f"basic_auth_users: {{a: {HASH}}}\nbasic_auth_users: {{}}", "'basic_auth_users' is given twice"),
        (f"basic_auth_users: {{a: {HASH}, a: {HASH}}}", "'a' is given twice"),
        ("{[1]: 2}", "is not YAML"),
        ("basic_auth_users: {alice: secret}", "basic_auth_users: user 'alice': not a bcrypt hash"),
        ("basic_auth_users: {alice: 12}", "basic_auth_users.alice: Input should be a valid string"),
        (f"basic_auth_users: {{'a:b': {HASH}}}", "cannot hold a colon"),
        (f"basic_auth_users: {{a: {HASH.replace('$04$', '$31$')}}}", "bcrypt cost 31, at most 16 is allowed"),
        ("http_server_config: {headers: {Server: x}}", "'Server' is not possible; allowed: Strict-Transport-Security"),
        ("http_server_config: {headers: {X-Frame-Options: all}}", "'all' is not possible; allowed: deny, sameorigin"),
        ('http_server_config: {headers: {X-XSS-Protection: "0\\r\\nX: y"}}', "on one line"),
        ("http_server_config: {headers: {X-XSS-Protection: ü}}", "printable ASCII"),
        ("tls_server_config: {key_file: server.key}", "tls_server_config.cert_file: Field required"),
        ("tls_server_config: {min_version: TLS12}", "tls_server_config.key_file: Field required"),
        (tls("cert: xyz"), "tls_server_config.cert: inline PEM is not supported"),
        (tls("key: xyz"), "tls_server_config.key: inline PEM is not supported"),
        (tls("client_ca: xyz"), "tls_server_config.client_ca: inline PEM is not supported"),
        (tls("curve_preferences: [X25519]"), "tls_server_config.curve_preferences: curves cannot be chosen"),
        (tls("min_version: TLS10"), "TLS10 is broken and not supported; allowed: TLS12, TLS13"),
        (tls("max_version: SSL3"), "'SSL3' is not possible; allowed: TLS12, TLS13"),
        (tls("min_version: TLS13", "max_version: TLS12"), "min_version TLS13 is above max_version TLS12"),
        (tls("cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]"), "'TLS_RSA_WITH_RC4_128_SHA' is not possible; allowed: TLS_"),
        (tls("cipher_suites: [TLS_AES_128_GCM_SHA256]"), "suites of TLS 1.3 cannot be chosen"),
        (tls("client_auth_type: RequestClientCert"), "RequestClientCert takes a certificate without verifying it"),
        (tls("client_auth_type: RequireAnyClientCert"), "RequireAnyClientCert takes a certificate without verifying"),
        (tls("client_auth_type: Yes!"), "'Yes!' is not possible; allowed: NoClientCert, VerifyClientCertIfGiven"),
        (tls("client_auth_type: RequireAndVerifyClientCert"), "RequireAndVerifyClientCert needs client_ca_file"),
        (tls("client_ca_file: authority.crt"), "client_ca_file has no effect without client_auth_type"),
        (tls("client_allowed_sans: [a]"), "client_allowed_sans needs client_auth_type RequireAndVerifyClientCert"),
        (tls().replace("server.crt", "none.crt"), "none.crt: cannot be read: No such file or directory"),
        (tls().replace("server.key", "other.key"), "key values mismatch (wanted: PEM, unencrypted, matching)"),
        (tls().replace("server.crt", "web.yaml"), "web.yaml, key_file"),
        (tls().replace("server.", "locked."), "wanted: PEM, unencrypted, matching"),
        (tls("client_auth_type: VerifyClientCertIfGiven", "client_ca_file: server.key"), "client_ca_file"),
    ],
)
def test_what_cannot_be_used_is_an_error_that_says_why(write: Callable[[str], Path], text: str, said: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as raised:
        WebConfigFile(path)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


def test_secrets_are_not_in_the_error(write: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError) as raised:
        WebConfigFile(write("basic_auth_users: {alice: hunter2}\n" + tls("key: hunter2")))
    assert "hunter2" not in str(raised.value)


def test_secrets_are_not_in_the_representation(write: Callable[[str], Path]) -> None:
    assert HASH not in repr(WebConfigFile(write(f"basic_auth_users: {{alice: {HASH}}}")).current())


def test_encrypted_key_asks_no_terminal(write: Callable[[str], Path]) -> None:
    path = write(tls().replace("server.", "locked."))
    code = f"from mindspore_exporter.webconfig import WebConfigFile, Path; WebConfigFile(Path({str(path)!r}))"
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT / "exporter")})
    with contextlib.suppress(OSError), open(terminal, "rb", buffering=0) as screen:  # the error is the terminal's end
        shown = b""
        while select.select([screen], [], [], 30)[0] and (read := screen.read(65536)):
            shown += read
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert b"ConfigError" in shown
    assert b"pass phrase" not in shown


def test_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file or directory"):
        WebConfigFile(tmp_path / "none.yaml")


def test_file_that_is_too_large_is_an_error(write: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="larger than 262144 bytes"):
        WebConfigFile(write("#" * 300_000))


def test_users_without_bcrypt_are_an_error_that_names_the_extra(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bcrypt", None)
    with pytest.raises(ConfigError, match=r"pip install 'mindspore-exporter\[secure\]'"):
        WebConfigFile(write(f"basic_auth_users: {{a: {HASH}}}"))


def test_tls_needs_no_bcrypt(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bcrypt", None)
    assert WebConfigFile(write(tls())).current().tls is not None


# --- read again ---------------------------------------------------------------------------------------------------


@pytest.fixture
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webconfig, "CHECK_SECONDS", 0.0)


@pytest.mark.usefixtures("always_looking")
def test_changed_file_is_in_force(write: Callable[[str], Path]) -> None:
    file = WebConfigFile(write(f"basic_auth_users: {{a: {HASH}}}"))
    write(f"basic_auth_users: {{bob: {HASH}}}")
    assert set(file.current().users) == {b"bob"}


@pytest.mark.usefixtures("always_looking")
def test_unchanged_files_are_not_read_again(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = WebConfigFile(write(tls()))
    config = file.current()
    assert file.current() is config


def test_files_are_looked_at_once_a_second(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = WebConfigFile(write(tls()))
    looked: list[Path] = []
    monkeypatch.setattr(webconfig, "_stamp", lambda path: looked.append(path) or "gone")
    for _ in range(100):
        file.current()
    assert len(looked) <= 3


@pytest.mark.usefixtures("always_looking")
def test_changed_certificate_is_in_force(write: Callable[[str], Path], tmp_path: Path) -> None:
    file = WebConfigFile(write(tls()))
    before = file.current().tls
    Authority(tmp_path, "second").issue("server")
    assert file.current().tls is not before


@pytest.mark.usefixtures("always_looking")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "tls_server_config: {}",
        f"basic_auth_users: {{a: {HASH}}}",
        tls().replace("server.crt", "no.crt"),
    ],
)
def test_broken_new_version_leaves_the_old_one_in_force_and_is_logged_once(
    write: Callable[[str], Path], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file = WebConfigFile(write(tls() + f"basic_auth_users: {{a: {HASH}}}\n"))
    before = file.current()
    write(text)
    with caplog.at_level(logging.ERROR):
        assert all(file.current() is before for _ in range(5))
    assert len(caplog.records) == 1
    assert "stays in force" in caplog.records[0].message


@pytest.mark.usefixtures("always_looking")
def test_removed_file_leaves_the_old_version_in_force(write: Callable[[str], Path]) -> None:
    path = write(f"basic_auth_users: {{a: {HASH}}}")
    file = WebConfigFile(path)
    before = file.current()
    path.unlink()
    assert file.current() is before


@pytest.mark.usefixtures("always_looking")
def test_tls_cannot_be_added_while_open(write: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    file = WebConfigFile(write(f"basic_auth_users: {{a: {HASH}}}"))
    write(tls())
    with caplog.at_level(logging.ERROR):
        assert file.current().tls is None
    assert "cannot be added or removed while the endpoint is open" in caplog.text


@pytest.mark.usefixtures("always_looking")
def test_certificate_and_key_replaced_one_after_the_other_end_in_force(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    file = WebConfigFile(write(tls()))
    before = file.current().tls
    (tmp_path / "server.crt").write_bytes((tmp_path / "other.crt").read_bytes())
    assert file.current().tls is before
    (tmp_path / "server.key").write_bytes((tmp_path / "other.key").read_bytes())
    assert file.current().tls is not before


@pytest.mark.usefixtures("always_looking")
def test_missing_certificate_of_a_new_version_is_taken_when_it_comes(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    file = WebConfigFile(write(tls()))
    before = file.current().tls
    write(tls().replace("server.", "late."))
    assert file.current().tls is before
    Authority(tmp_path, "third").issue("late")
    assert file.current().tls is not before


# --- passwords ----------------------------------------------------------------------------------------------------


class CountingBcrypt:
    """Counts the checks, and how many ran at the same time at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hashes: list[bytes] = []
        self.running = 0
        self.most_running = 0
        self.go = threading.Event()
        self.go.set()
        self._real = bcrypt.checkpw
        monkeypatch.setattr(bcrypt, "checkpw", self._check)

    def _check(self, password: bytes, hashed: bytes) -> bool:
        self.hashes.append(hashed)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        assert self.go.wait(60)
        try:
            return self._real(password, hashed)
        finally:
            self.running -= 1


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> CountingBcrypt:
    return CountingBcrypt(monkeypatch)


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webconfig, "FIRST_DELAY", 0.0)
    monkeypatch.setattr(webconfig, "REST", 0.0)


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def test_password_of_a_user_is_accepted() -> None:
    assert PasswordChecks().check(USERS, basic("prometheus", "secret"), "10.0.0.1", soon()) is Verdict.ACCEPTED


@pytest.mark.usefixtures("no_delays")
@pytest.mark.parametrize(
    "header",
    [
        basic("prometheus", "wrong"),
        basic("prometheus", ""),
        basic("nobody", "secret"),
        basic("", "secret"),
        basic("prometheus", "a\0b"),
        basic("prometheus", "a" * 200),
        "Basic " + base64.b64encode(b"prometheus").decode(),
        "Basic " + base64.b64encode(b"\xff:\xff").decode(),
        "Basic !!!",
        "Basic",
        "Bearer secret",
        "",
        None,
    ],
)
def test_everything_else_is_refused(header: str | None) -> None:
    assert PasswordChecks().check(USERS, header, "10.0.0.1", soon()) is Verdict.REFUSED


def test_password_longer_than_bcrypt_looks_at_is_accepted_as_other_implementations_do() -> None:
    users = {b"a": bcrypt.hashpw(b"x" * 72, bcrypt.gensalt(4))}
    assert PasswordChecks().check(users, basic("a", "x" * 100), "10.0.0.1", soon()) is Verdict.ACCEPTED


def test_hash_made_by_htpasswd_is_understood() -> None:
    users = {b"a": HASH.replace("$2b$", "$2y$").encode()}
    assert PasswordChecks().check(users, basic("a", "secret"), "10.0.0.1", soon()) is Verdict.ACCEPTED


def test_verified_password_is_checked_once(checked: CountingBcrypt) -> None:
    checks = PasswordChecks()
    for number in range(10):
        assert checks.check(USERS, basic("prometheus", "secret"), f"10.0.0.{number}", soon()) is Verdict.ACCEPTED
    assert len(checked.hashes) == 1


@pytest.mark.usefixtures("no_delays")
def test_refused_password_is_checked_once(checked: CountingBcrypt) -> None:
    checks = PasswordChecks()
    for _ in range(5):
        assert checks.check(USERS, basic("prometheus", "wrong"), "10.0.0.1", soon()) is Verdict.REFUSED
    assert len(checked.hashes) == 1


@pytest.mark.usefixtures("no_delays")
def test_guesses_do_not_displace_the_verified_password(
    checked: CountingBcrypt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webconfig, "MAX_REMEMBERED", 4)
    checks = PasswordChecks()
    checks.check(USERS, basic("prometheus", "secret"), "10.0.0.1", soon())
    for number in range(8):
        checks.check(USERS, basic("prometheus", str(number)), "10.0.0.2", soon())
    before = len(checked.hashes)
    assert checks.check(USERS, basic("prometheus", "secret"), "10.0.0.1", soon()) is Verdict.ACCEPTED
    assert len(checked.hashes) == before
    assert len(checks._refused) == 4


def test_changed_hash_is_checked_anew(checked: CountingBcrypt) -> None:
    checks = PasswordChecks()
    checks.check(USERS, basic("prometheus", "secret"), "10.0.0.1", soon())
    other = {b"prometheus": bcrypt.hashpw(b"new", bcrypt.gensalt(4))}
    assert checks.check(other, basic("prometheus", "secret"), "10.0.0.1", soon()) is Verdict.REFUSED
    assert checks.check({b"x": USERS[b"prometheus"]}, basic("prometheus", "secret"), "h", soon()) is Verdict.REFUSED


@pytest.mark.usefixtures("always_looking")
def test_reading_the_file_again_forgets_verified_passwords(
    write: Callable[[str], Path], checked: CountingBcrypt
) -> None:
    file = WebConfigFile(write(f"basic_auth_users: {{prometheus: {HASH}}}"))
    for text in ("", "# changed\n"):
        write(f"{text}basic_auth_users: {{prometheus: {HASH}}}")
        users = file.current().users
        assert file.passwords.check(users, basic("prometheus", "secret"), "h", soon()) is Verdict.ACCEPTED
    assert len(checked.hashes) == 2


def test_unknown_user_costs_as_much_as_the_costliest(checked: CountingBcrypt) -> None:
    users = {**USERS, b"other": bcrypt.hashpw(b"x", bcrypt.gensalt(6))}
    PasswordChecks().check(users, basic("nobody", "secret"), "10.0.0.1", soon())
    assert [hashed[4:6] for hashed in checked.hashes] == [b"06"]


def test_one_check_runs_at_a_time(checked: CountingBcrypt) -> None:
    checks = PasswordChecks()
    users = {f"user{number}".encode(): HASH.encode() for number in range(8)}
    with ThreadPoolExecutor(8) as clients:
        verdicts = [
            clients.submit(checks.check, users, basic(f"user{number}", "secret"), f"10.0.0.{number}", soon())
            for number in range(8)
        ]
        assert {verdict.result() for verdict in verdicts} == {Verdict.ACCEPTED}
    assert (checked.most_running, len(checked.hashes)) == (1, 8)


def test_clients_that_wait_for_the_same_check_share_it(checked: CountingBcrypt) -> None:
    checks = PasswordChecks()
    checked.go.clear()
    with ThreadPoolExecutor(4) as clients:
        verdicts = [
            clients.submit(checks.check, USERS, basic("prometheus", "secret"), f"10.0.0.{number}", soon())
            for number in range(4)
        ]
        assert wait_until(lambda: len(checks._waiting) == 4)
        checked.go.set()
        assert {verdict.result() for verdict in verdicts} == {Verdict.ACCEPTED}
    assert len(checked.hashes) == 1


def test_check_that_does_not_come_by_the_deadline_is_busy(checked: CountingBcrypt) -> None:
    checks = PasswordChecks()
    checked.go.clear()
    with ThreadPoolExecutor(1) as clients:
        first = clients.submit(checks.check, USERS, basic("prometheus", "secret"), "10.0.0.1", soon())
        assert wait_until(lambda: checked.running == 1)
        assert checks.check(USERS, basic("prometheus", "other"), "10.0.0.2", soon(0.05)) is Verdict.BUSY
        checked.go.set()
        assert first.result() is Verdict.ACCEPTED


def test_failures_of_a_client_delay_its_next_check_up_to_a_bound() -> None:
    delays = [webconfig._Failures(count, last=100.0).free_at - 100.0 for count in (1, 2, 3, 5, 6, 16)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 1.6, 2.0, 2.0])


def test_next_check_of_a_client_that_failed_waits(monkeypatch: pytest.MonkeyPatch, checked: CountingBcrypt) -> None:
    monkeypatch.setattr(webconfig, "FIRST_DELAY", 0.3)
    monkeypatch.setattr(webconfig, "REST", 0.0)
    checks = PasswordChecks()
    checks.check(USERS, basic("prometheus", "wrong"), "10.0.0.1", soon())
    began = time.monotonic()
    assert checks.check(USERS, basic("prometheus", "wrong"), "10.0.0.1", soon(0.1)) is Verdict.BUSY
    assert checks.check(USERS, basic("prometheus", "secret"), "10.0.0.1", soon()) is Verdict.ACCEPTED
    assert time.monotonic() - began >= 0.25


def test_delays_of_one_client_do_not_hold_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webconfig, "FIRST_DELAY", 60.0)
    monkeypatch.setattr(webconfig, "MAX_DELAY", 60.0)
    monkeypatch.setattr(webconfig, "REST", 0.0)
    checks = PasswordChecks()
    checks.check(USERS, basic("prometheus", "wrong"), "10.0.0.1", soon())
    with ThreadPoolExecutor(4) as clients:
        waiting = [
            clients.submit(checks.check, USERS, basic("prometheus", "secret"), "10.0.0.1", soon(120))
            for _ in range(webconfig.PLACES_PER_CLIENT)
        ]
        assert wait_until(lambda: checks._waiting == {"10.0.0.1": webconfig.PLACES_PER_CLIENT})
        assert checks.check(USERS, basic("prometheus", "x"), "10.0.0.1", soon()) is Verdict.BUSY, "no more places"
        assert checks.check(USERS, basic("prometheus", "secret"), "10.0.0.2", soon()) is Verdict.ACCEPTED
        checks.stop()
        assert {verdict.result(20) for verdict in waiting} == {Verdict.BUSY}
    assert checks._waiting == {}


def test_verified_password_is_accepted_while_its_address_is_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webconfig, "FIRST_DELAY", 60.0)
    monkeypatch.setattr(webconfig, "MAX_DELAY", 60.0)
    checks = PasswordChecks()
    checks.check(USERS, basic("prometheus", "secret"), "10.0.0.1", soon())
    checks.check(USERS, basic("prometheus", "wrong"), "10.0.0.1", soon())
    assert checks.check(USERS, basic("prometheus", "secret"), "10.0.0.1", soon(1)) is Verdict.ACCEPTED


def test_checks_rest_after_a_failure_so_that_many_addresses_take_little_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webconfig, "REST", 1e6)
    checks = PasswordChecks()
    checks.check(USERS, basic("prometheus", "wrong"), "10.0.0.1", soon())
    assert checks.check(USERS, basic("prometheus", "guess"), "10.0.0.2", soon(0.05)) is Verdict.BUSY


def test_success_ends_the_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webconfig, "FIRST_DELAY", 0.01)
    checks = PasswordChecks()
    for password in ("wrong", "secret"):
        checks.check(USERS, basic("prometheus", password), "10.0.0.1", soon())
    assert checks._failures == {}


@pytest.mark.usefixtures("no_delays")
def test_remembered_clients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webconfig, "MAX_CLIENTS", 3)
    checks = PasswordChecks()
    for number in range(6):
        checks.check(USERS, basic("prometheus", "wrong"), f"10.0.0.{number}", soon())
    assert list(checks._failures) == ["10.0.0.3", "10.0.0.4", "10.0.0.5"]


@pytest.mark.parametrize(
    ("client", "who"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8:0:0:ffff::2", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
    ],
)
def test_clients_of_one_ipv6_network_are_delayed_together(client: str, who: str) -> None:
    assert webconfig._network(client) == who
