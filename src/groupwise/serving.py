"""Inference servers: calls over HTTP, vLLM's API, and servers as child processes."""

import json
import logging
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import islice
from pathlib import Path
from random import SystemRandom
from typing import Any, Literal, NamedTuple, NoReturn
from urllib.parse import urlsplit

from groupwise import system as files
from groupwise.config.policy import SamplingCfg
from groupwise.errors import ConfigError, GroupwiseError, ServerError

log = logging.getLogger(__name__)

HEALTH = "/health"
"""Path that a running server answers at once, even when it is busy."""
MAX_ANSWER = 16 * files.MIB
"""Most bytes of an answer, besides those of the tokens that it is about."""
MAX_TOKEN = 1024
"""Most bytes of an answer for each of its tokens; vLLM takes about 100."""
SECONDS_TO_CONNECT = 10.0
"""A server that is busy accepts connections; one that is cut off or stopped does not, and no error reports it."""
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 10.0
"""Seconds between two tries; they double each time."""
_HEALTH_INTERVAL = 5.0
"""Seconds without an answer after which a server is asked whether it is healthy."""
_QUIET = 5.0
"""Seconds without another warning."""


class NoAnswerError(Exception):
    """A call that may be repeated."""


class LostWeightsError(ServerError):
    """A server has other weights than the last that it was given, as after a restart."""


class RefusedError(ServerError):
    """The server understood a call and refused it; ``status`` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Calls of one server. Each uses a connection of its own, so that threads may share the client.

    Args:
        url: scheme, host and port.
        timeout: seconds of one try of a call, to the end of its answer. A connection gets ``SECONDS_TO_CONNECT`` of them.
        retries: how often a call is repeated that got no answer or an error of the server (5xx).
        last_lines: returns the last output of the server, to explain why it gives no answer.
    """

    def __init__(self, url: str, *, timeout: float, retries: int, last_lines: Callable[[], str] = str) -> None:
        self.url, self.timeout, self.retries, self._last_lines = url, timeout, retries, last_lines
        self._warned = -_QUIET
        self._running: dict[HTTPConnection, socket.socket] = {}
        self._closed = threading.Event()
        self._of_thread = threading.local()

    @property
    def failures(self) -> int:
        """Tries of calls of this thread that got no answer."""
        return getattr(self._of_thread, "failures", 0)

    def call(self, path: str, body: Mapping[str, Any] | None = None, *, tokens: int = 0) -> Any:
        """The JSON of an answer, None if it is empty or plain text. Without a body it is a GET, else a POST.

        Args:
            tokens: those of the answer, at most; others need not fit.
        """
        wait, limit = _FIRST_WAIT, MAX_ANSWER + MAX_TOKEN * tokens
        for number in range(self.retries + 1):
            try:
                return self._try(path, body, limit)
            except NoAnswerError as error:
                last = error
                self._of_thread.failures = self.failures + 1
            if self._closed.is_set():
                raise ServerError(f"{self.url}{path}: the client was closed")
            if number < self.retries:
                if (now := time.monotonic()) > self._warned + _QUIET:  # calls fail together
                    self._warned = now
                    log.warning("%s%s: %s; trying again", self.url, path, last)
                self._closed.wait(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
        raise ServerError(
            f"{self.url}{path}: no answer in {self.retries + 1} tries: {last}; fix: read the server's log and start it; then "
            f"resume the run, or train if it had not begun{self._last_lines()}"
        )

    def close(self) -> None:
        """End the calls that run, and all later ones, by a ``ServerError``."""
        self._closed.set()
        for connection in tuple(self._running.values()):
            _shut(connection)

    def _try(self, path: str, body: Mapping[str, Any] | None, limit: int) -> Any:
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=min(self.timeout, SECONDS_TO_CONNECT))
        data = None if body is None else json.dumps(body).encode()
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            if (running := self._running.get(connection)) is not None:
                _shut(running)

        timer = threading.Timer(self.timeout, end)  # a time limit of the socket would hold for each byte
        timer.daemon = True
        timer.start()
        try:
            try:
                connection.connect()
            except TimeoutError:
                raise NoAnswerError(f"no connection in {connection.timeout:g} s") from None
            connection.sock.settimeout(None)
            self._running[connection] = connection.sock
            if self._closed.is_set() or is_late.is_set():  # checked last: neither may have seen this call
                raise ConnectionError("the client was closed")
            connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
            self._wait(connection.sock)
            response = connection.getresponse()
            text = bytearray()
            while part := response.read1(2**16):
                text += part
                if len(text) > limit:
                    raise ServerError(f"{self.url}{path}: an answer of more than {limit:,} bytes")
            if response.length:  # read1 does not say that the connection was cut
                raise ConnectionError(f"cut {response.length} bytes before the end of the answer")
        except (OSError, HTTPException) as error:
            if not is_late.is_set():
                raise NoAnswerError(f"{type(error).__name__}: {error}") from None
        finally:
            timer.cancel()
            self._running.pop(connection, None)
            connection.close()
        if is_late.is_set():
            raise NoAnswerError(f"it took longer than {self.timeout:g} s")
        return self._read(path, response.status, response.getheader("Content-Type") or "", bytes(text))

    def _wait(self, connection: socket.socket) -> None:
        """Return when an answer begins. A dead server may hold a call open, so its health is checked while waiting."""
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            while not selector.select(_HEALTH_INTERVAL):
                # with a shorter time limit, this call is such a check itself
                if self.timeout > _HEALTH_INTERVAL and not is_healthy(self.url):
                    raise NoAnswerError("it gives no answer, and is not healthy")

    def _read(self, path: str, status: int, kind: str, text: bytes) -> Any:
        if status >= 300:
            message = f"status {status}: {text[:2000].decode(errors='replace')}"
            if status >= 500 or status == 429:
                raise NoAnswerError(message)
            raise RefusedError(f"{self.url}{path} was refused: {message}", status)
        if "json" not in kind or not text:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ServerError(f"{self.url}{path} answered no JSON: {text[:200]!r}") from None


def _shut(connection: socket.socket) -> None:
    """End what a thread sends and receives there."""
    with suppress(OSError):  # it has just ended
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # of TLS, too, which stays readable to its end


def is_healthy(url: str) -> bool:
    """Whether a server answers at ``/health``, asked once."""
    try:
        HttpClient(url, timeout=_HEALTH_INTERVAL, retries=0).call(HEALTH)
    except ServerError:
        return False
    return True


Stop = Literal["eos", "stop", "length"]


class GroupRequest(NamedTuple):
    """Request for completions of one prompt. A repeated request has the same seed."""

    prompt: Sequence[int]
    size: int
    """Completions."""
    seed: int
    sampling: SamplingCfg
    eos_ids: tuple[int, ...]
    """Tokens that end a completion; no others do."""
    vocabulary: int
    """Tokens that the model has."""
    version: str
    """Version of the weights that must write them: ``<run>-<iteration>``."""
    greedy: bool = False
    """Take the most likely token each time."""


class Answer(NamedTuple):
    """One completion."""

    tokens: list[int]
    """The token that ended it included."""
    log_probs: list[float]
    """Log-probability of each token, under the distribution that it was drawn from."""
    stop: Stop
    versions: list[str]
    """Version of the weights that wrote each token."""


# vLLM's server (0.32): token ids in, token ids and log-probabilities out

ADAPTER = "groupwise"
"""Name under which adapters are served."""
FLAGS = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-scale-out")
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
FIX = f"fix: start it by groupwise serve, or with {' '.join(f'{k}={v}' for k, v in ENVIRONMENT.items())} and {' '.join(FLAGS)}"


class VLLMServer:
    """One server. Every call has a time limit and raises a ``ServerError``; none changes anything when repeated.

    Args:
        adapters: whether weights are adapters; the server needs ``--enable-lora`` then.
        in_flight_updates: whether running requests continue under new weights; otherwise they finish first.
    """

    def __init__(self, client: HttpClient, *, adapters: bool, in_flight_updates: bool = False) -> None:
        self._client, self._adapters = client, adapters
        self._in_flight_updates = in_flight_updates

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._client.url

    def close(self) -> None:
        """End the calls that run, and all later ones, by a ``ServerError``."""
        self._client.close()

    def check(self) -> None:
        """Refuse a server that states other log-probabilities than those of the distribution that it samples from."""
        with self._reading():
            try:
                config = self._client.call("/server_info?config_format=json")["vllm_config"]
            except RefusedError:
                raise ServerError(f"{self.url} has no /server_info; {FIX}") from None
            model = config["model_config"]
            for name, needed in {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}.items():
                if model.get(name) != needed:
                    raise ServerError(f"{self.url} has {name}={model.get(name)!r}, expected {needed!r}; {FIX}")
            if self._adapters and not config.get("lora_config"):
                raise ServerError(f"{self.url} serves no adapters; fix: --enable-lora --max-lora-rank <rank>")

    def generate(self, request: GroupRequest) -> list[Answer]:
        """Generates the requested completions; raises ``LostWeightsError`` if other weights wrote them."""
        body: dict[str, Any] = {"token_ids": list(request.prompt), "sampling_params": sampling_params(request)}
        body |= {"return_token_ids": True, "stream": False} | ({"model": ADAPTER} if self._adapters else {})
        with self._reading():
            try:
                tokens = len(request.prompt) + request.size * request.sampling.max_new_tokens
                reply = self._client.call("/inference/v1/generate", body, tokens=tokens)
            except RefusedError as error:
                if error.status == 404 and self._adapters:
                    raise LostWeightsError(f"{self.url} has no adapter {ADAPTER!r}") from None
                raise
            if list(reply["prompt_token_ids"]) != list(request.prompt):
                raise ServerError(f"{self.url} read another prompt than it was sent; fix: serve the trained model")
            choices = sorted(reply["choices"], key=lambda choice: choice["index"])
            answers = [self._answer(choice, request) for choice in choices]
        if len(answers) != request.size:
            raise ServerError(f"{self.url} gave {len(answers)} completions, asked for {request.size}")
        versions = {version for answer in answers for version in answer.versions}
        if wrong := [version for version in versions if not self.allows(version, request)]:
            raise LostWeightsError(f"{self.url} answered by weights {wrong[0]!r}, expected {request.version!r}")
        for answer in answers:
            check_answer(answer, request, self.url)
        return answers

    def _answer(self, choice: dict[str, Any], request: GroupRequest) -> Answer:
        tokens, end = choice["token_ids"], choice["finish_reason"]
        scored = [(entry["token_id"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
        spans = choice["weight_versions"]
        of_tokens = (span["version"] for span in spans for _ in range(span["end"] - span["start"]))
        versions = list(islice(of_tokens, len(tokens) + 1))  # a wrong span may be long
        if [token for token, _ in scored] != tokens:
            raise ServerError(f"{self.url} gave log-probabilities of other tokens than those of the completion")
        if end not in ("stop", "length"):
            raise ServerError(f"{self.url} ended a completion by {end!r}; fix: let no one abort requests")
        stop: Stop = "eos" if tokens and tokens[-1] in request.eos_ids else end
        return Answer(tokens, [value for _, value in scored], stop, versions)

    def allows(self, version: str, request: GroupRequest) -> bool:
        """Whether weights of this version may have written a token: the requested one, or in flight a later one."""
        (run, _, asked), (of_run, _, iteration) = request.version.rpartition("-"), version.rpartition("-")
        is_later = self._in_flight_updates and run == of_run and iteration.isdecimal() and int(iteration) >= int(asked)
        return version == request.version or is_later

    def update(self, folder: Path, version: str) -> None:
        """Give it the weights of a folder. A failure leaves it paused, as half of its weights may be old."""
        in_flight, call = self._in_flight_updates, self._client.call
        for _ in range(self._client.retries + 1):
            failures = self._client.failures
            with self._reading():
                call(f"/pause?mode={'keep' if in_flight else 'wait'}", {})  # requests are held back, or finished
                if self._adapters:
                    adapter = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
                    call("/v1/load_lora_adapter", adapter)
                else:
                    call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
                call("/update_weight_version", {"new_version": version})
                # prompts, and requests that are held back, are computed again by the new weights
                if not call(f"/reset_prefix_cache{'?reset_running_requests=true' if in_flight else ''}", {})["success"]:
                    raise ServerError(f"{self.url} keeps cached prompts of old weights; fix: no other requests on it")
                call("/resume", {})
                if self._client.failures == failures:
                    return
            # a call was repeated, perhaps at a server that was started again and lacks what calls before gave it
        raise ServerError(f"{self.url} was lost again and again while it read weights; fix: look at the server's log")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A ``ServerError`` if an answer has another format."""
        try:
            yield
        except GroupwiseError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url} answered in another format ({error!r}); fix: vLLM 0.32 or later") from None


def check_answer(answer: Answer, request: GroupRequest, url: str) -> None:
    """Raise a ``ServerError`` if it cannot be an answer to this request."""
    tokens, longest = answer.tokens, request.sampling.max_new_tokens
    wrong = None
    if len(answer.versions) != len(tokens):
        wrong = f"{len(tokens)} tokens, and the versions of the weights of {len(answer.versions)}"
    elif not 1 <= len(tokens) <= longest or len(answer.log_probs) != len(tokens):
        wrong = f"{len(tokens)} tokens with {len(answer.log_probs)} log-probabilities, asked for 1 to {longest}"
    elif strange := [token for token in tokens if not 0 <= token < request.vocabulary]:
        wrong = f"token {strange[0]}, and the model has {request.vocabulary:,}; fix: serve the model that is trained"
    elif ends := [token for token in tokens[:-1] if token in request.eos_ids]:
        wrong = f"tokens after the end of the text ({ends[0]})"
    elif answer.stop == "length" and len(tokens) < longest:
        wrong = f"a completion cut after {len(tokens)} of {longest} tokens; fix: serve a longer context"
    else:  # servers send null, or NaN, where a network diverged
        known = [isinstance(value, float | int) and -1e3 < value < 1e-3 for value in answer.log_probs]
        if not all(known):
            wrong = f"the log-probability {answer.log_probs[known.index(False)]}"
    if wrong is not None:
        raise ServerError(f"{url} gave {wrong}")


def sampling_params(request: GroupRequest) -> dict[str, Any]:
    """Sampling parameters for vLLM: every field that changes the samples. The group's seeds count from ``seed`` on."""
    sampling = request.sampling
    return {
        "n": request.size,
        "seed": request.seed,
        "temperature": 0.0 if request.greedy else sampling.temperature,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(request.eos_ids),
        "ignore_eos": True,  # the ids above are all that end a completion
        "skip_special_tokens": False,  # stop strings are looked for in the whole text
        "spaces_between_special_tokens": False,
        "logprobs": 0,  # of the sampled token alone
    }


# A vLLM server as a child process, with a Python of another virtual environment

HOST = "127.0.0.1"
_PORTS = range(20_000, 32_768)
"""Ports below the range from which systems assign free ports, so no other program gets one before the server."""
_LAST_LINES, _ERRORS = 10, 5
_SECONDS_TO_END = 10.0
_LEAD = """
import os, signal, subprocess, sys

server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
if os.fork() == 0:  # not this process, which some kill with its parent
    os.read(0, 1)  # returns when the other end is gone
    os.killpg(0, signal.SIGKILL)
os._exit(server.wait() & 255)
"""
"""Leads the server's group of processes, which ends with the process that started it."""


def command(python: Path, model: str, args: Sequence[str] = (), *, lora_rank: int | None = None) -> list[str]:
    """The command line of a server of a model, without its address.

    Args:
        lora_rank: largest rank of adapters. None: there will be none.
    """
    # not `vllm serve`: builds for CPUs lack its entry point
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *FLAGS]
    if lora_rank is not None:
        ranks = (8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM knows
        largest = next((rank for rank in ranks if rank >= lora_rank), lora_rank)
        words += ["--enable-lora", "--max-lora-rank", str(largest)]
    return [*words, *args]


class LocalServer:
    """A server that runs as long as this process, or until ``close``, also if this process is killed.

    Args:
        words: the command line, without the address.
        log: file for the server's output.
        timeout: seconds that its start may take.
        port: 0 for a free one.
    """

    def __init__(self, words: Sequence[str], log: Path, timeout: float = 600.0, *, port: int = 0) -> None:
        if not Path(words[0]).is_file():
            raise ConfigError(f"python={words[0]!r} is no file; fix: the Python of an environment with vLLM")
        self._address = (HOST, free_port(port))
        self.url, self.log, self._timeout = f"http://{HOST}:{self._address[1]}", log, timeout
        self.words = [*words, "--host", HOST, "--port", str(self._address[1])]
        with log.open("wb") as file:
            self._process = subprocess.Popen(  # noqa: S603
                # an absolute path, since a bare name would be one of PATH
                [sys.executable, "-c", _LEAD, os.path.abspath(words[0]), *self.words[1:]],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=os.environ | ENVIRONMENT | {"PYTHONSAFEPATH": "1"},  # nothing from the working folder is imported
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return when the server is ready; a ``ServerError`` with its last lines if it ends, or takes too long."""
        until = time.monotonic() + self._timeout
        while not is_healthy(self.url):
            if self._process.poll() is not None:
                self.join()
            if time.monotonic() > until:
                raise ServerError(f"the server was not ready in {self._timeout:g} s{last_lines(self.log)}")
            time.sleep(0.2)

    def join(self) -> NoReturn:
        """Wait until the server ends by itself; then raise a ``ServerError`` with its last lines."""
        code = self._process.wait()
        raise ServerError(f"the server ended with exit code {code}{last_lines(self.log)}")

    def close(self) -> None:
        """End it and all its processes."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        until = time.monotonic() + _SECONDS_TO_END
        while time.monotonic() < until:  # the server itself is a child of that process
            with socket.socket() as probe:
                if probe.connect_ex(self._address) != 0:
                    break
            time.sleep(0.05)


def last_lines(log: Path) -> str:
    """The errors in a server's output, the cause first, and the end of the output."""
    text = log.read_text(errors="replace")
    errors = list(dict.fromkeys(re.findall(r"\w+Error: .+", text)))[:_ERRORS]
    return "\n".join(["; its errors:", *errors, "its last lines:", *text.splitlines()[-_LAST_LINES:]])


def free_port(port: int = 0) -> int:
    """A free port of this machine; raises ``ConfigError`` if the given one is in use."""
    for candidate in [port] if port else SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                probe.bind((HOST, candidate))
            except OSError as error:
                last = error
            else:
                return candidate
    raise ConfigError(f"port {candidate} cannot be used ({last}); fix: another one, or end what listens there")
