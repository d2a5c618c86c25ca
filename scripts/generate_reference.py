"""Writes the generated pages under ``docs/``; with ``--check``, fails if a committed one differs."""

import argparse
import sys
from pathlib import Path

from reference_api import api_pages
from reference_settings import commands_page, settings_page

DOCS = Path(__file__).resolve().parent.parent / "docs"


def render() -> dict[Path, str]:
    """Return the text of every generated page."""
    pages = {
        "configuration.md": settings_page(),
        "commands.md": commands_page(),
        **api_pages(),
    }
    return {DOCS / name: content for name, content in pages.items()}


def main() -> None:
    """Write the pages, or compare them with the committed ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a committed page is not current")
    pages = render()
    if parser.parse_args().check:
        stale = [str(path) for path, content in pages.items() if not _holds(path, content)]
        stale += [str(path) for path in (DOCS / "api").glob("*.md") if path not in pages]
        if stale:
            sys.exit(f"not current: {', '.join(stale)}; run make reference")
    else:
        for path, content in pages.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8")
    sys.stdout.write("the reference is current\n")


def _holds(path: Path, content: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == content


if __name__ == "__main__":
    main()
