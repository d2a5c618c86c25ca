"""redis-py's clients for every kind of address: one server, what sentinels point to, or a cluster."""

from typing import Any, cast

from redis.asyncio import Redis, RedisCluster, Sentinel, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from scissorhands_server.store.address import Access, Kind, StoreAddress

# What is read from a connection at once; redis-py's own 32 KiB are many reads for a value of megabytes.
_READ_BYTES = 1 << 20
# Of the time for one call. Finding the way around a node that does not answer takes a wait for it, then another node.
_HOP_SHARE = 0.5

Client = Redis | RedisCluster


def make_client(address: StoreAddress, access: Access, timeout: float, connections: int) -> Client:
    """Make a client; it connects when it is used first.

    Args:
        address: Where the store is.
        access: How connections prove and protect themselves.
        timeout: The most that one call may take, in seconds.
        connections: Calls that are made at once.
    """
    hop = timeout if address.kind in {Kind.SERVER, Kind.SOCKET} else timeout * _HOP_SHARE
    waits = {"socket_timeout": hop, "socket_connect_timeout": hop}
    tls = _tls(address, access)
    common = {
        "username": address.user or access.user or None,
        "password": address.password or access.password or None,
        # One fresh try, for connections that a restarted server has closed behind our back.
        "retry": Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        "socket_read_size": _READ_BYTES,
        **waits,
        **tls,
    }
    if address.kind is Kind.CLUSTER:
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in address.nodes],
            ssl=address.tls,
            # To each node. Beside those of calls there are some that are being closed, and one asks for the layout.
            max_connections=2 * connections + 1,
            # A slot that has moved is noted. Asking for the whole layout anew would cut off the calls of others.
            reinitialize_steps=0,
            **common,
        )
    common |= {"db": address.database, "max_connections": connections}
    if address.kind is Kind.SENTINEL:
        # Sentinels have no users of the store's; they are asked without a password.
        # One that does not answer is not asked again, but the next one is.
        asking = {"ssl": address.tls, "retry": Retry(NoBackoff(), 0), **waits, **tls}
        sentinels = Sentinel(address.nodes, sentinel_kwargs=asking)  # type: ignore[no-untyped-call] # It has no types.
        client: Redis = sentinels.master_for(address.master, ssl=address.tls, **common)
        return client
    return Redis.from_pool(ConnectionPool(**_place(address), **common))


async def close_client(client: Client) -> None:
    """Close all connections of a client, those to sentinels included."""
    await client.aclose()
    pool = getattr(client, "connection_pool", None)
    if isinstance(pool, SentinelConnectionPool):
        await pool.sentinel_manager.aclose()


async def scan_keys(client: Client, cursor: str, pattern: str, about: int) -> tuple[str, list[bytes]]:
    """Look at some of all keys; a cluster is scanned primary by primary.

    Args:
        client: The client.
        cursor: Where to go on, as the call before told it; empty to begin.
        pattern: What the keys that are returned look like.
        about: How many keys to look at.

    Returns:
        Where to go on, empty at the end, and the keys.
    """
    node, _, within = cursor.rpartition(" ")
    asked: dict[str, Any] = {"cursor": int(within or 0), "match": pattern, "count": about}
    if not isinstance(client, RedisCluster):
        following, keys = await client.scan(**asked)
        return (str(following) if following else ""), cast("list[bytes]", keys)
    names = sorted(each.name for each in client.get_primaries())
    # A node that is gone is left to the next scan.
    node = node if node in names else names[0]
    answers, found = await client.scan(**asked, target_nodes=client.get_node(node_name=node))
    (following,) = cast("dict[str, int]", answers).values()
    later = [f"{node} {following}"] if following else [f"{name} 0" for name in names[names.index(node) + 1 :]]
    return (later[0] if later else ""), cast("list[bytes]", found)


async def server_infos(client: Client) -> list[dict[str, Any]]:
    """Return what each server that holds keys says about itself."""
    if isinstance(client, RedisCluster):
        answers: dict[str, dict[str, Any]] = await client.info(target_nodes=RedisCluster.PRIMARIES)
        return list(answers.values())
    return [await client.info()]


def _place(address: StoreAddress) -> dict[str, Any]:
    if address.kind is Kind.SOCKET:
        return {"connection_class": UnixDomainSocketConnection, "path": address.path}
    ((host, port),) = address.nodes
    return {"connection_class": SSLConnection if address.tls else Connection, "host": host, "port": port}


def _tls(address: StoreAddress, access: Access) -> dict[str, Any]:
    if not address.tls:
        return {}
    files = {"ssl_ca_certs": access.ca_file, "ssl_certfile": access.certificate, "ssl_keyfile": access.key}
    return {
        "ssl_cert_reqs": "required" if access.verify else "none",
        "ssl_check_hostname": access.verify,
        **{name: str(path) for name, path in files.items() if path},
    }
