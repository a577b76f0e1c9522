"""What training asks of an inference server, whichever it is: five verbs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from groupwise.config.policy import SamplingCfg
from groupwise.errors import ServerError

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
    """Of the weights that must write them."""
    greedy: bool = False
    """Take the most likely token each time."""


class Answer(NamedTuple):
    """One completion."""

    tokens: list[int]
    """The token that ended it included."""
    log_probs: list[float]
    """Of each token, under the distribution that it was drawn from."""
    stop: Stop
    version: str
    """Of the weights that wrote it."""


class Server(ABC):
    """An inference server. Every call has a time limit and raises a ``ServerError``; none changes anything when repeated.

    Args:
        url: scheme, host and port.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def check(self) -> None:
        """Refuse a server whose settings do not fit."""

    @abstractmethod
    def generate(self, request: GroupRequest) -> list[Answer]:
        """As many completions as asked for; a ``LostWeightsError`` if other weights wrote them."""

    @abstractmethod
    def pause(self) -> None:
        """Finish the requests that run, and begin none."""

    @abstractmethod
    def load_weights(self, folder: Path, version: str) -> None:
        """Read the safetensors of a folder: those of a whole model, or of adapters."""

    @abstractmethod
    def flush(self) -> None:
        """Forget what was cached of prompts."""

    @abstractmethod
    def resume(self) -> None:
        """Begin requests again."""

    @abstractmethod
    def close(self) -> None:
        """End the calls that run, and all later ones, by a ``ServerError``."""

    def update(self, folder: Path, version: str) -> None:
        """Give it new weights. A failure leaves it paused, as half of its weights may be old."""
        self.pause()
        self.load_weights(folder, version)
        self.flush()
        self.resume()


def check_answer(answer: Answer, request: GroupRequest, url: str) -> Answer:
    """The answer; a ``ServerError`` if it cannot be one of this request."""
    tokens, longest = answer.tokens, request.sampling.max_new_tokens
    wrong = None
    if not 1 <= len(tokens) <= longest or len(answer.log_probs) != len(tokens):
        wrong = f"{len(tokens)} tokens with {len(answer.log_probs)} log-probabilities, asked for 1 to {longest}"
    elif strange := [token for token in tokens if not 0 <= token < request.vocabulary]:
        wrong = f"token {strange[0]}, and the model has {request.vocabulary:,}; fix: serve the model that is trained"
    elif ends := [token for token in tokens[:-1] if token in request.eos_ids]:
        wrong = f"tokens after the end of the text ({ends[0]})"
    elif answer.stop == "length" and len(tokens) < longest:
        wrong = f"a completion cut after {len(tokens)} of {longest} tokens; fix: a larger --max-model-len"
    elif not all(math.isfinite(value) and -1e3 < value < 1e-3 for value in answer.log_probs):
        wrong = f"log-probabilities from {min(answer.log_probs):g} to {max(answer.log_probs):g}"
    if wrong is not None:
        raise ServerError(f"{url} gave {wrong}")
    return answer
