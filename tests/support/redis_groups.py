"""Several of Debian's redis-servers that belong together: a cluster, or a server with a replica and sentinels."""

import re
from pathlib import Path

from support.processes import RedisProcess, free_port, wait_for

SLOTS = 16384
# How soon nodes and sentinels take another for gone, in milliseconds. Long enough for a machine that is busy.
GONE_MS = 2000
MASTER = "themaster"


def documented_rules():
    """Return the ACL rules that our documentation gives a user of ours, password left out."""
    text = (Path(__file__).parents[2] / "docs/deployment.md").read_text()
    (rules,) = re.findall(r"ACL SETUSER scissorhands on >PASSWORD (.+)", text)
    return rules.split()


class RedisCluster:
    """Nodes that share all slots, without replicas. Those that are left go on with their own slots."""

    def __init__(self, folder, count=3):
        # Nodes talk to each other on ports of their own.
        self._buses = [free_port() for _ in range(count)]
        self.nodes = []
        for index, bus in enumerate(self._buses):
            own = folder / f"node{index}"
            own.mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(GONE_MS), "--cluster-port", str(bus))
            self.nodes.append(RedisProcess(own, *options, "--cluster-require-full-coverage", "no"))

    @property
    def url(self):
        return "redis+cluster://" + ",".join(node.address for node in self.nodes)

    def start(self):
        """Start all nodes, and wait until they agree."""
        for node in self.nodes:
            node.start()
        for number, node in enumerate(self.nodes):
            begin, end = (SLOTS * edge // len(self.nodes) for edge in (number, number + 1))
            assert node.command("CLUSTER", "ADDSLOTSRANGE", begin, end - 1) == b"+OK\r\n"
            # Nodes that join with equal epochs take turns to change them until none is equal, which takes seconds. A
            # node that refuses has an epoch already.
            node.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node, bus in zip(self.nodes[1:], self._buses[1:], strict=True):
            self.nodes[0].command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        for node in self.nodes:
            wait_for(lambda node=node: self._agreed(node), "the cluster")

    def _agreed(self, node):
        told = node.command("CLUSTER", "INFO")
        known = f"cluster_known_nodes:{len(self.nodes)}".encode()
        return b"cluster_state:ok" in told and b"cluster_slots_assigned:16384" in told and known in told

    def owner_of(self, key):
        """Return the node that has a key's slot."""
        slot = int(self.nodes[0].command("CLUSTER", "KEYSLOT", key)[1:])
        return next(node for number, node in enumerate(self.nodes) if slot < SLOTS * (number + 1) // len(self.nodes))

    def sizes(self):
        """Return how many keys each node has."""
        return [int(node.command("DBSIZE")[1:]) for node in self.nodes]

    def stop(self):
        for node in self.nodes:
            node.stop()


class RedisWatched:
    """A server, a replica of it, and sentinels that put the replica in its place when it is gone."""

    def __init__(self, folder, sentinels=3):
        self._folder = folder
        self.servers = [RedisProcess(folder), RedisProcess(folder)]
        self.sentinels = []
        for index in range(sentinels):
            config = folder / f"sentinel{index}.conf"
            master = self.servers[0]
            config.write_text(
                f"sentinel monitor {MASTER} 127.0.0.1 {master.port} {sentinels // 2 + 1}\n"
                f"sentinel down-after-milliseconds {MASTER} {GONE_MS}\n"
                f"sentinel failover-timeout {MASTER} 5000\n"
            )
            self.sentinels.append(RedisProcess(folder, config=config))

    @property
    def url(self):
        return f"redis+sentinel://{','.join(each.address for each in self.sentinels)}/{MASTER}"

    def start(self):
        """Start everything, and wait until the replica follows and the sentinels know each other and it."""
        master, replica = self.servers
        master.start()
        replica.start()
        replica.command("REPLICAOF", "127.0.0.1", master.port)
        for sentinel in self.sentinels:
            sentinel.start()
        wait_for(lambda: b"master_link_status:up" in replica.command("INFO", "replication"), "the replica")
        others = f"num-other-sentinels\r\n${len(str(len(self.sentinels) - 1))}\r\n{len(self.sentinels) - 1}".encode()
        for sentinel in self.sentinels:
            wait_for(lambda sentinel=sentinel: self._ready(sentinel, others), "the sentinels")

    @staticmethod
    def _ready(sentinel, others):
        told = sentinel.command("SENTINEL", "MASTER", MASTER)
        return others in told and b"num-slaves\r\n$1\r\n1" in told

    def stop(self):
        for each in (*self.sentinels, *self.servers):
            each.stop()
