"""Settings of where completions are generated. Imports no torch."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from annotated_types import Ge
from pydantic import Field, model_validator

from groupwise.config.base import Positive
from groupwise.config.choices import Choice, register_choice


class GenerationCfg(Choice):
    """Where completions are generated in training."""

    family: ClassVar = "generation"
    default: ClassVar = "native"
    known: ClassVar = {}


@register_choice
class NativeGenerationCfg(GenerationCfg):
    """By the model that is trained, in the process of training."""

    name: Literal["native"] = "native"


@register_choice
class ServerGenerationCfg(GenerationCfg):
    """By vLLM servers, which read the new weights before each iteration."""

    name: Literal["server"] = "server"
    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+$")], ...] = ("http://127.0.0.1:8000",)
    """Servers that run already. They take groups in turn; a group stays on one server."""
    python: Path | None = None
    """In place of ``urls``: the Python of a virtual environment with vLLM, with which the run starts a server of its own on this machine."""
    args: tuple[str, ...] = ()
    """Further arguments of the server that the run starts, such as ``["--enforce-eager"]``."""
    weights_dir: Path | None = None
    """Folder for the weights on their way, on a disk that the servers read under the same path. None: a temporary one on this machine."""
    timeout: Positive = 600.0
    """Seconds that a call, or the start of a server, may take."""
    retries: Annotated[int, Ge(0)] = 3
    """How often a call is repeated that got no answer, or an error of the server."""
    max_staleness: Annotated[int, Ge(0)] = 0
    """Updates that may lie between the weights that wrote a rollout and the weights that it trains. 0: servers wait for each update; 1 or more: they write the next rollouts meanwhile."""
    in_flight_updates: bool = False
    """With ``max_staleness``: servers load new weights while they generate, and completions that run go on under them. False: they finish a rollout before."""

    @model_validator(mode="after")
    def _check(self) -> "ServerGenerationCfg":
        if not self.urls or (self.python is not None and self.changed("urls")):
            raise ValueError(
                f"generation='server' has {len(self.urls)} urls and python={str(self.python)!r}; fix: one of the two: urls of "
                "servers that run, or the Python of an environment with vLLM"
            )
        for url in self.urls:
            try:
                urlsplit(url).port  # noqa: B018  raises where it is no number
            except ValueError:
                raise ValueError(
                    f"urls = {url!r}: the port is no number below 65536; fix: http://127.0.0.1:8000"
                ) from None
        if self.in_flight_updates and not self.max_staleness:
            raise ValueError(
                "in_flight_updates=True and max_staleness=0: servers write nothing while new weights come; fix: max_staleness=1"
            )
        if self.args and self.python is None:
            raise ValueError(
                f"args={self.args!r} are of a server that the run starts; fix: leave them out, or python=..."
            )
        return self
