"""Certificates of an authority of our own, as files."""

from typing import NamedTuple

import trustme


class Certificates(NamedTuple):
    """Files in PEM: the authority's certificate, and of each side a certificate and its key."""

    authority: str
    server: str
    server_key: str
    client: str
    client_key: str

    @classmethod
    def make(cls, folder, host="localhost"):
        """Write certificates; the server's is of one host name only."""
        authority = trustme.CA()
        paths = [str(folder / f"{name}.pem") for name in cls._fields]
        authority.cert_pem.write_to_path(paths[0])
        for issued, certificate, key in (
            (authority.issue_cert(host), paths[1], paths[2]),
            (authority.issue_cert("client.example"), paths[3], paths[4]),
        ):
            issued.cert_chain_pems[0].write_to_path(certificate)
            issued.private_key_pem.write_to_path(key)
        return cls(*paths)
