"""Our own step in tensors that stay where they are, so that a GPU can record it once and replay it for each token.

A small model spends most of a token's time on starting kernels from Python; a CUDA graph starts all of them at once. It
replays addresses and shapes. So caches have room for the longest text from the beginning, attention goes over all of it
under a mask, and finished rows stay and write on, unread.
"""

import warnings
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.errors import SlowPathWarning
from groupwise.policies.base import has_hooks
from groupwise.policies.causal_lm import CausalLM
from groupwise.policies.llama_step import LlamaStep, Prompts

_WARM_UP = 3
"""Runs before the recording, in which libraries choose kernels and take workspace."""


def may_replay(policy: CausalLM) -> bool:
    """Whether a graph can be tried: on a GPU, without hooks, whose Python a graph would leave out."""
    return policy.device.type == "cuda" and not has_hooks(policy.network.base_model.layers)


def replayed(policy: CausalLM, prompts: Prompts) -> LlamaStep:
    """The step as a graph; where it cannot be recorded the plain one, then and ever after, and a warning says why."""
    try:
        return StaticStep(policy, prompts)
    except RuntimeError as error:  # of CUDA, out of memory included: the plain step's caches begin smaller
        why = str(error)  # the error itself would keep the caches alive
    policy.reads_tokens_by = "own step"
    name = type(policy.network).__name__
    warnings.warn(
        f"{name} reads tokens one by one without a CUDA graph, which could not be recorded: {why}",
        SlowPathWarning,
        stacklevel=6,
    )
    return LlamaStep(policy, prompts)


class StaticStep(LlamaStep):
    """``LlamaStep`` in constant shapes: on a GPU replayed as a CUDA graph, elsewhere run as it stands.

    Stay within one ``policy.computing()``: the graph reads the weights that autocast has cast there.

    Raises:
        RuntimeError: a GPU cannot record it, or replays something else.
    """

    _mask: Float[Tensor, "row 1 1 room"]

    def __init__(self, policy: CausalLM, prompts: Prompts) -> None:
        super().__init__(policy, prompts, room=prompts.max_new_tokens)
        device = self._position.device
        for store in self._stores:
            store[:, :, :, self._length :] = 0  # what lies there may be NaN, which no mask hides
        self._running = torch.arange(self._rows, device=device)
        self._token = torch.zeros_like(self._running)
        self._place = torch.tensor([self._length], device=device)
        self._graph: Any = None
        self._found = torch.empty(0)
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._record(policy.rounding)

    def __call__(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row width"]:
        """The last hidden state of each row that is kept, its token read."""
        self._token.index_copy_(0, self._running, token)
        self._mask.index_fill_(3, self._place, 0)
        if self._graph is None:
            self._found = self._hidden(self._token, self._mask)
        else:
            self._graph.replay()
        self._place += 1
        self._position += 1
        return self._found[self._running]

    def keep(self, kept: Bool[Tensor, " row"]) -> None:
        """Leave the other rows unread: they write on into places of their own."""
        self._running = self._running[kept]

    def _extended(self, store: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All places of a layer, those not yet written included."""
        keys, values = store.unbind(0)
        for half, new in ((keys, key), (values, value)):
            half.index_copy_(2, self._place, new[:, :, None].to(half.dtype))
        return keys, values

    def _additive(self, valid: Tensor, most: int) -> Float[Tensor, "row 1 1 room"]:
        """Before the first token: 0 at the prompts' tokens, -inf elsewhere."""
        mask = self._stores[0].new_full((self._rows, 1, 1, self._length + most), -torch.inf)
        mask[..., : self._length].masked_fill_(valid[:, None, None], 0)
        return mask

    def _record(self, rounding: float) -> None:
        """Record the step; each run here writes to the first token's places, which that token overwrites."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._hidden(self._token, self._mask)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads, such as one that pins memory, may go on meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._found = self._hidden(self._token, self._mask)
        self._token += 1  # a replay must see what has changed since
        expected = self._hidden(self._token, self._mask).float()
        graph.replay()
        off = float((self._found.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        if not off <= rounding:
            raise RuntimeError(f"its hidden states differ by {off:.2g}, at most {rounding} is rounding")
        self._graph = graph
