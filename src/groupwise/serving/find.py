"""Which server answers at an address."""

from groupwise.errors import ServerError
from groupwise.serving.base import Server
from groupwise.serving.http import HttpClient, RefusedError
from groupwise.serving.sglang import SGLangServer
from groupwise.serving.vllm import FIX, SERVER_INFO, VLLMServer

_KINDS: dict[str, type[Server]] = {"vllm_config": VLLMServer, "internal_states": SGLangServer}
"""By what ``/server_info`` has, at which both answer."""


def find_server(client: HttpClient, *, adapters: bool, in_flight_updates: bool = False) -> Server:
    """The adapter for the server that answers, vLLM or SGLang; a ``ServerError`` if it is neither.

    Args:
        adapters, in_flight_updates: as of ``Server``.
    """
    try:
        info = client.get(SERVER_INFO)
    except RefusedError:
        raise ServerError(
            f"{client.url} has no /server_info, as vLLM without the calls that change its weights; {FIX}; or serve with SGLang"
        ) from None
    for name, kind in _KINDS.items():
        if isinstance(info, dict) and name in info:
            return kind(client, adapters=adapters, in_flight_updates=in_flight_updates)
    raise ServerError(
        f"{client.url} is neither vLLM nor SGLang, by its /server_info; fix: generation.urls of one of them"
    )
