"""Groups that servers generate, beside those that the policy itself would."""

import torch
from tiny_models import moved

import groupwise as gw
from groupwise.config.policy import SamplingCfg
from groupwise.serving import HttpClient, VLLMServer
from groupwise.text.generation import complete
from groupwise.text.load import load_causal_lm
from groupwise.text.served import ServedGenerator

TASK = {"prompts": [[5, 6, 7], [9, 8], [4]], "seeds": torch.arange(100, 112).view(3, 4)}


def served(model, tmp_path, *doubles, timeout=20.0, retries=2, lora=None):
    """A generator of a policy that is not the one that the servers began with."""
    policy = load_causal_lm(gw.ModelCfg(path=str(model), lora=lora), SamplingCfg(max_new_tokens=4))
    moved(policy)
    clients = [HttpClient(double.url, timeout=timeout, retries=retries) for double in doubles]
    servers = [VLLMServer(client, adapters=policy.has_adapters) for client in clients]
    return ServedGenerator(servers, policy, tmp_path / "weights")


def native(policy, sampling, **how):
    """What the policy itself would write; a group's seeds follow from its first."""
    seeds = TASK["seeds"][:, :1] + torch.arange(4)
    return complete(policy, TASK["prompts"], seeds, sampling, **how)


def assert_alike(ours, theirs):
    assert [[(c.tokens, c.stop) for c in group] for group in ours] == [[(c.tokens, c.stop) for c in g] for g in theirs]
    numbers = [torch.tensor([p for group in groups for c in group for p in c.log_probs]) for groups in (ours, theirs)]
    torch.testing.assert_close(*numbers, rtol=1e-5, atol=1e-5)


SAMPLING = {
    "plain": SamplingCfg(max_new_tokens=4),
    "hot": SamplingCfg(max_new_tokens=4, temperature=1.7),
    "penalties": SamplingCfg(max_new_tokens=6, repetition_penalty=1.5, presence_penalty=0.5),
    "stop": SamplingCfg(max_new_tokens=6, stop=("3", "4")),
}
