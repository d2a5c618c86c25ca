"""``python -m scissorhands`` is the command ``scissorhands``."""

from scissorhands.cli import main

main()
