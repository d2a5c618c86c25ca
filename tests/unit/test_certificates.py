"""Certificates on disk: what a server shows, what a caller trusts and shows, and what is said of those of no use."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from support.certificates import Authority

from scissorhands.credentials import Credentials, connection_hint
from scissorhands.errors import ConfigurationError, InvalidRequestError
from scissorhands_client import Client, ManagerClient
from scissorhands_client import InvalidRequestError as RefusedError
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.settings import load_settings
from scissorhands_server.tls import ServerCertificate, TlsFiles, TlsMetrics
from scissorhands_server.worker.settings import WorkerSettings

SERIES = "scissorhands_manager_certificate"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "authority")


@pytest.fixture
def registry():
    return CollectorRegistry()


def reloads(registry, result):
    return registry.get_sample_value(f"{SERIES}_reloads_total", {"result": result})


def year_of_end(registry):
    left = registry.get_sample_value(f"{SERIES}_left_seconds")
    return (datetime.now(UTC) + timedelta(seconds=left)).year


def test_a_renewed_certificate_is_seen_and_a_broken_one_changes_nothing(authority, registry, caplog):
    files = TlsFiles(*authority.issue("server", not_after=datetime(2100, 6, 1, tzinfo=UTC)), authority.file)
    shown = ServerCertificate(files, TlsMetrics(registry, "manager"))
    assert year_of_end(registry) == 2100
    first = shown._fetch()
    assert first is not None
    assert shown._fetch() is None
    authority.issue("server", not_after=datetime(2101, 6, 1, tzinfo=UTC))
    assert year_of_end(registry) == 2101
    second = shown._fetch()
    assert second not in (None, first)
    assert (reloads(registry, "done"), reloads(registry, "failed")) == (1, 0)
    # Half of a renewal, nonsense, and nothing.
    certificate, key = files.certificate.read_bytes(), files.key.read_bytes()
    for number, spoil in enumerate((authority.issue("other")[1].read_bytes(), b"hush", None), 1):
        files.key.unlink() if spoil is None else files.key.write_bytes(spoil)
        assert shown._fetch() is None
        assert reloads(registry, "failed") == number
    assert year_of_end(registry) == 2101
    assert "the key is not that of the certificate" in caplog.text
    assert "hush" not in caplog.text
    files.key.write_bytes(key)
    assert shown._fetch() is not None
    assert files.certificate.read_bytes() == certificate


@pytest.mark.parametrize("which", ["certificate", "key", "client_ca"])
def test_a_server_does_not_start_with_a_file_of_no_use(authority, registry, tmp_path, which):
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("hush")
    good = dict(zip(("certificate", "key"), authority.issue("server"), strict=True), client_ca=authority.file)
    for path in (nonsense, tmp_path / "none.pem"):
        with pytest.raises(ConfigurationError, match=f"tls_{which}.*{path.name}") as caught:
            ServerCertificate(TlsFiles(**{**good, which: path}), TlsMetrics(CollectorRegistry(), "manager"))
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tls_certificate": "a.pem"}, "give both or none"),
        ({"tls_key": "a.pem"}, "give both or none"),
        ({"tls_client_ca": "a.pem"}, "tls_client_ca: needs tls_certificate"),
    ],
)
def test_half_of_a_setting_is_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        load_settings(ManagerSettings, given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"manager_certificate": "a.pem"}, "manager_certificate: needs ca_file"),
        ({"manager_ca_file": "none.pem"}, "manager_ca_file: none.pem cannot be used: No such file"),
    ],
)
def test_a_worker_is_told_what_is_wrong_with_its_files(given, message):
    with pytest.raises(ConfigurationError, match=message):
        load_settings(WorkerSettings, {"model": "tiny", **given})


def test_credentials_name_the_field_that_is_wrong(authority, tmp_path):
    certificate, key = authority.issue("client")
    _, other_key = authority.issue("other")
    Credentials().check()
    Credentials(authority.file, certificate, key, "server").check()
    for credentials, field in (
        (Credentials(certificate=certificate), "certificate"),
        (Credentials(server_name="server"), "server_name"),
        (Credentials(authority.file, key=key), "key"),
        (Credentials(authority.file, certificate), "certificate"),
        (Credentials(authority.file, certificate, other_key), "certificate"),
        (Credentials(tmp_path / "none.pem"), "ca_file"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            credentials.check()
        assert caught.value.field == field


def test_a_client_does_not_begin_with_files_of_no_use(tmp_path):
    for kind in (Client, ManagerClient):
        with pytest.raises(RefusedError, match=r"none\.pem cannot be used") as caught:
            kind(credentials=Credentials(Path("none.pem")))
        assert caught.value.field == "ca_file"


def test_what_changes_with_the_files(authority):
    certificate, key = authority.issue("client")
    credentials = Credentials(authority.file, certificate, key)
    before = credentials.version()
    assert credentials.version() == before
    authority.issue("client", not_after=datetime.now(UTC) + timedelta(days=1))
    assert credentials.version() != before


def test_hints_are_given_only_for_connections_that_did_not_come_about():
    refused = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed"
    assert "give ca_file" in connection_hint(refused)
    assert "give --manager-ca-file" in connection_hint(refused, "--manager-")
    assert "give ca_file" in connection_hint(
        "connections to all backends failing; last error: UNAVAILABLE: Socket closed"
    )
    assert connection_hint("Socket closed") == ""
    assert connection_hint("failed to connect to all addresses; last error: Connection refused") == ""
