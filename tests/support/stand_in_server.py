"""``python -m support.stand_in_server NAME LOG PORT``: only has health, and notes its starts and stops."""

import asyncio
import sys
from pathlib import Path

from scissorhands_server.hosting import GrpcHost, StopSignals


async def main(name, log, port):
    def note(what):
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{name} {what}\n")

    note("started")
    host = GrpcHost([])
    host.bind("127.0.0.1", port)
    signals = StopSignals()
    await host.start()
    sys.stdout.write(f"{name} says hello\n")
    note("ready")
    await signals.run(host, 1.0)
    note("stopped")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
