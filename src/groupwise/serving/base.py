"""What training asks of an inference server: five verbs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from groupwise.config.policy import SamplingCfg
from groupwise.errors import GroupwiseError, ServerError
from groupwise.serving.http import HttpClient, RestartedError

Stop = Literal["eos", "stop", "length"]


class LostWeightsError(ServerError):
    """A server answered with other weights than the last that it was given, as after a restart."""


class GroupRequest(NamedTuple):
    """Completions of one prompt. A repeated request is the same request: it has its seed."""

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
    """Of the weights that must write them: ``<run>-<iteration>``."""
    greedy: bool = False
    """Take the most likely token each time."""


class Answer(NamedTuple):
    """One completion."""

    tokens: list[int]
    """The token that ended it included."""
    log_probs: list[float]
    """Of each token, under the distribution that it was drawn from."""
    stop: Stop
    versions: list[str]
    """Of the weights that wrote each token."""


class Reply(NamedTuple):
    """One completion as a server tells it."""

    prompt: Sequence[int]
    """What it completed."""
    tokens: list[int]
    scored: Sequence[tuple[int, float]]
    """Tokens and their log-probabilities."""
    end: str
    """``"stop"`` or ``"length"``; anything else is an error."""
    versions: list[str]
    """Of the weights that wrote each token."""


class Server(ABC):
    """An inference server. Every call has a time limit and raises a ``ServerError``; none changes anything when repeated.

    Args:
        adapters: whether weights are adapters.
        in_flight_updates: whether requests that run go on under new weights, or are finished before.
    """

    needs: str
    """The server and its first release that answers as expected."""

    def __init__(self, client: HttpClient, *, adapters: bool, in_flight_updates: bool = False) -> None:
        self._client, self._adapters = client, adapters
        self._in_flight_updates = in_flight_updates

    @property
    def url(self) -> str:
        """Where it is."""
        return self._client.url

    def check(self) -> None:
        """Refuse a server that states other log-probabilities than those of the distribution that it samples from."""
        with self._reading():
            self.inspect()

    @abstractmethod
    def inspect(self) -> None:
        """What ``check`` does."""

    @abstractmethod
    def ask(self, request: GroupRequest) -> list[Reply]:
        """What the server says; a ``LostWeightsError`` if it has no such adapters."""

    def generate(self, request: GroupRequest) -> list[Answer]:
        """As many completions as asked for; a ``LostWeightsError`` if other weights wrote them."""
        with self._reading():
            try:
                replies = self.ask(request)
            except RestartedError as error:
                raise LostWeightsError(str(error)) from None
            answers = [_answer(reply, request, self.url) for reply in replies]
        if len(replies) != request.size:
            raise ServerError(f"{self.url} gave {len(replies)} completions, asked for {request.size}")
        versions = {version for answer in answers for version in answer.versions}
        if wrong := [version for version in versions if not self.allows(version, request)]:
            raise LostWeightsError(f"{self.url} answered by weights {wrong[0]!r}, expected {request.version!r}")
        return [check_answer(answer, request, self.url) for answer in answers]

    def allows(self, version: str, request: GroupRequest) -> bool:
        """Whether weights of this version may have written a token: those asked for, or in flight later ones of the run."""
        (run, _, asked), (of_run, _, iteration) = request.version.rpartition("-"), version.rpartition("-")
        is_later = self._in_flight_updates and run == of_run and iteration.isdecimal() and int(iteration) >= int(asked)
        return version == request.version or is_later

    @abstractmethod
    def pause(self) -> None:
        """Finish the requests that run, or hold them back, and begin none."""

    @abstractmethod
    def load_weights(self, folder: Path, version: str) -> None:
        """Read the safetensors of a folder: those of a whole model, or of adapters."""

    @abstractmethod
    def flush(self) -> None:
        """Forget what was cached of prompts, and of requests that are held back."""

    @abstractmethod
    def resume(self) -> None:
        """Begin requests again, and go on with those that were held back."""

    def close(self) -> None:
        """End the calls that run, and all later ones, by a ``ServerError``."""
        self._client.close()

    def update(self, folder: Path, version: str) -> None:
        """Give it new weights. A failure leaves it paused, as half of its weights may be old."""
        for _ in range(self._client.retries + 1):
            failures = self._client.failures
            with self._reading(), suppress(RestartedError):
                self.pause()
                self.load_weights(folder, version)
                self.flush()
                self.resume()
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
            raise ServerError(
                f"{self.url} answered in another format ({error!r}); fix: {self.needs} or later"
            ) from None


def _answer(reply: Reply, request: GroupRequest, url: str) -> Answer:
    if list(reply.prompt) != list(request.prompt):
        raise ServerError(f"{url} read another prompt than it was sent; fix: serve the model that is trained")
    if [token for token, _ in reply.scored] != reply.tokens:
        raise ServerError(f"{url} gave log-probabilities of other tokens than those of the completion")
    if reply.end not in ("stop", "length"):
        raise ServerError(f"{url} ended a completion by {reply.end!r}; fix: let no one abort requests")
    ended: Stop = "length" if reply.end == "length" else "stop"
    stop: Stop = "eos" if reply.tokens and reply.tokens[-1] in request.eos_ids else ended
    return Answer(reply.tokens, [value for _, value in reply.scored], stop, reply.versions)


def of_each_token(spans: Sequence[Mapping[str, Any]]) -> list[str]:
    """The versions of the weights that wrote the spans of a completion, token by token."""
    return [span["version"] for span in spans for _ in range(span["end"] - span["start"])]


def _is_log_prob(value: object) -> bool:
    """Servers send null, or NaN, where a network diverged."""
    return isinstance(value, float | int) and math.isfinite(value) and -1e3 < value < 1e-3


def check_answer(answer: Answer, request: GroupRequest, url: str) -> Answer:
    """The answer; a ``ServerError`` if it cannot be one of this request."""
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
    elif odd := [value for value in answer.log_probs if not _is_log_prob(value)]:
        wrong = f"the log-probability {odd[0]}"
    if wrong is not None:
        raise ServerError(f"{url} gave {wrong}")
    return answer
