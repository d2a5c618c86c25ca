"""What a check has found."""

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """How a check went."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        check: What was checked.
        status: How it went.
        found: What was found.
        fix: What to do about it; empty when nothing.
    """

    check: str
    status: Status
    found: str
    fix: str = ""

    @classmethod
    def ok(cls, check: str, found: str) -> "Finding":
        """Return a finding without a fault."""
        return cls(check, Status.OK, found)

    @classmethod
    def warning(cls, check: str, found: str, fix: str) -> "Finding":
        """Return a finding that stops nothing."""
        return cls(check, Status.WARNING, found, fix)

    @classmethod
    def failed(cls, check: str, found: str, fix: str) -> "Finding":
        """Return a finding that something will not work."""
        return cls(check, Status.FAILED, found, fix)
