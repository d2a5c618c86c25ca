"""Faults of managers, stores, lines and clocks that last for a while in the middle of answers."""

from support.faults.case import Case

_WHOLE = "All answers are whole; clients notice nothing."
_FELT = "A call ends with its answer, UNAVAILABLE or its deadline; all answers afterwards are whole."
_SECONDS = 8.0

# Name of the fault, what goes wrong, how long it lasts at least, whether the tests run it.
_UNFELT = [
    ("manager-killed", "A manager is killed (SIGKILL)", 1.0, False),
    ("manager-terminated", "A manager is asked to stop (SIGTERM)", 1.0, False),
    ("manager-stopped", "A manager is stopped (SIGSTOP) for longer than its sessions' leases", 3.0, False),
    ("manager-far", "A manager is 100 ms away", 1.0, False),
    ("manager-behind-a-narrow-line", "The line to a manager carries 50 kB/s", 1.0, False),
    ("manager-behind-a-lossy-line", "The line to a manager loses a tenth of what is sent", 1.0, False),
    ("manager-partitioned", "Nothing passes between a worker and its manager", 3.0, False),
    ("manager-connections-cut", "A worker's connections to its manager are reset every 0.3 s", 2.0, True),
    ("manager-refusing", "A manager's port refuses connections", 1.0, False),
    ("store-killed", "The store is killed and comes back empty", 1.0, False),
    ("store-stopped", "The store is stopped (SIGSTOP)", 2.0, False),
    ("store-emptied", "The store loses all that it holds", 1.0, False),
    ("store-out-of-memory", "The store is out of memory", 1.0, True),
    ("store-read-only", "The store takes no writes", 1.0, False),
    ("store-disk-full", "The store's disk is full: it cannot write its snapshot, and takes no more writes", 2.0, False),
    ("store-far", "The store is 100 ms away", 1.0, False),
    ("store-behind-a-narrow-line", "The line to the store carries 50 kB/s", 1.0, False),
    ("store-behind-a-lossy-line", "The line to the store loses a tenth of what is sent", 1.0, False),
    ("store-partitioned", "Nothing passes between a manager and the store", 3.0, False),
    ("store-connections-cut", "A manager's connections to the store are reset every 0.3 s", 2.0, False),
    ("store-refusing", "The store's port refuses connections", 1.0, False),
    ("clock-a-day-ahead", "The clocks of manager and worker jump a day ahead", 1.0, False),
    ("clock-a-day-behind", "The clocks of manager and worker jump a day back", 1.0, False),
    ("worker-far", "Clients are 100 ms away", 1.0, False),
    ("worker-behind-a-narrow-line", "The line to the clients carries 50 kB/s", 1.0, False),
    ("worker-behind-a-lossy-line", "The line to the clients loses a tenth of what is sent", 1.0, False),
]
_TOLD = [
    ("worker-killed", "A worker is killed (SIGKILL)", 1.0, False),
    ("worker-stopped", "A worker is stopped (SIGSTOP) for longer than the calls' deadlines", _SECONDS + 1, False),
    ("worker-partitioned", "Nothing passes between clients and a worker", _SECONDS + 1, False),
    ("worker-connections-cut", "The clients' connections are reset every 0.3 s", 2.0, True),
    ("worker-refusing", "A worker's port refuses connections", 1.0, False),
]


def _unfelt(name, hold):
    async def run(trial):
        trial.allow(await trial.during(name, hold=hold, timeout=30), "OK")

    return run


def _told(name, hold):
    async def run(trial):
        found = await trial.during(name, hold=hold, timeout=_SECONDS)
        trial.allow(found, "OK", "UNAVAILABLE", "DEADLINE_EXCEEDED")
        trial.must(any(outcome.code != "OK" for outcome in found), "no client noticed the fault")

    return run


CASES = [
    *(Case(name, fault, _WHOLE, _unfelt(name, hold), short=short) for name, fault, hold, short in _UNFELT),
    *(Case(name, fault, _FELT, _told(name, hold), short=short) for name, fault, hold, short in _TOLD),
]
