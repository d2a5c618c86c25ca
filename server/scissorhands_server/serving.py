"""The settings that both servers have: who may connect, and how connections are protected."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from scissorhands_server.settings import ServerSettings
from scissorhands_server.tls import TlsFiles


class ServingSettings(ServerSettings):
    """Settings of a gRPC server. A subclass gives the rest."""

    tls_certificate: Path | None = Field(
        default=None,
        description="Certificate to show, in PEM, read again when it changes; none serves without encryption.",
    )
    tls_key: Path | None = Field(default=None, description="Its key, in PEM, without a password.")
    tls_client_ca: Path | None = Field(
        default=None,
        description="Certificates of the authorities that vouch for clients, in PEM: each must show a certificate of "
        "theirs. None asks for none.",
    )
    tokens_file: Path | None = Field(
        default=None,
        description="TOML file with the digests of tokens, read again when it changes: every caller must show one, but "
        "for health. None lets everybody call.",
    )
    reflection: bool = Field(default=True, description="Whether callers may ask which methods there are.")

    @property
    def tls(self) -> TlsFiles | None:
        """The files of TLS; None without it."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_ca)

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key: give both or none")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca: needs tls_certificate and tls_key")
        return self
