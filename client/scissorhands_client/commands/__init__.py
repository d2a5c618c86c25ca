"""The client's subcommands of ``scissorhands``."""
