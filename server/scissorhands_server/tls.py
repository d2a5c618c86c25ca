"""The certificate that a server shows, read again when its files change."""

import logging
import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from prometheus_client import CollectorRegistry, Counter, Gauge

from scissorhands.errors import ConfigurationError, ScissorhandsError
from scissorhands.file_version import Reread

LOGGER = logging.getLogger(__name__)

RELOADS = ("done", "failed")


@dataclass(frozen=True)
class TlsFiles:
    """Files of a server that uses TLS.

    Args:
        certificate: Its certificate with those between it and its authority, in PEM.
        key: Its key, in PEM.
        client_ca: Certificates of the authorities that vouch for clients, in PEM; each must then show one. None asks
            for none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None


class TlsMetrics:
    """The series of a server's certificate.

    Args:
        registry: Where they are registered.
        server: Name of the server in theirs.
    """

    def __init__(self, registry: CollectorRegistry, server: str) -> None:
        prefix = f"scissorhands_{server}_certificate"
        self.left = Gauge(
            f"{prefix}_left_seconds", "Until the server's certificate ends; infinite without TLS.", registry=registry
        )
        self.left.set(math.inf)
        self.reloads = Counter(
            f"{prefix}_reloads_total", "Changed certificates, by what became of it.", ["result"], registry=registry
        )
        for result in RELOADS:
            self.reloads.labels(result)


class ServerCertificate:
    """A certificate on disk. Whoever replaces it writes new files, key and certificate in any order.

    A connection that is made shows the newest pair that fits together; those that are there go on. Files that do not
    fit, or are not there, change nothing, but are logged and counted.

    Args:
        files: Where it is.
        metrics: Where its end and its changes are told.

    Raises:
        ConfigurationError: It cannot be used.
    """

    def __init__(self, files: TlsFiles, metrics: TlsMetrics) -> None:
        self._files = files
        self._metrics = metrics
        self._lock = threading.Lock()
        self._told: grpc.ServerCertificateConfiguration | None = None
        self._pair = Reread(
            lambda: _read(files),
            files.certificate,
            files.key,
            files.client_ca,
            refused=self._refused,
            changed=self._changed,
        )
        metrics.left.set_function(self._measured_left)

    def credentials(self) -> grpc.ServerCredentials:
        """Return what a port is opened with."""
        found: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._pair.value()[0],
            self._fetch,  # type: ignore[arg-type] # Its stubs lack that None means no change.
            require_client_authentication=self._files.client_ca is not None,
        )
        return found

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what has changed since the last call, None if nothing has. Called by gRPC at each handshake."""
        with self._lock:
            current, _ = self._pair.value()
            if self._told is current:
                return None
            self._told = current
            return current

    def _measured_left(self) -> float:
        # Looked at here too: who renews a certificate wants to see it, also when nobody connects.
        return self._pair.value()[1] - time.time()

    def _refused(self, error: ScissorhandsError) -> None:
        LOGGER.warning("the certificate stays as it was: %s", error)
        self._metrics.reloads.labels("failed").inc()

    def _changed(self, pair: tuple[grpc.ServerCertificateConfiguration, float]) -> None:
        del pair
        LOGGER.info("the certificate %s has changed", self._files.certificate)
        self._metrics.reloads.labels("done").inc()


def _read(files: TlsFiles) -> tuple[grpc.ServerCertificateConfiguration, float]:
    """Read and check the files; as :func:`_read_pair`.

    Raises:
        ConfigurationError: They cannot be used.
    """
    try:
        return _read_pair(files)
    except (OSError, ValueError) as error:
        raise ConfigurationError(_refusal(files, error)) from error


def _read_pair(files: TlsFiles) -> tuple[grpc.ServerCertificateConfiguration, float]:
    """Read and check the files, each once; return them and when the certificate ends, in seconds since 1970."""
    chain, key = files.certificate.read_bytes(), files.key.read_bytes()
    client_ca = files.client_ca.read_bytes() if files.client_ca else None
    certificate = x509.load_pem_x509_certificates(chain)[0]
    try:
        private = load_pem_private_key(key, password=None)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError("the key has a password, or is of a kind that is not known") from error
    if private.public_key() != certificate.public_key():
        raise ValueError("the key is not that of the certificate")
    if client_ca is not None:
        x509.load_pem_x509_certificates(client_ca)
    configuration = grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=client_ca)
    return configuration, certificate.not_valid_after_utc.timestamp()


def _refusal(files: TlsFiles, error: OSError | ValueError) -> str:
    names = ", ".join(str(path) for path in (files.certificate, files.key, files.client_ca) if path)
    # What cryptography says of a malformed file may quote it; only what the system and we say is told.
    reason = error.strerror if isinstance(error, OSError) else str(error).partition(".")[0]
    return f"tls_certificate, tls_key, tls_client_ca: {names} cannot be used: {reason}"
