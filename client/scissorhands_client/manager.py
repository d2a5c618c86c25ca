"""The clients of a cache manager: what its sessions hold."""

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

import grpc

from scissorhands.credentials import Credentials
from scissorhands.v1 import cache_manager_pb2, cache_manager_pb2_grpc, store_pb2, suspension_pb2
from scissorhands_client import channel
from scissorhands_client.convert import list_request, read_measured, read_session
from scissorhands_client.errors import from_rpc_error
from scissorhands_client.records import MeasuredProfile, Session, SessionState
from scissorhands_client.stored import (
    GarbageItem,
    Resumable,
    StoredObject,
    StoreState,
    VerifiedObject,
    read_garbage,
    read_object,
    read_resumable,
    read_store,
    read_verified,
    verify_request,
)

# Sessions of one page.
_PAGE = 100
# How long looking at all of a store may take, in seconds.
STORE_TIMEOUT = 600.0


class ManagerClient:
    """A connection to one cache manager; safe to share between threads. Close it, or use it as a context manager.

    Args:
        server: Address of the manager, as ``host:port``.
        timeout: How long one call may take, in seconds.
        credentials: How the server is reached if it uses TLS; their files are read once.

    Raises:
        InvalidRequestError: An argument is out of range.
    """

    def __init__(
        self,
        server: str = channel.DEFAULT_MANAGER,
        *,
        timeout: float = channel.CALL_TIMEOUT,
        credentials: Credentials | None = None,
    ) -> None:
        self._timeout = channel.checked_timeout(timeout)
        self._channel = channel.opened(server, credentials, channel.options(server))
        self._stub = cache_manager_pb2_grpc.CacheManagerServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def get_session(self, session_id: str) -> Session:
        """Return one session with its segments.

        Raises:
            NotFoundError: There is no such session.
            ClientError: The call failed.
        """
        request = cache_manager_pb2.GetSessionRequest(session_id=session_id)
        try:
            return read_session(self._stub.GetSession(request, timeout=self._timeout).session)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def delete_session(self, session_id: str) -> int:
        """Delete all that the store has of a session; return how many values that was.

        A turn that runs goes on, but nothing of it is kept.

        Raises:
            ClientError: The call failed.
        """
        request = suspension_pb2.DeleteSessionRequest(session_id=session_id)
        try:
            return self._stub.DeleteSession(request, timeout=self._timeout).deleted
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def pause_session(self, session_id: str) -> StoredObject:
        """Let no turn of a suspended session begin, and keep its row; return the row.

        Raises:
            NotFoundError: Nothing is stored of it.
            SessionConflictError: A turn runs.
            ClientError: The call failed.
        """
        request = store_pb2.PauseSessionRequest(session_id=session_id)
        try:
            response = self._stub.PauseSession(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return read_object(response.row)

    def unpause_session(self, session_id: str) -> Resumable:
        """Check a session's row, let turns begin again, and return what the next one will find.

        Raises:
            ClientError: The call failed.
        """
        request = store_pb2.UnpauseSessionRequest(session_id=session_id)
        try:
            return read_resumable(self._stub.UnpauseSession(request, timeout=self._timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def get_store(self) -> StoreState:
        """Return what lies in the store, and what bounds it.

        Raises:
            ClientError: The call failed.
        """
        try:
            return read_store(self._stub.GetStore(store_pb2.GetStoreRequest(), timeout=self._timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def collect_garbage(self, *, dry_run: bool = False, timeout: float = STORE_TIMEOUT) -> Iterator[GarbageItem]:
        """Mend and trim the store, and yield what is done, or would be.

        Args:
            dry_run: Change nothing.
            timeout: How long it may take, in seconds.

        Raises:
            ClientError: The call failed.
        """
        request = store_pb2.CollectGarbageRequest(dry_run=dry_run)
        try:
            for message in self._stub.CollectGarbage(request, timeout=channel.checked_timeout(timeout)):
                yield read_garbage(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def verify_store(
        self, *, delete: bool = False, object_timeout: float = 60.0, timeout: float = STORE_TIMEOUT
    ) -> Iterator[VerifiedObject]:
        """Have every object read and every checksum checked, and yield each object.

        Args:
            delete: Delete those that are not whole.
            object_timeout: How long reading one may take, in seconds.
            timeout: How long all may take, in seconds.

        Raises:
            ClientError: The call failed.
        """
        request = verify_request(object_timeout, delete=delete)
        try:
            for message in self._stub.VerifyStore(request, timeout=channel.checked_timeout(timeout)):
                yield read_verified(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def measured_profile(self, model: str = "") -> MeasuredProfile:
        """Return what the KV heads of a model need.

        Args:
            model: Name or fingerprint of the model; empty for the one that was measured last.

        Raises:
            NotFoundError: Too little was measured yet.
            ClientError: The call failed.
        """
        request = cache_manager_pb2.GetMeasuredProfileRequest(model=model)
        try:
            return read_measured(self._stub.GetMeasuredProfile(request, timeout=self._timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def list_sessions(self, state: SessionState | None = None, *, page_size: int = _PAGE) -> Iterator[Session]:
        """Yield sessions, newest first, fetching page after page.

        Args:
            state: Yield only sessions in this state; None yields all.
            page_size: Sessions fetched at once, 1 to 1000.

        Raises:
            ClientError: A call failed.
        """
        token = ""
        while True:
            try:
                page = self._stub.ListSessions(list_request(state, page_size, token), timeout=self._timeout)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            yield from map(read_session, page.sessions)
            token = page.next_page_token
            if not token:
                return


class AsyncManagerClient:
    """A connection to one cache manager, for one event loop. Close it, or use it as an async context manager.

    Args:
        server: Address of the manager, as ``host:port``.
        timeout: How long one call may take, in seconds.
        credentials: How the server is reached if it uses TLS; their files are read once.

    Raises:
        InvalidRequestError: An argument is out of range.
    """

    def __init__(
        self,
        server: str = channel.DEFAULT_MANAGER,
        *,
        timeout: float = channel.CALL_TIMEOUT,
        credentials: Credentials | None = None,
    ) -> None:
        self._timeout = channel.checked_timeout(timeout)
        self._channel = channel.aio_opened(server, credentials, channel.options(server))
        self._stub = cache_manager_pb2_grpc.CacheManagerServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(grace=None)

    async def get_session(self, session_id: str) -> Session:
        """Return one session with its segments.

        Raises:
            NotFoundError: There is no such session.
            ClientError: The call failed.
        """
        request = cache_manager_pb2.GetSessionRequest(session_id=session_id)
        try:
            response = await self._stub.GetSession(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return read_session(response.session)

    async def delete_session(self, session_id: str) -> int:
        """Delete all that the store has of a session; return how many values that was.

        A turn that runs goes on, but nothing of it is kept.

        Raises:
            ClientError: The call failed.
        """
        request = suspension_pb2.DeleteSessionRequest(session_id=session_id)
        try:
            return (await self._stub.DeleteSession(request, timeout=self._timeout)).deleted
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def pause_session(self, session_id: str) -> StoredObject:
        """Let no turn of a suspended session begin, and keep its row; return the row.

        Raises:
            NotFoundError: Nothing is stored of it.
            SessionConflictError: A turn runs.
            ClientError: The call failed.
        """
        request = store_pb2.PauseSessionRequest(session_id=session_id)
        try:
            response = await self._stub.PauseSession(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return read_object(response.row)

    async def unpause_session(self, session_id: str) -> Resumable:
        """Check a session's row, let turns begin again, and return what the next one will find.

        Raises:
            ClientError: The call failed.
        """
        request = store_pb2.UnpauseSessionRequest(session_id=session_id)
        try:
            return read_resumable(await self._stub.UnpauseSession(request, timeout=self._timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def get_store(self) -> StoreState:
        """Return what lies in the store, and what bounds it.

        Raises:
            ClientError: The call failed.
        """
        try:
            return read_store(await self._stub.GetStore(store_pb2.GetStoreRequest(), timeout=self._timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def collect_garbage(
        self,
        *,
        dry_run: bool = False,
        timeout: float = STORE_TIMEOUT,  # noqa: ASYNC109 - the deadline of the call.
    ) -> AsyncIterator[GarbageItem]:
        """Mend and trim the store, and yield what is done, or would be.

        Args:
            dry_run: Change nothing.
            timeout: How long it may take, in seconds.

        Raises:
            ClientError: The call failed.
        """
        request = store_pb2.CollectGarbageRequest(dry_run=dry_run)
        try:
            async for message in self._stub.CollectGarbage(request, timeout=channel.checked_timeout(timeout)):
                yield read_garbage(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def verify_store(
        self,
        *,
        delete: bool = False,
        object_timeout: float = 60.0,
        timeout: float = STORE_TIMEOUT,  # noqa: ASYNC109 - the deadline of the call.
    ) -> AsyncIterator[VerifiedObject]:
        """Have every object read and every checksum checked, and yield each object.

        Args:
            delete: Delete those that are not whole.
            object_timeout: How long reading one may take, in seconds.
            timeout: How long all may take, in seconds.

        Raises:
            ClientError: The call failed.
        """
        request = verify_request(object_timeout, delete=delete)
        try:
            async for message in self._stub.VerifyStore(request, timeout=channel.checked_timeout(timeout)):
                yield read_verified(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def measured_profile(self, model: str = "") -> MeasuredProfile:
        """Return what the KV heads of a model need.

        Args:
            model: Name or fingerprint of the model; empty for the one that was measured last.

        Raises:
            NotFoundError: Too little was measured yet.
            ClientError: The call failed.
        """
        request = cache_manager_pb2.GetMeasuredProfileRequest(model=model)
        try:
            return read_measured(await self._stub.GetMeasuredProfile(request, timeout=self._timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def list_sessions(
        self, state: SessionState | None = None, *, page_size: int = _PAGE
    ) -> AsyncIterator[Session]:
        """Yield sessions, newest first, fetching page after page.

        Args:
            state: Yield only sessions in this state; None yields all.
            page_size: Sessions fetched at once, 1 to 1000.

        Raises:
            ClientError: A call failed.
        """
        token = ""
        while True:
            try:
                page = await self._stub.ListSessions(list_request(state, page_size, token), timeout=self._timeout)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            for each in page.sessions:
                yield read_session(each)
            token = page.next_page_token
            if not token:
                return
