"""Weights that go to servers by NCCL, whose calls a double imitates without a GPU."""

import time

import pytest
import torch
from nccl_double import Exchange, Link
from sglang_double import SGLangDouble
from text_runs import copying, train
from tiny_models import tiny_model
from vllm_double import GENERATE, VLLMDouble

import groupwise as gw
from groupwise.config.policy import SamplingCfg
from groupwise.engines.base import Engine
from groupwise.serving.http import HttpClient
from groupwise.serving.vllm import VLLMServer
from groupwise.text import connect as connecting
from groupwise.text.connect import connect
from groupwise.text.generation import complete
from groupwise.text.load import load_causal_lm, with_adapters
from groupwise.text.nccl import NCCLServer
from groupwise.text.policy import CausalLM
from groupwise.text.served import ServedCollector, ServedGenerator

PHASES = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
CALLS = ["pause", *PHASES, "shutdown_weight_transfer_engine", "reset_prefix_cache", "resume"]


PROMPTS = [[5, 6, 7], [9, 8], [4]]
SAMPLING = SamplingCfg(max_new_tokens=4)


@pytest.fixture
def exchange(monkeypatch):
    return Exchange(monkeypatch)


@pytest.fixture
def double(double, exchange):
    double.receives_from(exchange)
    return double


def sending(model, tmp_path, *doubles, precision="float32"):
    policy = load_causal_lm(gw.ModelCfg(path=str(model), precision=precision), SAMPLING)
    clients = [HttpClient(double.url, timeout=20.0, retries=2) for double in doubles]
    return ServedGenerator([NCCLServer(client, policy) for client in clients], policy, tmp_path / "weights")


def move(policy, seed):
    """What is trained, away from where it was."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


def assert_served(generate):
    """The servers write what the policy would."""
    seeds = torch.arange(100, 112).view(3, 4)
    ours, theirs = generate(PROMPTS, seeds, SAMPLING), complete(generate.policy, PROMPTS, seeds, SAMPLING)
    assert [[c.tokens for c in group] for group in ours] == [[c.tokens for c in group] for group in theirs]


def test_servers_get_weights_without_files(model, double, exchange, tmp_path):
    with VLLMDouble(model) as second:
        second.receives_from(exchange)
        generate = sending(model, tmp_path, double, second)
        for iteration in range(2):
            move(generate.policy, iteration)
            double.calls.clear()
            generate.update(iteration)
            assert [path.strip("/") for path, body in double.calls if body is not None] == CALLS
            assert_served(generate)
        double.restart()  # it gets them again
        assert_served(generate)
    assert len(exchange.links) == 5
    assert all(link.aborted.is_set() for link in exchange.links.values())
    assert not (tmp_path / "weights").exists()


def test_weights_keep_their_type(model, double, tmp_path):
    sending(model, tmp_path, double, precision="bfloat16").update(0)
    (update,) = [body["update_info"] for path, body in double.calls if path == "/update_weights"]
    assert set(update["dtype_names"]) == {"bfloat16"}


@pytest.mark.parametrize("phase", PHASES)
def test_a_server_that_cannot_take_them_ends_the_update_at_once(model, double, exchange, tmp_path, phase):
    generate = sending(model, tmp_path, double)
    double.faults[f"/{phase}"] = ["500"]
    begun = time.monotonic()
    with pytest.raises(gw.errors.ServerError, match=f"{phase}: no answer in 1 tries: .*EngineDeadError: out of memory"):
        generate.update(0)
    assert time.monotonic() - begun < 4  # not as long as the exchange waits
    assert all(link.aborted.is_set() for link in exchange.links.values() if link.joined.is_set())
    assert GENERATE not in [path for path, _ in double.calls]


def test_an_exchange_that_fails_ends_the_update_at_once(model, double, exchange, tmp_path):
    generate = sending(model, tmp_path, double)
    exchange.fault = "NCCL versions differ"
    begun = time.monotonic()
    with pytest.raises(
        gw.errors.ServerError, match=r"exchange of weights failed: .*NCCL versions differ.*; fix: the same NCCL"
    ):
        generate.update(0)
    assert time.monotonic() - begun < 4


def test_a_communicator_whose_first_exchange_fails_is_aborted(model, double, exchange, tmp_path, monkeypatch):
    def fails(link, *args, **options):
        raise RuntimeError("unhandled system error")

    monkeypatch.setattr(Link, "allreduce", fails)
    with pytest.raises(gw.errors.ServerError, match=r"exchange of weights failed: .*unhandled system error"):
        sending(model, tmp_path, double).update(0)
    (link,) = exchange.links.values()
    assert link.aborted.is_set()


def test_a_server_without_nccl_is_refused(model, double, tmp_path):
    double.config["weight_transfer_config"] = None
    with pytest.raises(
        gw.errors.ServerError, match=r"weight_transfer_config=None, expected .*; fix: .*--weight-transfer-config"
    ):
        sending(model, tmp_path, double)


class Made(ServedCollector):
    def __init__(self, generator, own, cleanup):
        self.generator, self.cleanup = generator, cleanup


def test_the_setting_has_weights_sent(model, double, monkeypatch):
    policy = load_causal_lm(gw.ModelCfg(path=str(model)), SAMPLING)
    monkeypatch.setattr(CausalLM, "device", torch.device("cuda"))
    monkeypatch.setattr(connecting, "ServedCollector", Made)
    for transfer, kind in (("folder", VLLMServer), ("nccl", NCCLServer)):
        cfg = gw.TextRunCfg(generation={"name": "server", "urls": [double.url], "transfer": transfer})
        made = connect(cfg, policy, Engine())
        made.cleanup.close()
        assert [type(server) for server in made.generator.servers] == [kind]


def test_what_cannot_be_sent_is_refused(model, double, tmp_path):
    def refused(said, url=double.url, **more):
        generation = {"name": "server", "urls": [url], "transfer": "nccl"} | more
        with pytest.raises(gw.errors.ConfigError, match=said):
            train(copying(), model, tmp_path / "run", generation=generation)

    refused("sends weights from a GPU, got device='cpu'; fix: transfer='folder'")
    with SGLangDouble(model) as other:
        refused("sends weights to vLLM, got http", other.url)
    refused("max_staleness=1, expected None and 0", max_staleness=1)
    with pytest.raises(gw.errors.ConfigError, match="python='py' and max_staleness=0, expected None and 0"):
        gw.TextRunCfg(generation={"name": "server", "python": "py", "transfer": "nccl"})
    double.config["lora_config"] = {"max_lora_rank": 16}
    adapted = CausalLM(with_adapters(tiny_model(), gw.config.LoRACfg(r=2)))
    cfg = gw.TextRunCfg(generation={"name": "server", "urls": [double.url], "transfer": "nccl"})
    with pytest.raises(gw.errors.ConfigError, match="sends weights of whole models, got adapters"):
        connect(cfg, adapted, Engine())
