"""`rediss://`: an encrypted connection, through a small terminator since the packaged server has no TLS itself."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exemplar_store import EmbeddedServer, ExemplarStore, StoreConfig
from exemplar_store.errors import StoreUnreachable

QUICK = StoreConfig(retries=0, namespace="tls")


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on this machine: no certificate for the TLS test")
    subprocess.run(
        [
            openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext",
            "subjectAltName=IP:127.0.0.1", "-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem"),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return tmp_path / "cert.pem"


@pytest.fixture
def tls_port(server: EmbeddedServer, certificate: Path) -> Iterator[int]:
    """Port of a terminator in front of the session's server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                outside = context.wrap_socket(plain, server_side=True)
            except OSError:  # a client that does not trust the certificate
                continue
            inside = socket.socket(socket.AF_UNIX)
            inside.connect(server.url.removeprefix("unix://"))
            for ends in ((outside, inside), (inside, outside)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_trusted_certificate_connects(tls_port: int, certificate: Path, make_exemplar: Callable) -> None:
    with ExemplarStore.connect(f"rediss://127.0.0.1:{tls_port}?ssl_ca_certs={certificate}", QUICK) as store:
        assert store.insert(make_exemplar(1)).new
        assert store.best("a" * 64, "cpu") == make_exemplar(1)


def test_an_unknown_certificate_is_a_sentence(tls_port: int) -> None:
    with pytest.raises(StoreUnreachable, match="certificate") as caught:
        ExemplarStore.connect(f"rediss://127.0.0.1:{tls_port}", QUICK)
    assert "\n" not in str(caught.value)
