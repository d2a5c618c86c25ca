"""Every error that Scissorhands raises on purpose.

::

    ScissorhandsError
    ├── InvalidRequestError        the caller's input; names the field
    │   └── BudgetTooSmallError    also carries the smallest budget
    ├── UnauthenticatedError       a caller without a token that is known
    ├── ForbiddenError             a caller whose role does not allow the call
    ├── NotFoundError              no such model, session or segment
    ├── ConfigurationError         a setting of ours, at start-up
    ├── UnsupportedModelError      a model that cannot be served rightly, at start-up
    ├── CapacityError              a bounded queue is full; try again after a while
    ├── QuotaError                 an object that finds no room in the store; names the setting
    ├── UnavailableError           something we depend on does not answer
    │   ├── StoreUnavailableError
    │   │   └── StoreFullError     it answers, but has no memory left
    │   ├── ManagerUnavailableError
    │   └── StoppingError          we are about to end; another server goes on
    ├── CorruptSegmentError        stored bytes that are not what they should be
    ├── BrokenRowError             a stored row or prefix that is of no use
    │   ├── CorruptRowError        bytes of it that are not what they should be
    │   └── MissingPartError       a part of it that is not there any more
    ├── MismatchError              a suspended row that is of something else; names what differs
    ├── SessionConflictError       another turn of a session runs, or has begun meanwhile
    └── EngineError                a failure inside the engine; ends one request
"""


class ScissorhandsError(Exception):
    """Root of the tree."""


class InvalidRequestError(ScissorhandsError):
    """A field of a request is missing, malformed or out of range.

    Args:
        field: Path of the field as the caller wrote it, such as ``sampling.top_p``.
        message: What is wrong and what is allowed.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class BudgetTooSmallError(InvalidRequestError):
    """A budget below the smallest that its policy allows.

    Args:
        field: Path of the field.
        message: What is wrong.
        smallest: The smallest valid budget, in slots per layer and KV head.
    """

    def __init__(self, field: str, message: str, smallest: int) -> None:
        super().__init__(field, message)
        self.smallest = smallest


class UnauthenticatedError(ScissorhandsError):
    """A caller that shows no token, or one that is not known."""


class ForbiddenError(ScissorhandsError):
    """A caller whose role does not allow what it asks for."""


class NotFoundError(ScissorhandsError):
    """A named thing does not exist.

    Args:
        field: Path of the field that names it.
        message: What was not found and what there is.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class ConfigurationError(ScissorhandsError):
    """A setting is unknown, malformed or out of range."""


class UnsupportedModelError(ScissorhandsError):
    """A model that would not be served rightly, with the reason."""


class CapacityError(ScissorhandsError):
    """A bounded queue is full.

    Args:
        message: Which queue and its bound.
        retry_after: When to try again, in seconds.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaError(ScissorhandsError):
    """An object that finds no room among what its tenant, or the store, may hold.

    Args:
        setting: The setting that bounds it.
        message: What does not fit.
    """

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(f"{message}; raise {setting} of the manager to keep it")
        self.setting = setting


class UnavailableError(ScissorhandsError):
    """Something that we depend on does not answer."""


class StoreUnavailableError(UnavailableError):
    """The store does not answer in time or refuses to write.

    Args:
        message: What failed.
        reason: One of ``timeout``, ``unreachable``, ``refused`` (it answers, but not what was asked), ``full`` (it has
            no memory left) and ``open`` (it failed a moment ago, so it was not asked).
    """

    def __init__(self, message: str, reason: str = "unreachable") -> None:
        super().__init__(message)
        self.reason = reason


class StoreFullError(StoreUnavailableError):
    """The store answers, but refuses to write because its memory is full.

    Args:
        message: What failed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, "full")


class ManagerUnavailableError(UnavailableError):
    """The cache manager does not answer in time."""


class StoppingError(UnavailableError):
    """This server is about to end, and with it the answers that it has not finished.

    Args:
        kept: Session whose cache, as far as it came, is kept for its next turn; empty if there is none.
    """

    def __init__(self, kept: str = "") -> None:
        going_on = f"; the next turn of session {kept!r} goes on from here, on any worker" if kept else ""
        super().__init__(f"the worker is stopping{going_on}")
        self.kept = kept


class CorruptSegmentError(ScissorhandsError):
    """Bytes of a segment that fail a check."""


class BrokenRowError(ScissorhandsError):
    """A stored row or prefix that is of no use."""


class CorruptRowError(BrokenRowError):
    """Bytes of a row or prefix that fail a check."""


class MissingPartError(BrokenRowError):
    """A part of a stored row or prefix that is not there: deleted, out of time, or dropped by the store."""


class MismatchError(ScissorhandsError):
    """A suspended row whose identity is not the one that was asked for.

    Args:
        different: Names of what differs, such as ``model`` or ``budget``.
    """

    def __init__(self, different: tuple[str, ...]) -> None:
        super().__init__(f"what is stored differs in {', '.join(different)}")
        self.different = different


class SessionConflictError(ScissorhandsError):
    """The lease of a session is held by another turn, or was lost to one.

    Args:
        message: What holds it.
        retry_after: When it is free at the latest if its holder is gone, in seconds; 0 if that is not known.
    """

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(ScissorhandsError):
    """A failure inside the engine while it worked on one request."""
