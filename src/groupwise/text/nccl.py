"""Weights from the GPU that trains to those of vLLM servers, by NCCL and without files. No run on GPUs has proven it.

This is vLLM's protocol for trainers that do not import it: they send the unique id of the communicator over HTTP, and are its
rank 0. Source: ``NCCLWeightTransferInitInfo``, https://docs.vllm.ai/en/v0.32.0/training/weight_transfer/.
"""

from base64 import b64encode
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import ServerError
from groupwise.serving.http import HttpClient
from groupwise.serving.vllm import SERVER_INFO, VLLMServer
from groupwise.text.policy import CausalLM


class NCCLServer(VLLMServer):
    """A vLLM server that gets whole weights from the policy's GPU, which no server uses.

    Each update has a communicator of its own, so a server that was started again needs nothing else.
    """

    reads_files = False

    def __init__(self, client: HttpClient, policy: CausalLM) -> None:
        super().__init__(client, adapters=False)
        self._policy, self._seconds = policy, client.timeout
        # a repeated call would wait for an exchange that is over
        self._once = HttpClient(client.url, timeout=client.timeout, retries=0)

    def inspect(self) -> None:
        """Refuse a server that cannot take part, too."""
        super().inspect()
        found = self._client.get(SERVER_INFO)["vllm_config"].get("weight_transfer_config")
        if not found or found["backend"] != "nccl":
            raise ServerError(
                f"{self.url} has weight_transfer_config={found!r}, expected the backend 'nccl'; "
                """fix: start it with --weight-transfer-config '{"backend": "nccl"}'"""
            )

    def load_weights(self, folder: Path, version: str) -> None:
        """Send the policy's weights, in vLLM's four phases; nothing is read from the folder."""
        weights = {name: p.detach().contiguous() for name, p in self._policy.network.named_parameters()}
        update = {
            "names": [*weights],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
            "shapes": [[*tensor.shape] for tensor in weights.values()],
        }
        link = self._connect()
        try:
            self._once.post("/start_weight_update")
            self._together("/update_weights", {"update_info": update}, partial(_send, link, weights.values()))
            self._once.post("/finish_weight_update", {"weight_version": version})
            self._once.post("/shutdown_weight_transfer_engine")
        finally:
            link.abort()

    def close(self) -> None:
        """End the calls that run, and all later ones, by a ``ServerError``."""
        super().close()
        self._once.close()

    def _connect(self) -> Any:
        """A communicator with all GPUs of the server."""
        from nccl.core import SUM, Communicator, get_unique_id

        ranks, unique = 1 + self._client.get("/get_world_size")["world_size"], get_unique_id()

        joined = []

        def join(stream: int) -> Any:
            link, one = Communicator.init(ranks, 0, unique), torch.zeros(1, device=self._policy.device)
            joined.append(link)
            link.allreduce(one, one, SUM, stream=stream)  # every rank begins with it
            return link

        rendezvous = {"nccl_unique_id_b64": b64encode(unique.as_bytes).decode(), "rank_offset": 1, "world_size": ranks}
        try:
            return self._together("/init_weight_transfer_engine", {"init_info": rendezvous | {"packed": False}}, join)
        except BaseException:
            for link in joined:
                link.abort()
            raise

    def _together(self, path: str, body: dict[str, Any], exchange: Callable[[int], Any]) -> Any:
        """What the exchange returns, in which the server takes part while the call lasts.

        Args:
            exchange: takes a stream, which holds up no other work if the server is lost.
        """

        def on_stream() -> Any:
            stream = torch.cuda.Stream(self._policy.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.default_stream(self._policy.device))
            with torch.cuda.device(self._policy.device), torch.cuda.stream(stream):
                found = exchange(stream.cuda_stream)
                stream.synchronize()
            return found

        tries = [_started(on_stream), _started(partial(self._once.post, path, body))]
        done, late = wait(tries, self._seconds, FIRST_EXCEPTION)
        for error in (one.exception() for one in done):
            if error is not None:
                raise error if isinstance(error, ServerError) else self._failed(path, f"failed: {error!r}") from error
        if late:
            raise self._failed(path, f"took longer than {self._seconds:g} s")
        return tries[0].result()

    def _failed(self, path: str, why: str) -> ServerError:
        fix = "the same NCCL for training and servers, GPUs that reach one another, or a larger generation.timeout"
        return ServerError(f"{self.url}{path}: the exchange of weights {why}; fix: {fix}")


def _send(link: Any, weights: Iterable[Tensor], stream: int) -> None:
    for tensor in weights:
        link.broadcast(tensor, tensor, 0, stream=stream)


def _started(work: Callable[[], Any]) -> Future[Any]:
    """What a thread will return. It may wait forever for a lost server, which must not keep the process from its end."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
