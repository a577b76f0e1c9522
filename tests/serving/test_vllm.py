"""The adapter against vLLM itself: ``make test-vllm``. Two servers start, one after the other, which takes minutes."""

import os
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from statistics import fmean

import pytest
import torch
from text_runs import copying, save_model, train

import groupwise as gw
from groupwise.config.policy import SamplingCfg
from groupwise.serving import HttpClient, LocalServer, VLLMServer, command
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.load import load_causal_lm
from groupwise.text.policy import CausalLM
from groupwise.text.served import ServedGenerator

PYTHON = os.environ.get("GROUPWISE_VLLM_PYTHON", "")
pytestmark = [pytest.mark.skipif(not PYTHON, reason="run by make test-vllm"), pytest.mark.timeout(1200)]
PROMPTS = [[5, 6, 7], [9, 8], [4, 10, 11, 12, 13, 4, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 5, 6, 7]]
SEEDS = torch.arange(100, 124).view(3, 8)
CLOSE = 1e-5
"""Nats between the log-probabilities of vLLM and those of the trainer, in float32."""
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # vLLM's attention for CPUs has no heads of fewer than 32 dimensions
    return save_model(tmp_path_factory.mktemp("lm") / "model", positions=2048, hidden_size=64, num_attention_heads=2)


@pytest.fixture(scope="module", params=[None, 8], ids=["whole", "adapters"])
def rank(request):
    return request.param


@pytest.fixture(scope="module")
def server(model, rank, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ON_CPU.items():
            patch.setenv(name, value)
        words = command(Path(PYTHON), str(model), ["--dtype", "float32", "--enforce-eager"], lora_rank=rank)
        local = LocalServer(words, tmp_path_factory.mktemp("server") / "log")
    try:
        local.wait()
        yield local
    finally:
        local.close()


@pytest.fixture
def generate(server, model, rank, tmp_path):
    return generator_of(server, model, rank, tmp_path)


def generator_of(server, model, rank, folder, **options):
    lora = None if rank is None else {"r": rank}
    policy = load_causal_lm(gw.ModelCfg(path=str(model), lora=lora), SamplingCfg(max_new_tokens=8))
    move(policy)
    client = HttpClient(server.url, timeout=60.0, retries=0)
    servers = [VLLMServer(client, adapters=rank is not None, **options)]
    return ServedGenerator(servers, policy, folder / "weights")


def move(policy, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def farthest(policy, written, sampling, weights=None):
    """The largest difference of log-probabilities to the trainer's own, among tokens that these weights wrote."""
    rows = [
        TextRow(prompt, c.tokens, c.log_probs, 0.0, c.stop != "length", number, policy_version=c.policy_version)
        for number, (prompt, group) in enumerate(zip(PROMPTS, written, strict=False))
        for c in group
    ]
    trainer = CausalLM(policy.model, sampling, tokenizer=policy.tokenizer)
    batch = text_rollout(rows)[:, :-1]
    with torch.no_grad():
        scored = trainer.evaluate(batch.to_dict()).log_prob
    mask = batch["loss_mask"] if weights is None else batch["policy_version"] == weights
    return (scored - batch["sample_log_prob"])[mask].abs().max().item()


SAMPLING = {
    "plain": SamplingCfg(max_new_tokens=8),
    "cold": SamplingCfg(max_new_tokens=8, temperature=0.6),
    "hot": SamplingCfg(max_new_tokens=8, temperature=1.5),
    "penalties": SamplingCfg(max_new_tokens=8, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4),
    "stop": SamplingCfg(max_new_tokens=8, stop=("3", "42")),
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_log_probs_are_the_trainers(generate, sampling):
    generate.update(0)
    written = generate(PROMPTS, SEEDS, sampling)
    assert farthest(generate.policy, written, sampling) < CLOSE
    decode = generate.policy.tokenizer.decode
    for c in (c for group in written for c in group):
        assert (c.tokens[-1] in generate.policy.eos_ids) == (c.stop == "eos")
        assert any(text in decode(c.tokens) for text in sampling.stop) == (c.stop == "stop")
    assert len({tuple(c.tokens) for c in written[0]}) > 4
    again = generate(PROMPTS, SEEDS, sampling)
    assert [[c.tokens for c in group] for group in again] == [[c.tokens for c in group] for group in written]


def test_new_weights_are_those_that_answer(generate):
    sampling = SAMPLING["plain"]
    for iteration in range(3):
        generate.update(iteration)
        assert farthest(generate.policy, generate(PROMPTS, SEEDS, sampling), sampling) < CLOSE
        move(generate.policy, seed=iteration + 2)
        assert farthest(generate.policy, generate(PROMPTS, SEEDS, sampling), sampling) > 0.01


def test_a_server_that_someone_else_gave_weights_gets_them_again(generate, model, rank, tmp_path):
    generate.update(0)
    generate.servers[0]._client.call("/update_weight_version", {"new_version": "of another run"})
    assert farthest(generate.policy, generate(PROMPTS, SEEDS, SAMPLING["plain"]), SAMPLING["plain"]) < CLOSE


def tokens_so_far(server):
    """That the server has generated."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def test_completions_that_run_go_on_under_new_weights(server, model, rank, tmp_path):
    if rank is not None:
        pytest.skip("vLLM reads the adapters that a request began with again")
    generate = generator_of(server, model, rank, tmp_path, in_flight_updates=True)
    sampling = SamplingCfg(max_new_tokens=1500)
    generate.policy.eos_ids = ()  # no completion ends before
    generate.update(0)
    old = deepcopy(generate.policy)
    move(generate.policy)
    generate.save(1)
    before = tokens_so_far(server)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, PROMPTS[:1], SEEDS[:1, :4], sampling)
        while tokens_so_far(server) < before + 40:
            time.sleep(0.01)
        generate.load(1)
        written = running.result()
    assert all(c.policy_version == sorted(c.policy_version) and set(c.policy_version) == {0, 1} for c in written[0])
    # float32 rounds more over 1,500 tokens
    assert farthest(old, written, sampling, weights=0) < 5 * CLOSE
    assert farthest(generate.policy, written, sampling, weights=1) < 5 * CLOSE
    assert farthest(generate.policy, written, sampling, weights=0) > 0.01


def sevens(completions, **columns):
    return [text.count("7") / 4 for text in completions]


@pytest.mark.parametrize(("staleness", "in_flight"), [(0, False), (1, False), (2, True)])
def test_training_on_it_learns(server, model, rank, tmp_path, staleness, in_flight):
    if in_flight and rank:
        pytest.skip("refused")
    objective = {"old_log_prob": "recomputed", "importance_sampling_correction": "tis"}
    cfg = gw.GRPOCfg(group_size=8, learning_rate=1e-2 if rank else 3e-3, objective=objective)
    settings = {"generation": {"name": "server", "urls": [server.url], "max_staleness": staleness}}
    settings["generation"]["in_flight_updates"] = in_flight
    settings |= {"total_steps": None, "total_iterations": 20, "sampler_mismatch": {"warn": 10, "stop": None}}
    settings |= {"lora": {"r": rank}} if rank else {}
    run = train(copying(reward=sevens), model, tmp_path / "run", cfg, **settings)
    metrics = run.metrics()
    rewards = [entry["rollout/return_mean"] for entry in metrics]
    worst = max(entry["rollout/sampler_kl"] for entry in metrics)
    assert worst < (0.5 if staleness else 1e-9)  # how far two updates move the policy
    ages = [entry.get("rollout/staleness", 0) for entry in metrics]
    assert max(ages) <= staleness if in_flight else ages == [min(number, staleness) for number in range(20)]
    assert fmean(rewards[-5:]) > rewards[0] + 0.08
