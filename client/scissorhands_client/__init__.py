"""The client of Scissorhands, sync and async. It imports neither torch nor redis.

>>> with Client("127.0.0.1:50051") as client:
...     options = GenerateOptions(max_new_tokens=64, budget=Budget.fraction(0.2))
...     for event in client.generate("Once upon a time", options):
...         if isinstance(event, Delta):
...             print(event.text, end="")
"""

from scissorhands.credentials import Credentials
from scissorhands_client.aio import AsyncClient, AsyncGenerateStream
from scissorhands_client.budget import Budget
from scissorhands_client.client import Client, GenerateStream
from scissorhands_client.errors import (
    AccessDeniedError,
    ClientError,
    DeadlineExceededError,
    ErrorInfo,
    FieldViolation,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    ServerError,
    ServerUnavailableError,
    SessionConflictError,
)
from scissorhands_client.manager import AsyncManagerClient, ManagerClient
from scissorhands_client.quality import Divergence, Quality, ShadowResult
from scissorhands_client.records import (
    MeasuredProfile,
    ModelInfo,
    SegmentInfo,
    ServedModel,
    Session,
    SessionState,
    SuspendedRow,
)
from scissorhands_client.stored import GarbageItem, Resumable, StoredObject, StoredTotal, StoreState, VerifiedObject
from scissorhands_client.types import (
    Accepted,
    BudgetSource,
    CacheStatistics,
    ChatMessage,
    Delta,
    Event,
    Finish,
    FinishReason,
    GenerateOptions,
    Grant,
    GrantSource,
    Policy,
    PrefillProgress,
    Priority,
    Prompt,
    Result,
    TokenIds,
    Usage,
)

__all__ = [
    "Accepted",
    "AccessDeniedError",
    "AsyncClient",
    "AsyncGenerateStream",
    "AsyncManagerClient",
    "Budget",
    "BudgetSource",
    "CacheStatistics",
    "ChatMessage",
    "Client",
    "ClientError",
    "Credentials",
    "DeadlineExceededError",
    "Delta",
    "Divergence",
    "ErrorInfo",
    "Event",
    "FieldViolation",
    "Finish",
    "FinishReason",
    "GarbageItem",
    "GenerateOptions",
    "GenerateStream",
    "Grant",
    "GrantSource",
    "InvalidRequestError",
    "ManagerClient",
    "MeasuredProfile",
    "ModelInfo",
    "NotFoundError",
    "OverloadedError",
    "Policy",
    "PrefillProgress",
    "Priority",
    "Prompt",
    "Quality",
    "RequestCancelledError",
    "Result",
    "Resumable",
    "SegmentInfo",
    "ServedModel",
    "ServerError",
    "ServerUnavailableError",
    "Session",
    "SessionConflictError",
    "SessionState",
    "ShadowResult",
    "StoreState",
    "StoredObject",
    "StoredTotal",
    "SuspendedRow",
    "TokenIds",
    "Usage",
    "VerifiedObject",
]
