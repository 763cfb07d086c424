"""TLS, client certificates, basic auth and response headers of the endpoint, from one web configuration file.

The format is the one all Prometheus exporters share (exporter-toolkit, `docs/web-configuration.md`). What this endpoint
cannot do is refused with the reason, never ignored: an operator who asks for a protection gets it or an error.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from .config import Section
from .errors import ConfigError

log = logging.getLogger(__name__)

MAX_BYTES = 256 * 1024
CHECK_SECONDS = 1.0
"""Between two looks at the files; a kept-alive connection may bring many requests a second."""

HASH = re.compile(r"\$2[aby]\$(0[4-9]|1[0-9]|2[0-9]|3[01])\$[./A-Za-z0-9]{53}")
MAX_COST = 16
"""A check of this cost takes about 5 s: a higher one outlasts the scrape."""
PASSWORD_BYTES = 72
"""What bcrypt looks at; the rest of a longer password has no effect in any implementation."""

HEADERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Strict-Transport-Security": (),
        "X-Content-Type-Options": ("nosniff",),
        "X-Frame-Options": ("deny", "sameorigin"),
        "X-XSS-Protection": (),
        "Content-Security-Policy": (),
    }
)
"""Response headers that the format lets a user set, with their values where these are an enumeration."""

CIPHERS: Mapping[str, str] = MappingProxyType(
    {
        f"TLS_ECDHE_{key}_WITH_{name}": f"ECDHE-{key}-{openssl}"
        for key in ("ECDSA", "RSA")
        for name, openssl in (
            ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
            ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
            ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
        )
    }
)
"""Go's names of the TLS 1.2 suites with forward secrecy and authenticated encryption, with OpenSSL's names."""

UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "tls_server_config.cert": "inline PEM is not supported, put it into a file and give cert_file",
        "tls_server_config.key": "inline PEM is not supported, put it into a file and give key_file",
        "tls_server_config.client_ca": "inline PEM is not supported, put it into a file and give client_ca_file",
        "tls_server_config.curve_preferences": "curves cannot be chosen here, remove the key for OpenSSL's safe defaults",
        "rate_limit": "not supported: a page is rendered at most once a second already, and requests are capped",
    }
)
"""Keys that the format knows and this endpoint does not."""

TLS_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
VERIFYING = ("VerifyClientCertIfGiven", "RequireAndVerifyClientCert")

Stamp: TypeAlias = "tuple[int, ...] | str"


# --- the file -----------------------------------------------------------------------------------------------------


class TlsServerConfig(Section):
    """Section `tls_server_config`. Paths are relative to the file that holds the section."""

    cert_file: Path
    """Certificate of the endpoint and its chain, PEM."""
    key_file: Path
    """Its private key, PEM, not encrypted."""
    client_auth_type: str = "NoClientCert"
    """NoClientCert, VerifyClientCertIfGiven or RequireAndVerifyClientCert."""
    client_ca_file: Path | None = None
    """Certificates that clients' certificates must come from, PEM."""
    client_allowed_sans: tuple[str, ...] = ()
    """Subject alternative names of which a client's certificate must have one."""
    min_version: str = "TLS12"
    """TLS12 or TLS13."""
    max_version: str = "TLS13"
    """TLS12 or TLS13."""
    cipher_suites: tuple[str, ...] = ()
    """TLS 1.2 suites by Go's names. Default: OpenSSL's."""
    prefer_server_cipher_suites: bool = True
    """Whether the order of the endpoint's suites decides, not the client's."""

    @field_validator("client_auth_type")
    @classmethod
    def _client_auth_is_possible(cls, value: str) -> str:
        if value in ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert"):
            raise ValueError(
                f"{value} takes a certificate without verifying it, which Python's TLS cannot do and which protects"
                f" nothing; allowed: NoClientCert, {', '.join(VERIFYING)}"
            )
        return _one_of(value, ("NoClientCert", *VERIFYING))

    @field_validator("min_version", "max_version")
    @classmethod
    def _version_is_safe(cls, value: str) -> str:
        if value in ("TLS10", "TLS11"):
            raise ValueError(f"{value} is broken and not supported; allowed: {', '.join(TLS_VERSIONS)}")
        return _one_of(value, tuple(TLS_VERSIONS))

    @field_validator("cipher_suites")
    @classmethod
    def _ciphers_are_known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name in ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"):
                raise ValueError(f"{name}: suites of TLS 1.3 cannot be chosen (the format says so too), leave it out")
            _one_of(name, tuple(CIPHERS))
        return value

    @model_validator(mode="after")
    def _client_certificates_are_whole(self) -> TlsServerConfig:
        verifies = self.client_auth_type in VERIFYING
        if verifies and self.client_ca_file is None:
            raise ValueError(f"client_auth_type {self.client_auth_type} needs client_ca_file")
        if self.client_ca_file is not None and not verifies:
            raise ValueError(f"client_ca_file has no effect without client_auth_type; allowed: {', '.join(VERIFYING)}")
        if self.client_allowed_sans and self.client_auth_type != "RequireAndVerifyClientCert":
            raise ValueError("client_allowed_sans needs client_auth_type RequireAndVerifyClientCert")
        if self.min_version > self.max_version:
            raise ValueError(f"min_version {self.min_version} is above max_version {self.max_version}")
        return self


class HttpServerConfig(Section):
    """Section `http_server_config`."""

    http2: bool = True
    """Accepted for the format's sake: the endpoint speaks HTTP/1.1, which every client falls back to."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Response headers; an empty value sets none."""

    @field_validator("headers")
    @classmethod
    def _headers_are_allowed(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            _one_of(name, tuple(HEADERS))
            if HEADERS[name] and text:
                _one_of(text, HEADERS[name])
            if not text.isascii() or not text.isprintable():
                raise ValueError(f"{name}: allowed are printable ASCII characters on one line, got {text!r}")
        return value


class WebSettings(Section):
    """The whole file."""

    tls_server_config: TlsServerConfig | None = None
    """TLS. Default: plain HTTP."""
    http_server_config: HttpServerConfig = HttpServerConfig()
    """HTTP."""
    basic_auth_users: dict[str, str] = Field(default_factory=dict)
    """bcrypt hash of each user's password. Default: nobody has to log in."""

    @field_validator("tls_server_config", "http_server_config", "basic_auth_users", mode="before")
    @classmethod
    def _empty_section_is_none(cls, value: Any, info: Any) -> Any:
        if value in (None, {}):
            return None if info.field_name == "tls_server_config" else {}
        return value

    @field_validator("basic_auth_users")
    @classmethod
    def _passwords_are_hashes(cls, value: dict[str, str]) -> dict[str, str]:
        for user, hashed in value.items():
            if ":" in user:
                raise ValueError(f"user {user!r}: a user name of basic auth cannot hold a colon")
            match = HASH.fullmatch(hashed)
            if match is None:
                raise ValueError(f"user {user!r}: not a bcrypt hash; make one with `htpasswd -nBC 10 {user or 'USER'}`")
            if int(match[1]) > MAX_COST:
                raise ValueError(f"user {user!r}: bcrypt cost {int(match[1])}, at most {MAX_COST} is allowed")
        return value


def _one_of(value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{value!r} is not possible; allowed: {', '.join(allowed)}")
    return value


class _Loader(yaml.SafeLoader):
    """Refuses what the format's own strict reader refuses: a key given twice, of which one would have no effect."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _parse(path: Path) -> WebSettings:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"web configuration {path}: cannot be read: {error.strerror}") from None
    if len(text) > MAX_BYTES:
        raise ConfigError(f"web configuration {path}: larger than {MAX_BYTES} bytes, which no configuration is")
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader)):
            raise ConfigError(f"web configuration {path}: aliases are not allowed in a configuration")
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - derives from the safe loader
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, RecursionError) as error:
        raise ConfigError(f"web configuration {path}: is not YAML: {error}") from None
    if not isinstance(value, dict) or not value:
        # A file that is being rewritten is empty for a moment: that must not open the endpoint.
        raise ConfigError(
            f"web configuration {path}: says nothing; allowed keys: {', '.join(WebSettings.model_fields)}."
            " For plain HTTP without authentication give no web configuration"
        )
    try:
        return WebSettings.model_validate(value)
    except ValidationError as error:
        lines = [_explain(fault) for fault in error.errors(include_input=False, include_url=False)]
        raise ConfigError(f"web configuration {path} cannot be used:\n" + "\n".join(lines)) from None


def _explain(fault: Any) -> str:
    """One fault as a line; never with the value, which may be a secret."""
    key = ".".join(str(part) for part in fault["loc"] if part != "[key]") or "(whole)"
    if fault["type"] == "extra_forbidden":
        return f"  {key}: {UNSUPPORTED.get(key, 'no such key')}"
    return f"  {key}: {fault['msg'].removeprefix('Value error, ')}"


# --- what the server uses -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WebConfig:
    """One version of the file, ready to use.

    `users` holds the bcrypt hash by user name, both as bytes. `allowed_sans` empty: any verified certificate will do.
    """

    tls: ssl.SSLContext | None = None
    allowed_sans: frozenset[str] = frozenset()
    clients_verified: bool = False
    users: Mapping[bytes, bytes] = field(default_factory=dict, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def authenticated(self) -> bool:
        """Whether a client has to prove who it is, by a password or by a certificate."""
        return bool(self.users) or self.clients_verified

    def admits(self, client: ssl.SSLSocket) -> bool:
        """Whether the (verified) certificate of a client has one of the allowed names."""
        return not self.allowed_sans or not self.allowed_sans.isdisjoint(_subject_alternative_names(client))


def _subject_alternative_names(client: ssl.SSLSocket) -> Iterator[str]:
    certificate: Mapping[str, Any] = client.getpeercert() or {}
    for kind, name in certificate.get("subjectAltName", ()):
        yield str(ipaddress.ip_address(name)) if kind == "IP Address" else name


def _build(settings: WebSettings, directory: Path) -> WebConfig:
    tls = settings.tls_server_config
    if settings.basic_auth_users:
        _require_bcrypt()
    return WebConfig(
        tls=_context(tls, directory) if tls else None,
        allowed_sans=frozenset(tls.client_allowed_sans if tls else ()),
        clients_verified=tls is not None and tls.client_auth_type == "RequireAndVerifyClientCert",
        users={user.encode(): hashed.encode() for user, hashed in settings.basic_auth_users.items()},
        headers={name: value for name, value in settings.http_server_config.headers.items() if value},
    )


def _require_bcrypt() -> None:
    try:
        import bcrypt  # noqa: F401
    except ImportError:
        raise ConfigError(
            "basic_auth_users needs the package bcrypt: pip install 'mindspore-exporter[secure]'"
        ) from None


def _context(tls: TlsServerConfig, directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = TLS_VERSIONS[tls.min_version]
    context.maximum_version = TLS_VERSIONS[tls.max_version]
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    if tls.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    if tls.cipher_suites:
        context.set_ciphers(":".join(CIPHERS[name] for name in tls.cipher_suites))
    certificate, key = directory / tls.cert_file, directory / tls.key_file
    with _explained("cert_file", certificate, "key_file", key):
        # Without this OpenSSL asks the terminal for the password of an encrypted key, and training waits.
        context.load_cert_chain(certificate, key, password=lambda: "")
    if tls.client_ca_file is not None:
        authority = directory / tls.client_ca_file
        with _explained("client_ca_file", authority):
            context.load_verify_locations(authority)
        required = tls.client_auth_type == "RequireAndVerifyClientCert"
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


@contextmanager
def _explained(*names: str | Path) -> Iterator[None]:
    files = ", ".join(f"{key} {path}" for key, path in zip(names[::2], names[1::2], strict=True))
    try:
        for path in names[1::2]:
            with Path(path).open("rb"):
                pass
        yield
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        raise ConfigError(f"tls_server_config: {files}: {reason} (wanted: PEM, unencrypted, matching)") from None
    except OSError as error:
        raise ConfigError(f"tls_server_config: {error.filename or files}: cannot be read: {error.strerror}") from None


class WebConfigFile:
    """The file as it is now: read at once (ConfigError when it cannot be used) and again when it, the certificate, the
    key or the client CA changes. A new version that cannot be used leaves the old one in force and is logged once.
    Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen, result = _read(path)
        if isinstance(result, ConfigError):
            raise result
        self._config = result
        self._checked = time.monotonic()
        self.passwords = PasswordChecks()

    def current(self) -> WebConfig:
        """The version in force. Looks at the files at most once a second, in one thread at a time: a file system that
        hangs holds one request, not all."""
        if time.monotonic() - self._checked >= CHECK_SECONDS and self._lock.acquire(blocking=False):
            try:
                self._checked = time.monotonic()
                if any(_stamp(path) != stamp for path, stamp in self._seen.items()):
                    self._reload()
            finally:
                self._lock.release()
        return self._config

    def _reload(self) -> None:
        self._seen, result = _read(self._path, self._seen)
        if isinstance(result, ConfigError):
            log.error("exporter: the changed web configuration is not used, the one before stays in force: %s", result)
        elif (result.tls is None) != (self._config.tls is None):
            log.error(
                "exporter: the changed web configuration %s is not used, the one before stays in force:"
                " tls_server_config cannot be added or removed while the endpoint is open",
                self._path,
            )
        else:
            self._config = result
            self.passwords.forget()
            log.info("exporter: the changed web configuration %s is in force", self._path)


def _read(path: Path, known: Mapping[Path, Stamp] | None = None) -> tuple[dict[Path, Stamp], WebConfig | ConfigError]:
    """Stamps of the files that this version consists of, taken before they were read, and the version or its fault.

    `known`: the files of the version before; they stay watched when the new one cannot be parsed.
    """
    seen: dict[Path, Stamp] = {path: _stamp(path)}
    try:
        settings = _parse(path)
    except ConfigError as error:
        return {other: _stamp(other) for other in known or ()} | seen, error
    tls = settings.tls_server_config
    files = () if tls is None else (tls.cert_file, tls.key_file, tls.client_ca_file)
    seen.update((path.parent / file, _stamp(path.parent / file)) for file in files if file is not None)
    try:
        return seen, _build(settings, path.parent)
    except ConfigError as error:
        return seen, ConfigError(f"web configuration {path}: {error}")


def _stamp(path: Path) -> Stamp:
    try:
        status = os.stat(path)
    except OSError as error:
        return error.strerror or "unreadable"
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


# --- passwords ----------------------------------------------------------------------------------------------------


class Verdict(Enum):
    """Outcome of a check. BUSY: there was no time for it."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    BUSY = "busy"


@dataclass(frozen=True)
class _Failures:
    count: int
    last: float

    @property
    def free_at(self) -> float:
        """When the client may try again (monotonic seconds)."""
        return self.last + min(MAX_DELAY, FIRST_DELAY * 2.0 ** (self.count - 1))


FIRST_DELAY = 0.1
MAX_DELAY = 2.0
FORGET_SECONDS = 300.0
"""A client that failed longer ago starts afresh."""
REST = 4.0
"""After a check that failed, none starts for this many times its duration: guessing from many addresses takes at most a
fifth of a core from training."""
MAX_REMEMBERED = 128
MAX_CLIENTS = 256
PLACES = 12
PLACES_PER_CLIENT = 4
"""Requests that wait for a check; one address cannot take the places of all."""


class PasswordChecks:
    """Checks passwords against bcrypt hashes at little cost: a check takes 78 ms of the CPU that training needs.

    Verified and refused passwords are remembered as keyed digests; one check runs at a time; each failure of a client
    delays its next check, up to 2 s. Thread-safe.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._state = threading.Lock()
        self._checking = threading.Lock()
        self._accepted: OrderedDict[bytes, None] = OrderedDict()
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._failures: OrderedDict[str, _Failures] = OrderedDict()
        self._waiting: dict[str, int] = {}
        self._rest_until = 0.0
        self._stopped = threading.Event()

    def forget(self) -> None:
        """Forget the passwords that were checked; the delays of failing clients stay."""
        with self._state:
            self._key = secrets.token_bytes(32)
            self._accepted.clear()
            self._refused.clear()

    def stop(self) -> None:
        """Let everybody who waits for a check go, for good."""
        self._stopped.set()

    def check(self, users: Mapping[bytes, bytes], authorization: str | None, client: str, deadline: float) -> Verdict:
        """Whether the `Authorization` header is that of one of `users` (bcrypt hash by name).

        `client`: its IP address; `deadline`: `time.monotonic()` at which the answer is worthless.
        """
        credentials = _basic_credentials(authorization)
        if credentials is None:
            return Verdict.REFUSED
        user, password = credentials
        # An unknown user must take as long as a known one, and leaves by the same way.
        hashed = users.get(user) or _nobodys_hash(users)
        digest = self._digest(user, password, hashed)
        if digest in self._accepted:
            return Verdict.ACCEPTED
        client = _network(client)
        if not self._take_place(client):
            return Verdict.BUSY
        try:
            if not self._await_turn(client, deadline):
                return Verdict.BUSY
            try:
                return self._check_now(digest, password, hashed, client)
            finally:
                self._checking.release()
        finally:
            self._leave_place(client)

    def _digest(self, user: bytes, password: bytes, hashed: bytes) -> bytes:
        message = b"".join(len(part).to_bytes(8, "big") + part for part in (user, password, hashed))
        return hmac.new(self._key, message, hashlib.sha256).digest()

    def _take_place(self, client: str) -> bool:
        with self._state:
            mine = self._waiting.get(client, 0)
            if mine >= PLACES_PER_CLIENT or sum(self._waiting.values()) >= PLACES:
                return False
            self._waiting[client] = mine + 1
            return True

    def _leave_place(self, client: str) -> None:
        with self._state:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]

    def _await_turn(self, client: str, deadline: float) -> bool:
        """Wait until the client may try and nobody else is being checked; then True, and `_checking` is held."""
        while not self._stopped.is_set():
            free_at = self._free_at(client)
            if free_at >= deadline:
                return False
            if self._stopped.wait(max(0.0, free_at - time.monotonic())):
                return False
            if not self._checking.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return False
            if self._free_at(client) <= time.monotonic():
                return True
            self._checking.release()
        return False

    def _free_at(self, client: str) -> float:
        with self._state:
            failures = self._failures.get(client)
            return max(self._rest_until, failures.free_at if failures else 0.0)

    def _check_now(self, digest: bytes, password: bytes, hashed: bytes, client: str) -> Verdict:
        began = time.monotonic()
        if digest in self._accepted:
            return Verdict.ACCEPTED
        accepted = digest not in self._refused and _matches(password, hashed)
        now = time.monotonic()
        with self._state:
            _remember(self._accepted if accepted else self._refused, digest, None, MAX_REMEMBERED)
            if accepted:
                self._failures.pop(client, None)
                return Verdict.ACCEPTED
            before = self._failures.get(client)
            count = before.count if before and now - before.last < FORGET_SECONDS else 0
            _remember(self._failures, client, _Failures(min(count + 1, 16), now), MAX_CLIENTS)
            self._rest_until = now + REST * (now - began)
        return Verdict.REFUSED


def _remember(table: OrderedDict[Any, Any], key: Any, value: Any, limit: int) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)


def _matches(password: bytes, hashed: bytes) -> bool:
    import bcrypt

    try:
        return bcrypt.checkpw(password[:PASSWORD_BYTES], hashed)
    except ValueError:
        return False


def _nobodys_hash(users: Mapping[bytes, bytes]) -> bytes:
    """A hash that no password has, as costly as the costliest of the users'."""
    cost = max(hashed[4:6] for hashed in users.values())
    return b"$2b$" + cost + b"$" + b"." * 53


def _basic_credentials(authorization: str | None) -> tuple[bytes, bytes] | None:
    scheme, _, token = (authorization or "").strip().partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(token.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return (user, password) if colon else None


def _network(client: str) -> str:
    """Who is delayed together: an IPv4 address, or the 64-bit network in which a client can choose its IPv6 address."""
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    if isinstance(address, ipaddress.IPv4Address):
        return client
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
