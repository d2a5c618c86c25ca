"""Where a store is, as its URL tells, and how a connection to it proves and protects itself."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from scissorhands.credentials import check_certificates
from scissorhands.errors import InvalidRequestError

SCHEMES = (
    "redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://", "redis+cluster://",
    "rediss+cluster://",
)  # fmt: skip

_DEFAULT_PORT = 6379
_DEFAULT_SENTINEL_PORT = 26379


class Kind(Enum):
    """What answers at an address."""

    SERVER = "server"
    SOCKET = "socket"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True)
class Access:
    """How connections prove and protect themselves. What a URL says of user and password comes before this.

    Args:
        user: ACL user; empty means the default user.
        password: Its password; empty means none.
        ca_file: Certificates to trust, in PEM; None takes the system's.
        certificate: Certificate to show, in PEM; None shows none.
        key: Its key, in PEM; None if the certificate's file has it.
        verify: Whether the server must have a certificate of its host name that is trusted.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    verify: bool = True

    def check(self) -> None:
        """Make sure that the files can be used.

        Raises:
            ValueError: One cannot; the message names it.
        """
        try:
            check_certificates(self.ca_file, self.certificate, self.key)
        except InvalidRequestError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True)
class StoreAddress:
    """A store's URL, taken apart.

    Args:
        kind: What answers there.
        tls: Whether connections are encrypted.
        nodes: Hosts and ports: the server, some nodes of a cluster, or the sentinels. Empty for a socket.
        path: The socket.
        master: Name by which sentinels know the server.
        database: Number of the database.
        user: ACL user, percent-decoded; empty if the URL names none.
        password: Its password, percent-decoded; empty if the URL has none.
    """

    kind: Kind
    tls: bool = False
    nodes: tuple[tuple[str, int], ...] = ()
    path: str = ""
    master: str = ""
    database: int = 0
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> "StoreAddress":
        """Take a URL apart.

        Raises:
            ValueError: It is malformed. The message does not quote it, since it may hold a password.
        """
        if not url.startswith(SCHEMES):
            raise ValueError(f"must begin with {', '.join(SCHEMES)}")
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        user, _, password = credentials.partition(":")
        scheme, _, kind_name = parts.scheme.partition("+")
        kind = Kind.SOCKET if scheme == "unix" else Kind(kind_name or "server")
        address = cls(kind, tls=scheme == "rediss", user=unquote(user), password=unquote(password))
        if parts.fragment or (parts.query and kind is not Kind.SOCKET):
            raise ValueError("takes nothing after '?' or '#'; percent-encode them in a password")
        if kind is Kind.SOCKET:
            return address._at_socket(hosts, unquote(parts.path), parts.query)
        return address._at_hosts(hosts, unquote(parts.path).strip("/"))

    def __str__(self) -> str:
        """Write the URL without user and password, such as people may read."""
        if self.kind is Kind.SOCKET:
            return f"unix://{self.path}"
        scheme = "rediss" if self.tls else "redis"
        suffix = "" if self.kind is Kind.SERVER else f"+{self.kind.value}"
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.nodes)
        path = {Kind.SENTINEL: f"/{self.master}/{self.database}", Kind.CLUSTER: ""}.get(self.kind, f"/{self.database}")
        return f"{scheme}{suffix}://{hosts}{path}"

    def _at_socket(self, host: str, path: str, query: str) -> "StoreAddress":
        options = parse_qs(query, keep_blank_values=True)
        if host or not path:
            raise ValueError("must be unix:// and the absolute path of the socket")
        if set(options) - {"db"}:
            raise ValueError("takes nothing but db=NUMBER after '?'")
        return StoreAddress(
            self.kind,
            path=path,
            database=_database(options["db"][0]) if options else 0,
            user=self.user,
            password=self.password,
        )

    def _at_hosts(self, hosts: str, path: str) -> "StoreAddress":
        default = _DEFAULT_SENTINEL_PORT if self.kind is Kind.SENTINEL else _DEFAULT_PORT
        nodes = tuple(_node(each, default) for each in hosts.split(","))
        if self.kind is Kind.SERVER and len(nodes) != 1:
            raise ValueError("must name one host; several need redis+sentinel:// or redis+cluster://")
        master, database = "", path
        if self.kind is Kind.SENTINEL:
            master, _, database = path.partition("/")
            if not master:
                raise ValueError("must end with the name by which the sentinels know the server, such as /mymaster")
        if self.kind is Kind.CLUSTER and database not in {"", "0"}:
            raise ValueError("must not name a database: a cluster has none but 0")
        return StoreAddress(
            self.kind,
            tls=self.tls,
            nodes=nodes,
            master=master,
            database=_database(database or "0"),
            user=self.user,
            password=self.password,
        )


def _node(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError("has a host or a port that is none") from error
    if not host or port == 0:
        raise ValueError("must name a host, and a port from 1 to 65535 if any")
    return host, port or default_port


def _database(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise ValueError("must name its database by a number")
    return int(text)
