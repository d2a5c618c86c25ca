"""Which presses and caches work while decoding, and which may be fed in blocks: found by short runs, and remembered."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers import environment
from benchmarks.peers.presses import Peer
from benchmarks.peers.program import PROGRAM, Program


class Checks:
    """What short runs have found, kept in a file: a check takes as long as many tokens.

    Args:
        path: The file. It is made new if it was written under other pins, another program or another model.
        weights: Digest of the model's weights.
    """

    def __init__(self, path: Path, weights: str) -> None:
        self._path = path
        program = hashlib.sha256(PROGRAM.read_bytes()).hexdigest()
        self._made_under = {**environment.versions(), "program": program, "weights": weights}
        self._found: dict[str, dict[str, Any]] = {}
        if path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))
            if held["made_under"] == self._made_under:
                self._found = held["found"]

    def run(self, peers: Sequence[Peer], program: Program, console: Console) -> dict[str, str]:
        """Check the presses that have not been checked.

        Returns:
            Those that do not work, by name, with their error.

        Raises:
            PeerError: The other program failed, other than by a press.
        """
        missing = [peer for peer in peers if _key(peer) not in self._found]
        waiting = iter(missing)

        def take(found: dict[str, Any]) -> None:
            peer = next(waiting)
            self._found[_key(peer)] = found
            self._write()
            told = f"cannot be measured: {found['error']}" if "error" in found else found["verdict"]
            console.print(f"{peer.name}: {told}", highlight=False, markup=False, soft_wrap=True)

        if missing:
            program.check([peer.task() for peer in missing], take)
        return {peer.name: found["error"] for peer in peers if "error" in (found := self._found[_key(peer)])}

    def feeding(self, peer: Peer) -> tuple[int, str]:
        """Return how many tokens a forward pass may take, and why."""
        found = self._found[_key(peer)]
        return found["feeding"], found["verdict"]

    def _write(self) -> None:
        document = {"made_under": self._made_under, "found": self._found}
        self._path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _key(peer: Peer) -> str:
    return json.dumps(peer.task(), sort_keys=True)
