"""Tools that keep something over an episode: Python in a sandbox, and those of a server of the Model Context Protocol."""

import asyncio
import functools
import os
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import validate_call

from groupwise.errors import EnvError, require_extra
from groupwise.text.envs import EnvTimeoutError
from groupwise.text.rewards import in_loop
from groupwise.text.tool_env import BoundTool, Tools

_LONGEST_OUTPUT = 100_000
"""Characters."""


class PythonTool(Tools):
    """The tool ``python(code)``, which runs what the model writes in Monty, an interpreter without files, network and processes.

    Variables stay over an episode. Random numbers follow from its seed, and the clock stands still, so members that write the same
    read the same. The model reads errors, too. Needs the extra ``monty``.

    Args:
        seconds: that a call may compute.
        memory_mib: that an episode may take.
    """

    def __init__(self, seconds: float = 2.0, memory_mib: float = 64.0) -> None:
        require_extra("pydantic_monty", "monty")
        self._limits = {"max_feed_duration_secs": seconds, "max_memory": int(memory_mib * 2**20)}
        self._state: bytes | None = None
        self._seed = 0

    def begin(self, seed: int) -> None:
        """Begin with no variables."""
        self._state, self._seed = None, seed

    def tools(self) -> Sequence[BoundTool]:
        """The tool."""
        code = {"type": "string", "description": "The program. The value of its last line is printed."}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        described = "Run Python. Variables stay; there are no files and no network."
        schema = {"name": "python", "description": described, "parameters": parameters}
        return [BoundTool({"type": "function", "function": schema}, validate_call(self._run))]

    def _run(self, code: str) -> str:
        from pydantic_monty import MontyError, MontyRuntimeError

        policy: Any = {
            "random_start": {"seed": self._seed},
            "sleep": "zero",
            "datetime": _NOW,
            "timezone": "UTC",
            "process_time": "zero",
        }
        printed, room = list[str](), _LONGEST_OUTPUT + 1  # one more shows that there was more

        def keep(stream: str, text: str) -> None:
            nonlocal room
            if room:
                printed.append(text[:room])
                room -= len(printed[-1])

        with _MAKING_WORKERS:
            process, workers = _workers()
        if process != os.getpid():
            raise EnvError(
                "PythonTool: Monty answers nothing in a process that was forked from one that used it; fix: start such processes "
                "with multiprocessing.get_context('spawn')"
            )
        with workers.checkout(limits=self._limits, os_policy=policy) as session:
            if self._state is not None:
                session.load_session(self._state)
            try:
                value = session.feed_run(code, print_callback=keep)
                printed += [] if value is None else [repr(value)]
                self._state = session.dump()
            except MontyError as error:
                printed.append(f"{error}")
                if isinstance(error, MontyRuntimeError):  # what ran before it stays, unless the worker was ended
                    with suppress(RuntimeError):
                        self._state = session.dump()
        text = "".join(printed)
        return text if len(text) <= _LONGEST_OUTPUT else f"{text[:_LONGEST_OUTPUT]} [cut]"


_NOW = datetime(2026, 1, 1, tzinfo=UTC)
"""The time of all episodes."""
_MAKING_WORKERS = threading.Lock()  # threads may ask for the first time together


@functools.cache
def _workers() -> tuple[int, Any]:
    """The process that asked first, and those that run all its sessions and end with it."""
    from pydantic_monty import Monty

    return os.getpid(), Monty().__enter__()


class MCPServer(Tools):
    """The tools of a server of the Model Context Protocol, which is started for each member of a group.

    The model reads the texts of results, and errors. Needs the extra ``mcp``.

    Args:
        command: program of the server; ``python`` is the one that runs here, without the working folder on its path.
        args: of the program.
        env: further variables of its environment.
        start: the server's tool that begins an episode, called with ``{"seed": ...}``; the model does not see it. None: the server
            keeps nothing from one episode to the next.
        seconds: that a call, or the start of the server, may take.
    """

    def __init__(
        self,
        command: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        start: str | None = None,
        seconds: float = 30.0,
    ) -> None:
        require_extra("mcp", "mcp")
        is_python = command in ("python", "python3")
        self._command = [sys.executable, "-P"] if is_python else [command]
        self._command += [str(Path(arg).absolute()) if Path(arg).is_file() else arg for arg in args]
        self._env, self._start, self._seconds = dict(env or {}), start, seconds
        self._session: _Session | None = None

    def __copy__(self) -> "MCPServer":
        """The same command, not started."""
        copied = MCPServer.__new__(MCPServer)
        vars(copied).update(vars(self), _session=None)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "MCPServer":
        """A server's state has no copy."""
        raise TypeError("a server cannot be copied")

    def begin(self, seed: int) -> None:
        """Start the server, unless it runs, and call its ``start``."""
        if self._session is None:
            self._session = _Session(self._command, self._env, self._seconds)
        if self._start is not None and (answer := self._session.call(self._start, seed=seed)).startswith("error: "):
            raise EnvError(f"the MCP server's start: {answer}; fix: start=, the tool that begins an episode with seed=")

    def tools(self) -> Sequence[BoundTool]:
        """The server's tools."""
        assert self._session is not None
        session, found = self._session, []
        for tool in self._session.tools:
            if tool.name != self._start:
                described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                call = functools.partial(session.call, tool.name)
                found.append(BoundTool({"type": "function", "function": described}, call))
        return found

    def close(self) -> None:
        """End the server."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


class _Session:
    """A server that runs. One task opens and closes it, as the protocol's library has it."""

    def __init__(self, command: list[str], env: Mapping[str, str], seconds: float) -> None:
        self._seconds = seconds
        self._client: Any = None
        self._failed: BaseException | None = None
        self.tools: Sequence[Any] = ()
        self._changed, self._stop = threading.Event(), asyncio.Event()
        self._task = in_loop(self._serve(command, env))
        if not self._changed.wait(seconds) or self._client is None:
            self.close()
            reason = str(self._failed or "") or f"it did not answer in {seconds:g} seconds"
            raise EnvError(f"the MCP server {shlex.join(command)} does not start: {reason}; fix: run it by itself")

    async def _serve(self, command: list[str], env: Mapping[str, str]) -> None:
        from mcp import Client, StdioServerParameters

        how = StdioServerParameters(command=command[0], args=command[1:], env=dict(env) or None)
        try:
            async with (
                asyncio.timeout(self._seconds) as limit,
                Client(how, read_timeout_seconds=self._seconds) as client,
            ):
                self.tools = (await client.list_tools()).tools
                limit.reschedule(None)
                self._client = client
                self._changed.set()
                await self._stop.wait()
        except BaseException as error:
            self._failed = error
            raise
        finally:
            self._changed.set()

    def call(self, name: str, /, **arguments: Any) -> str:
        """The texts of a tool's result, or what the server says of a call that it refuses."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        try:
            result = in_loop(self._client.call_tool(name, arguments)).result(self._seconds + 1)
        except Exception as error:
            if isinstance(error, MCPError) and error.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                return f"error: {error.message[:_LONGEST_OUTPUT]}"
            if isinstance(error, TimeoutError) or getattr(error, "code", None) == REQUEST_TIMEOUT:
                raise EnvTimeoutError(
                    f"got no answer to {name} from the MCP server in {self._seconds:g} seconds"
                ) from error
            raise EnvError(f"the MCP server did not answer {name}: {type(error).__name__}: {error}") from error
        text = "\n".join(part.text for part in result.content if part.type == "text")
        return f"{'error: ' * bool(result.is_error)}{text[:_LONGEST_OUTPUT]}"

    def close(self) -> None:
        """End the server."""
        with suppress(Exception):
            in_loop(self._end()).result(self._seconds)
            self._task.result(self._seconds)

    async def _end(self) -> None:
        self._stop.set()
