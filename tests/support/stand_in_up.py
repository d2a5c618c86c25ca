"""``python -m support.stand_in_up LOG OPTIONS...``: ``scissorhands up`` with stand-ins for manager and worker."""

import sys

from scissorhands_server.up import system
from scissorhands_server.up.child import ChildCommand
from scissorhands_server.up.command import up


def main(log, *options):
    def stand_in(name, arguments, environment):
        port = arguments[arguments.index("--port") + 1]
        return ChildCommand(name, [sys.executable, "-m", "support.stand_in_server", name, log, port], environment)

    system._command = stand_in
    up(options)


if __name__ == "__main__":
    main(*sys.argv[1:])
