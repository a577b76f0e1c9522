import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EOS, FAMILIES, tiny_model

from groupwise.errors import DataError
from groupwise.policies import decoding
from groupwise.policies.causal_lm import CausalLM
from groupwise.policies.configs import SamplingCfg
from groupwise.policies.decoding import complete
from groupwise.policies.drawing import pick

PROMPTS = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15]]


def seeds(count, group_size=1, first=0):
    return torch.arange(first, first + count * group_size).view(count, group_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_completions_are_those_of_the_models_own_generation(family):
    model = tiny_model(family)
    policy = CausalLM(model, SamplingCfg(max_new_tokens=80))
    ours = complete(policy, PROMPTS, seeds(3), deterministic=True)
    for prompt, (completion,) in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=80)
        assert completion.tokens == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_a_full_forward_at_the_temperature(family):
    model = tiny_model(family)
    policy = CausalLM(model, SamplingCfg(temperature=1.7, max_new_tokens=70))
    for prompt, group in zip(PROMPTS, complete(policy, PROMPTS, seeds(3, 4)), strict=True):
        for completion in group:
            logits = model(input_ids=torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
            expected = torch.distributions.Categorical(logits=logits / 1.7).log_prob(torch.tensor(completion.tokens))
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=1e-4, atol=1e-5)


def test_a_completion_ends_with_the_first_end_of_text_or_at_the_limit():
    policy = CausalLM(tiny_model(), SamplingCfg(max_new_tokens=30))
    completions = [c for group in complete(policy, PROMPTS, seeds(3, 16)) for c in group]
    assert {c.stop for c in completions} == {"eos", "length"}
    for c in completions:
        assert len(c.tokens) == len(c.log_probs) <= 30
        assert EOS not in c.tokens[:-1]
        assert (c.tokens[-1] == EOS) == (c.stop == "eos")
        assert c.stop == "eos" or len(c.tokens) == 30


def test_a_rows_completion_follows_from_its_seed_whatever_else_is_written():
    policy = CausalLM(tiny_model(), SamplingCfg(max_new_tokens=40))
    together = complete(policy, PROMPTS, seeds(3, 4))
    for number, prompt in enumerate(PROMPTS):
        for member in range(4):
            ((alone,),) = complete(policy, [prompt], torch.tensor([[4 * number + member]]))
            assert alone.tokens == together[number][member].tokens
    other = complete(policy, PROMPTS, seeds(3, 4, first=100))
    assert all(a.tokens != b.tokens for g, h in zip(together, other, strict=True) for a, b in zip(g, h, strict=True))


def test_tokens_are_drawn_as_often_as_they_are_likely():
    policy = CausalLM(tiny_model(), SamplingCfg(max_new_tokens=1, temperature=0.3))
    (group,) = complete(policy, [[5, 6]], seeds(1, 20_000))
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in group]), minlength=40) / 20_000
    p = (policy.model(input_ids=torch.tensor([[5, 6]])).logits[0, -1] / 0.3).softmax(dim=-1)
    # five standard errors of a frequency, for each of the 40 tokens
    assert ((counts - p).abs() < 5 * (p * (1 - p) / 20_000).sqrt() + 1e-6).all()


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(any), st.floats(0, 1, exclude_max=True))
def test_a_token_of_no_probability_is_never_drawn(weights, number):
    probability = torch.tensor([weights])
    token = pick(probability, torch.tensor([number]))
    assert probability[0, token] > 0


def test_caches_grow_in_place_and_lose_rows():
    torch.manual_seed(0)
    states = torch.randn(3, 2, 150, 4)
    layer = decoding.RoomyLayer(states[:, :, :5], states[:, :, :5])
    copies = 0
    for i in range(5, 150):
        before = layer.keys.data_ptr()
        keys, values = layer.update(states[:, :, i : i + 1], states[:, :, i : i + 1])
        copies += layer.keys.data_ptr() != before
        assert torch.equal(keys, states[:, :, : i + 1])
        assert torch.equal(values, keys)
        assert layer.get_seq_length() == i + 1
    assert copies == 3  # 145 more tokens in rooms of 64
    layer.batch_select_indices(torch.tensor([2, 0]))
    keys, _ = layer.update(states[:2, :, :1], states[:2, :, :1])
    assert torch.equal(keys[:, :, :-1], states[[2, 0]])


def test_an_empty_prompt_is_refused():
    with pytest.raises(DataError, match="prompt 1 has no tokens"):
        complete(CausalLM(tiny_model()), [[5], []], seeds(2))
