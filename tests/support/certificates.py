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


class Authority:
    """An authority that goes on issuing certificates, into files that may be those of an earlier one.

    Args:
        folder: Where its files lie; made if it is not there.
    """

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        self._ca = trustme.CA()
        self._folder = folder
        self.file = folder / "authority.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, name, hosts=("localhost",), not_after=None, folder=None):
        """Write a certificate and its key, as a renewal does: each file is replaced whole.

        Returns:
            Their paths.
        """
        issued = self._ca.issue_cert(*hosts, common_name=name, not_after=not_after)
        folder = folder or self._folder
        paths = folder / f"{name}.pem", folder / f"{name}-key.pem"
        for path, blob in zip(paths, (issued.cert_chain_pems[0], issued.private_key_pem), strict=True):
            draft = path.with_suffix(".draft")
            blob.write_to_path(str(draft))
            draft.replace(path)
        return paths
