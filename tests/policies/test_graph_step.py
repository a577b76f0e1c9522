"""The step of constant shapes, on the CPU; recording it needs a GPU, whose part a trace plays elsewhere."""

import warnings

import pytest
import torch
from tiny_models import moved, tiny_model
from token_steps import exact, read_in_turn, rounded
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from groupwise.errors import SlowPathWarning
from groupwise.policies import decoding, graph_step
from groupwise.policies.causal_lm import CausalLM
from groupwise.policies.configs import LoRACfg, SamplingCfg
from groupwise.policies.decoding import complete
from groupwise.policies.graph_step import StaticStep, may_replay
from groupwise.policies.llama_step import LlamaStep, Prompts
from groupwise.policies.load_model import with_adapters

PROMPTS = {"padded": [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15]], "of one length": [[5, 6], [9, 4], [10, 11]]}
MODELS = {
    "llama": tiny_model,
    "qwen2": lambda: tiny_model("qwen2"),
    "qwen3": lambda: tiny_model("qwen3"),
    "adapters": lambda: with_adapters(tiny_model(), LoRACfg(r=4)),
}
SEEDS = torch.arange(12).view(3, 4)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def empty_is_nan():
    """New memory holds what harms most."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def made(monkeypatch):
    """Static steps that have been made."""
    steps = []

    class Noted(StaticStep):
        def __init__(self, *args):
            super().__init__(*args)
            steps.append(self)

    monkeypatch.setattr(graph_step, "StaticStep", Noted)
    return steps


def written(model, by, prompts, eos_ids=None, autocast=None, **how):
    policy = CausalLM(model, SamplingCfg(max_new_tokens=20), eos_ids, autocast=autocast)
    policy.reads_tokens_by = by
    return [completion for group in complete(policy, prompts, SEEDS, **how) for completion in group]


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.stop) == (other.tokens, other.stop)
        torch.testing.assert_close(one.log_probs, other.log_probs, rtol=0, atol=6e-5)


@pytest.mark.usefixtures("empty_is_nan")
@pytest.mark.parametrize("lengths", PROMPTS)
@pytest.mark.parametrize("name", MODELS)
def test_it_writes_what_the_plain_step_writes(name, lengths, made):
    model = moved(MODELS[name]())
    ways = [written(model, by, PROMPTS[lengths], eos_ids=(3, 8, 20, 30)) for by in ("graph", "own step")]
    same(*ways)
    assert len({len(completion.tokens) for completion in ways[1]}) > 3  # rows finish at different times
    assert len(made) == 1


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("name", MODELS)
def test_greedily_too(name):
    model = moved(MODELS[name]())
    ways = [written(model, by, PROMPTS["padded"], (), deterministic=True) for by in ("graph", "own step")]
    same(*ways)
    assert {completion.stop for completion in ways[0]} == {"length"}  # the room is used to its end


def steps(policy, group_size=2, max_new_tokens=12):
    """The static step and the plain one, behind the same prompts."""
    tokens, valid = decoding.left_padded(PROMPTS["padded"], policy.device)
    both = []
    for kind in (StaticStep, LlamaStep):
        cache = DynamicCache(config=policy.network.config)
        policy.hidden_states(tokens, valid, cache)
        both.append(kind(policy, Prompts(cache, valid, group_size, max_new_tokens)))
    return both


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "adapters"])
@pytest.mark.parametrize("precision", ["weights", "autocast"])
def test_hidden_states_in_bfloat16_differ_by_rounding(name, precision):
    model, autocast = moved(MODELS[name](), by=0.05), torch.bfloat16 if precision == "autocast" else None
    policy = CausalLM(model if autocast else model.bfloat16(), autocast=autocast)
    with policy.computing():
        read_in_turn(*steps(policy), policy.device, rounded, count=11)


class Trace:
    """A CUDA graph's part: the operations of one run, replayed on the same tensors with the same shapes."""

    def __init__(self, static):
        self._static = static
        self._traced = make_fx(lambda: static._hidden(static._token, static._mask))()

    def replay(self):
        self._static._found = self._traced()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_one_recorded_run_serves_every_token(name):
    static, plain = steps(CausalLM(moved(MODELS[name]())))
    static._graph = Trace(static)
    static._hidden = None  # nothing but the recording is run
    read_in_turn(static, plain, plain._position.device, count=11)


class Noting(TorchDispatchMode):
    """Notes each operation, its tensors' shapes, and where caches are written to."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
        cache = args[0].data_ptr() if func.__name__.startswith("index_copy_") else None
        self.seen.append((func.__name__, shapes, cache))
        return func(*args, **(kwargs or {}))


WAITS = {"_local_scalar_dense.default", "nonzero.default", "masked_select.default", "unique_dim.default"}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_each_token_takes_the_same_operations_on_the_same_shapes_and_never_waits(name):
    static, _ = steps(CausalLM(moved(MODELS[name]())))
    runs = []
    for _ in range(3):
        static(torch.arange(6))
        with Noting() as noting:
            static._hidden(static._token, static._mask)
        runs.append(noting.seen)
    assert runs[0] == runs[1] == runs[2]
    assert sum(operation.startswith("index_copy_") for operation, _, _ in runs[0]) == 4  # two layers' keys and values
    assert not WAITS & {operation for operation, _, _ in runs[0]}


def test_a_recording_that_fails_is_told_once_and_the_plain_step_goes_on(monkeypatch):
    def fails(policy, prompts):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph_step, "StaticStep", fails)
    monkeypatch.setattr(decoding, "may_replay", lambda policy: True)
    policy = CausalLM(moved(tiny_model()), SamplingCfg(max_new_tokens=8))
    with pytest.warns(SlowPathWarning, match="without a CUDA graph.*: operation not permitted when") as told:
        found = complete(policy, PROMPTS["padded"], SEEDS)
    assert len(told) == 1
    assert policy.reads_tokens_by == "own step"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert complete(policy, PROMPTS["padded"], SEEDS) == found


def test_where_a_graph_is_right_it_is_taken_once_the_step_has_been_seen_to_agree(monkeypatch, made):
    monkeypatch.setattr(decoding, "may_replay", lambda policy: True)
    policy = CausalLM(moved(tiny_model()), SamplingCfg(max_new_tokens=8))
    complete(policy, PROMPTS["padded"], SEEDS)
    complete(policy, PROMPTS["padded"], SEEDS)
    assert policy.reads_tokens_by == "graph"
    assert len(made) == 2


def test_only_gpus_without_hooks_try_a_graph(monkeypatch):
    policy = CausalLM(tiny_model())
    assert not may_replay(policy)
    monkeypatch.setattr(CausalLM, "device", torch.device("cuda"))
    assert may_replay(policy)
    policy.network.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, output: output)
    assert not may_replay(policy)


@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_gpu_replays_it(name, autocast):
    policy = CausalLM(moved(MODELS[name]()).cuda(), autocast=autocast)
    with policy.computing():
        static, plain = steps(policy)
        assert static._graph is not None
        read_in_turn(static, plain, policy.device, rounded if autocast else exact, count=11)


@needs_gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_it_is_chosen_and_writes_the_same(name):
    model = moved(MODELS[name]()).cuda()
    policy = CausalLM(model, SamplingCfg(max_new_tokens=8))
    complete(policy, PROMPTS["padded"], SEEDS)
    assert policy.reads_tokens_by == "graph"
    same(*(written(model, by, PROMPTS["padded"], deterministic=True) for by in ("graph", "own step")))
