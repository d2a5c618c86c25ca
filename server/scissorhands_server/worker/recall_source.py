"""Asking the manager for evicted slots, from the engine's thread, without waiting."""

import asyncio
import concurrent.futures
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from scissorhands.errors import CorruptSegmentError, InvalidRequestError
from scissorhands.recall import HeadSketch
from scissorhands.recall_wire import read_slots, sketch_messages
from scissorhands.segment import SegmentHeader, check_section, parse_header
from scissorhands.v1 import model_pb2, recall_pb2
from scissorhands_server.worker.link import ManagerLink
from scissorhands_server.worker.transfer import Miss, failure_reason
from scissorhands_server.worker.uploader import Uploader

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class CameSection:
    """A section that has come, its checksum checked.

    Args:
        header: Header of its segment.
        place: Place in the segment's table: by layer, then by KV head.
        slots: Which of its slots are candidates.
        data: Its bytes.
    """

    header: SegmentHeader
    place: int
    slots: Any
    data: bytes


@dataclass
class Came:
    """What has come of one recall.

    Args:
        sections: The sections.
        misses: Segments that could not be recalled, by reason.
        whole: Whether the recall came to its end; if not, nothing of it may be used.
    """

    sections: list[CameSection] = field(default_factory=list)
    misses: "Counter[str]" = field(default_factory=Counter)
    whole: bool = False


class RecallSource:
    """Sends sketches to the manager.

    Args:
        model: The served model.
        link: The link to the manager.
        uploader: Sends segments: a session's own come first.
        loop: The event loop on which both live.
        deadline: The most that a recall may take, in seconds.
        bound: The most bytes of sections of one recall.
    """

    def __init__(
        self,
        model: model_pb2.ModelInfo,
        link: ManagerLink,
        uploader: Uploader,
        loop: asyncio.AbstractEventLoop,
        deadline: float,
        bound: int,
    ) -> None:
        self._model = model
        self._link = link
        self._uploader = uploader
        self._loop = loop
        self._deadline = deadline
        self._bound = bound

    def ask(self, session_id: str, epoch: int, sketch: Sequence[HeadSketch]) -> "concurrent.futures.Future[Came]":
        """Ask for what a row may recall; the answer comes within the deadline, and never is an exception.

        Args:
            session_id: The row's session.
            epoch: Evictions applied to the row.
            sketch: What it asks for.
        """
        return asyncio.run_coroutine_threadsafe(self._ask(session_id, epoch, sketch), self._loop)

    async def _ask(self, session_id: str, epoch: int, sketch: Sequence[HeadSketch]) -> Came:
        came = Came()
        if not self._link.up:
            came.misses["manager_unavailable"] += 1
            return came
        header = recall_pb2.RecallHeader(
            session_id=session_id,
            epoch=epoch,
            layers=self._model.layers,
            kv_heads=self._model.kv_heads,
            head_dim=self._model.head_dim,
        )
        try:
            async with asyncio.timeout(self._deadline):
                await self._uploader.sent(session_id)
                call = self._link.stub.RecallSections(sketch_messages(header, sketch))
                try:
                    await self._receive(call, came)
                finally:
                    call.cancel()
            came.whole = True
        except TimeoutError:
            came.misses["late"] += 1
        except grpc.aio.AioRpcError as error:
            reason = failure_reason(self._link, error)
            came.misses["failed" if reason in ("new", "conflict") else reason] += 1
        except Miss as miss:
            came.misses[miss.reason] += 1
        except (CorruptSegmentError, InvalidRequestError) as error:
            LOGGER.warning("what was recalled for session %s is not whole: %s", session_id, error)
            came.misses["corrupt"] += 1
        return came

    async def _receive(self, call: Any, came: Came) -> None:
        """Receive the messages of a recall."""
        header: SegmentHeader | None = None
        section: recall_pb2.RecalledSection | None = None
        data, size = bytearray(), 0
        async for message in call:
            part = message.WhichOneof("part")
            if part == "outcome":
                for miss in message.outcome.misses:
                    came.misses[miss.reason] += miss.count
                section = None
            elif part == "segment":
                header, section = parse_header(message.segment), None
            elif part == "section" and header is not None and message.section.place < len(header.sections):
                section, data = message.section, bytearray()
            elif part == "chunk" and header is not None and section is not None:
                data += message.chunk
                size += len(message.chunk)
                if size > self._bound:
                    raise Miss("no_room")
                wanted = header.sections[section.place]
                if len(data) >= wanted.size:
                    check_section(wanted, bytes(data))
                    slots = read_slots(section.slots, wanted.slots)
                    came.sections.append(CameSection(header, section.place, slots, bytes(data)))
                    section = None
            else:
                raise CorruptSegmentError("messages of a recall do not follow one another")
