"""What the tests of the endpoint share: an open endpoint, clients of it, certificates."""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mindspore_exporter.server import Health, MetricsServer, PageRequest

HOST = "127.0.0.1"
PAGE = b"# TYPE a gauge\na 1.0\n"
SCRAPE = {"X-Prometheus-Scrape-Timeout-Seconds": "10", "User-Agent": "Prometheus/2.42.0"}


@contextmanager
def endpoint(
    render: Callable[[PageRequest], bytes] = lambda request: PAGE,
    *,
    health: Callable[[], Health] = lambda: Health(True, ""),
    default_profile: str = "full",
    title: str = "",
    web_config: Path | None = None,
    scraped: Callable[[str], None] | None = None,
) -> Iterator[MetricsServer]:
    """An open endpoint on a port of the system's choice."""
    server = MetricsServer(
        render,
        health=health,
        default_profile=default_profile,
        title=title,
        web_config=web_config,
        scraped=scraped,
    )
    server.start(HOST, 0)
    try:
        yield server
    finally:
        server.stop()


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes


def ask(
    server: MetricsServer,
    path: str = "/metrics",
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
    context: ssl.SSLContext | None = None,
) -> Reply:
    """One request on a connection of its own."""
    assert server.port is not None
    connection = (
        http.client.HTTPConnection(HOST, server.port, timeout=20)
        if context is None
        else http.client.HTTPSConnection(HOST, server.port, timeout=20, context=context)
    )
    try:
        return ask_again(connection, path, method, headers, body)
    finally:
        connection.close()


def ask_again(
    connection: http.client.HTTPConnection,
    path: str = "/metrics",
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
) -> Reply:
    """One request on a connection that stays open."""
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    return Reply(response.status, response.headers, response.read())


def connect(server: MetricsServer) -> socket.socket:
    """A client that has sent nothing yet."""
    assert server.port is not None
    return socket.create_connection((HOST, server.port), timeout=20)


def hung_up(client: socket.socket) -> bool:
    """Whether the endpoint ends the connection within the client's timeout."""
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def open_descriptors() -> set[str]:
    """What this process has open, without the listing's own descriptor."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return found


def endpoint_threads() -> list[str]:
    """Names of the endpoint's threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mindspore-exporter-http")]


@dataclass(frozen=True)
class Identity:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates for one test."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            _begin(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = directory / f"{name}.crt"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, *, client: bool = False, dns: str | None = None, password: bytes | None = None
    ) -> Identity:
        """A certificate for 127.0.0.1 and, with `dns`, for that name."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(HOST))]
        if dns is not None:
            names.append(x509.DNSName(dns))
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            _begin(subject, self._name, key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        identity = Identity(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        identity.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        identity.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption(),
            )
        )
        return identity

    def trusting_context(self, client: Identity | None = None) -> ssl.SSLContext:
        """Of a client that trusts this authority, with its own certificate or without."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        if client is not None:
            context.load_cert_chain(client.certificate, client.key)
        return context


def _begin(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
    )
