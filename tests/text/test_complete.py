import pytest
import torch
from tiny_models import EOS, FAMILIES, tiny_model
from tiny_tokenizers import tiny_tokenizer

from groupwise.algorithms.grpo import GRPO
from groupwise.config.algorithm import GRPOCfg
from groupwise.config.policy import SamplingCfg
from groupwise.errors import DataError
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.generation import DecodingState, complete
from groupwise.text.policy import CausalLM

PROMPTS = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15]]


def seeds(count, group_size=1, first=0):
    return torch.arange(first, first + count * group_size).view(count, group_size)


@pytest.mark.slow
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


def test_completions_can_be_had_before_they_are_finished():
    writing = DecodingState(torch.arange(3), SamplingCfg(max_new_tokens=6), [3])
    logits = torch.full((3, 8), -10.0)
    logits[:, 5] = 10
    writing.write(logits)
    logits[1, 3] = 30
    writing.write(logits)
    assert [c.tokens for c in writing.completions()] == [[5, 5], [5, 3], [5, 5]]


def test_an_empty_prompt_is_refused():
    with pytest.raises(DataError, match="prompt 1 has no tokens"):
        complete(CausalLM(tiny_model()), [[5], []], seeds(2))


def written(texts, sampling, tokenizer):
    """What becomes of the texts when the model's logits leave it no choice but their tokens."""
    scripts = [tokenizer(text)["input_ids"] for text in texts]
    writing = DecodingState(torch.arange(len(texts)), sampling, [EOS], tokenizer)
    for step in range(sampling.max_new_tokens):
        logits = torch.full((len(writing.running), len(tokenizer)), -60.0)
        for place, row in enumerate(writing.running.tolist()):
            logits[place, scripts[row][step]] = 60.0
        writing.write(logits)
        if not len(writing.running):
            break
    return writing.completions()


def test_stop_strings_end_a_text_at_the_token_that_completes_them():
    tokenizer = tiny_tokenizer()
    texts = ["the café is shut, so what", "an answer</answer> and more text", "an answer it is", "abcabd"]
    first, second, third, fourth = written(texts, SamplingCfg(max_new_tokens=6, stop=("fé", "</answer>")), tokenizer)
    assert {c.stop for c in (first, second, third, fourth)} == {"length"}
    long = SamplingCfg(max_new_tokens=12, stop=("é", "r</a"))
    first, second, third, fourth = written([t + 20 * "x" for t in texts], long, tokenizer)
    assert (first.stop, tokenizer.decode(first.tokens)) == ("stop", "the café")  # é is two tokens
    assert second.stop == "stop"
    assert "r</a" in tokenizer.decode(second.tokens)
    assert "r</a" not in tokenizer.decode(second.tokens[:-1])
    assert third.stop == fourth.stop == "length"


def test_first_bytes_of_a_character_do_not_hide_or_feign_a_stop_string():
    tokenizer = tiny_tokenizer()
    # before the last of the three bytes the text reads as another character
    (c,) = written(["€€€€"], SamplingCfg(max_new_tokens=12, stop=("€€",)), tokenizer)
    assert (c.stop, len(c.tokens)) == ("stop", 6)


def test_a_stop_string_far_into_a_text_is_found_without_reading_all_of_it_again():
    tokenizer, read = tiny_tokenizer(), []
    decode = tokenizer.decode
    tokenizer.decode = lambda tokens, **how: read.append(len(tokens)) or decode(tokens, **how)
    text = 40 * "€q " + "€end and on"
    (c,) = written([text], SamplingCfg(max_new_tokens=240, stop=("€end",)), tokenizer)
    assert c.stop == "stop"
    assert decode(c.tokens) == 40 * "€q " + "€end"
    assert max(read) <= 4 * len("€end") + 8


def test_the_end_of_text_goes_before_a_stop_string_that_it_completes():
    tokenizer = tiny_tokenizer()
    (c,) = written(["a<|im_end|>"], SamplingCfg(max_new_tokens=2, stop=("<|im_end|>",)), tokenizer)
    assert (c.stop, c.tokens[-1]) == ("eos", EOS)


CHOICES = [
    SamplingCfg(temperature=0.7, top_k=4, max_new_tokens=12),
    SamplingCfg(top_k=2, max_new_tokens=12),
    SamplingCfg(top_p=0.6, max_new_tokens=12),
    SamplingCfg(min_p=0.2, top_p=0.9, max_new_tokens=12),
    SamplingCfg(repetition_penalty=1.5, presence_penalty=-1.0, temperature=0.7, max_new_tokens=12),
    SamplingCfg(repetition_penalty=0.7, presence_penalty=2.0, top_p=0.8, max_new_tokens=12),
]


@pytest.mark.parametrize("sampling", CHOICES, ids=str)
@pytest.mark.parametrize("old", ["sampled", "recomputed"])
def test_the_ratio_is_one_under_the_distribution_that_was_sampled(sampling, old):
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # so that what is left out matters
    policy = CausalLM(model, sampling, eos_ids=(3,))
    rows = [
        TextRow(prompt, c.tokens, c.log_probs, float(c.tokens[0] % 5), c.stop == "eos", number, None, c.support)
        for number, (prompt, group) in enumerate(zip(PROMPTS, complete(policy, PROMPTS, seeds(3, 4)), strict=True))
        for c in group
    ]
    rollout = text_rollout(rows)
    mask = rollout["loss_mask"]
    scores = policy.evaluate(dict(rollout.items()))
    torch.testing.assert_close(scores.log_prob[mask], rollout["sample_log_prob"][mask], rtol=1e-4, atol=1e-4)
    free = {key: value for key, value in rollout.items() if key != "support"}
    everything = CausalLM(model, SamplingCfg(temperature=sampling.temperature)).evaluate(free)
    assert (everything.log_prob[mask] - rollout["sample_log_prob"][mask]).abs().max() > 0.1
    cfg = GRPOCfg(group_size=4, num_epochs=1, minibatch_size=10_000, objective={"old_log_prob": old})
    metrics = GRPO(cfg, policy).update(rollout)
    assert metrics["train/approx_kl"].item() == pytest.approx(0, abs=1e-9)
    assert metrics["train/clip_fraction"].item() == 0
    assert metrics["train/grad_norm"].item() > 1e-3
