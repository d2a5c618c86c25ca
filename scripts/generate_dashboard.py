"""Writes the Grafana dashboards of ``dashboards``; with ``--check``, fails if the committed ones differ."""

import argparse
import sys

from dashboards.asked import DASHBOARDS
from dashboards.boards import BOARDS, render


def main() -> None:
    """Write the dashboards, or compare them with the committed ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed dashboards are not current")
    check = parser.parse_args().check
    wanted = {DASHBOARDS / f"{board.name}.json": render(board) for board in BOARDS}
    existing = {path: path.read_text(encoding="utf-8") for path in DASHBOARDS.glob("*.json")}
    if check and existing != wanted:
        stale = sorted(path.name for path in existing.keys() | wanted if existing.get(path) != wanted.get(path))
        sys.exit(f"not current: {', '.join(stale)}; run make dashboard")
    for path, text in wanted.items():
        if existing.get(path) != text:
            path.write_text(text, encoding="utf-8")
    for path in existing.keys() - wanted:
        path.unlink()
    sys.stdout.write("the dashboards are current\n")


if __name__ == "__main__":
    main()
