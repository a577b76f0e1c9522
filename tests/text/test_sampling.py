"""Penalties, filters and draws of tokens, and scores under them."""

import math
from functools import partial

import pytest
import torch
from text_updates import rows_of, updated
from tiny_models import moved, tiny_model
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from groupwise.config.policy import MAX_KEPT, SamplingCfg
from groupwise.errors import ConfigError
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.generation import BLOCK, draw, kept_tokens, pick
from groupwise.text.policy import CausalLM
from groupwise.text.vocabulary import penalized, penalized_scores


def test_places_of_a_running_sum_by_hand():
    # the sum reaches 0.2, 0.2, 0.7, 1.0; a chance c asks for 1 - c
    probability = torch.tensor([[0.2, 0.0, 0.5, 0.3]]).expand(5, 4)
    chance = torch.tensor([0.0, 0.25, 0.35, 0.75, 0.85])
    assert pick(probability, chance).tolist() == [3, 3, 2, 2, 0]
    last = torch.zeros(3, 2000)
    last[:, 1999] = 1
    assert pick(last, torch.tensor([0.0, 0.5, 1 - 2.0**-24])).tolist() == [1999] * 3


@pytest.mark.parametrize("width", [8, BLOCK + 40])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_show_in_the_log_probability_of_their_row_alone(width, bad):
    logits = torch.zeros(2, width)
    expected = draw(logits, torch.tensor([0.3, 0.3]), SamplingCfg())
    logits[1, 5] = bad
    for sampling in (SamplingCfg(), SamplingCfg(top_k=3), SamplingCfg(top_p=0.5)):
        token, log_prob, _ = draw(logits, torch.tensor([0.3, 0.3]), sampling)
        assert 0 <= token[1] < width
        assert log_prob[1].isnan()
        assert log_prob[0].isfinite()
    assert draw(logits, torch.tensor([0.3, 0.3]), SamplingCfg())[0][0] == expected[0][0]


@pytest.mark.parametrize("width", [BLOCK, BLOCK + 1, 3 * BLOCK, 1000])
def test_wide_rows_are_looked_up_as_one_running_sum(width):
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(400, width, generator=generator) * (torch.rand(400, width, generator=generator) < 0.3)
    probability /= probability.sum(dim=1, keepdim=True)
    chance = torch.rand(400, generator=generator)
    summed = probability.double().cumsum(dim=1)
    place = pick(probability, chance)
    rows = torch.arange(400)
    assert (probability[rows, place] > 0).all()
    # what comes up to and with the place reaches 1 - chance, what comes before it does not, but for rounding
    assert (summed[rows, place] > 1 - chance - 1e-5).all()
    assert (summed[rows, place] - probability[rows, place] < 1 - chance + 1e-5).all()


def test_of_equally_likely_tokens_exactly_top_k_are_kept():
    logits = torch.zeros(50, 10)
    logits[:, 7] = 1.0
    before = logits.clone()
    token, log_prob, support = draw(logits, torch.arange(50) / 50, SamplingCfg(top_k=3))
    assert torch.equal(logits, before)
    assert support.shape == (50, 3)
    assert (support == 7).any(dim=1).all()
    assert (support[:, 1:] > support[:, :-1]).all()
    assert (support == token[:, None]).any(dim=1).all()
    # p = e / (e + 2) or 1 / (e + 2)
    torch.testing.assert_close(log_prob, torch.where(token == 7, 1.0, 0.0) - math.log(math.e + 2))
    token, log_prob, support = draw(torch.zeros(64, 4), torch.arange(64) / 64, SamplingCfg(top_k=50))
    assert support.tolist() == [[0, 1, 2, 3]] * 64
    assert set(token.tolist()) == {0, 1, 2, 3}
    torch.testing.assert_close(log_prob, torch.full((64,), -math.log(4)))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_p": 0.5}, [0.5]),
        ({"top_p": 0.51}, [0.5, 0.3]),
        ({"top_p": 0.85}, [0.5, 0.3, 0.15]),
        ({"min_p": 0.25}, [0.5, 0.3, 0.15]),
        ({"min_p": 0.5}, [0.5, 0.3]),
        ({"top_p": 0.9, "min_p": 0.5}, [0.5, 0.3]),
        ({"top_p": 0.6, "top_k": 2}, [0.5]),  # among two: 5/8 and 3/8
        ({}, [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_nucleus_by_hand(settings, kept):
    probability = torch.tensor([0.15, 0.5, 0.05, 0.3])
    token, log_prob, _ = draw(probability.log().expand(1000, 4), torch.arange(1000) / 1000, SamplingCfg(**settings))
    found = {round(probability[t].item(), 2): lp for t, lp in zip(token.tolist(), log_prob.tolist(), strict=True)}
    assert found == {p: pytest.approx(math.log(p / sum(kept)), abs=1e-5) for p in kept}


def test_penalties_by_hand():
    # token 0 is in the prompt, 1 and 2 were written, 3 is new
    logits = torch.tensor([[2.0, 2.0, -2.0, 2.0]], requires_grad=True)
    sampling = SamplingCfg(repetition_penalty=4.0, presence_penalty=0.25)
    found = penalized(logits, sampling, torch.tensor([[0, 1, 2, 2, -1]]), torch.tensor([[1, 2, 2, -1]]))
    assert found.tolist() == [[0.5, 0.25, -8.25, 2.0]]
    assert torch.autograd.grad(found.sum(), logits)[0].tolist() == [[0.25, 0.25, 4.0, 1.0]]


def test_penalty_and_filters_are_those_of_transformers():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 300, generator=generator)
    text = torch.randint(300, (50, 40), generator=generator)
    ours = penalized(logits, SamplingCfg(repetition_penalty=1.3), text, text[:, :0])
    torch.testing.assert_close(ours, RepetitionPenaltyLogitsProcessor(1.3)(text, logits.clone()))
    eos, sampling = torch.tensor([7, 9]), SamplingCfg(min_new_tokens=4)
    for length in (3, 4):  # of which 2 tokens are of the prompt
        least = MinNewTokensLengthLogitsProcessor(2, 4, eos.tolist(), "cpu")(text[:, : 2 + length], logits.clone())
        ours = penalized(logits, sampling, text, text[:, 2 : 2 + length], eos)
        assert ours[:, eos].lt(-1e20).all() == least[:, eos].isinf().all() == (length < 4)
        assert torch.equal(ours.softmax(dim=-1), least.softmax(dim=-1))
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    for filters in ({"top_k": 100}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.7, "min_p": 0.2}):
        scores = logits.clone()
        for name, value in filters.items():
            scores = warpers[name](value)(text, scores)
        expected = [row.isfinite().nonzero()[:, 0].tolist() for row in scores]
        kept = kept_tokens(logits, SamplingCfg(**filters)).tolist()
        assert [[token for token in row if token >= 0] for row in kept] == expected


def test_what_is_kept_is_bounded_and_never_empty():
    flat = torch.zeros(3, 5 * MAX_KEPT)
    assert kept_tokens(flat, SamplingCfg(top_p=0.9)).shape == (3, MAX_KEPT)
    assert kept_tokens(flat, SamplingCfg(min_p=0.5)).shape == (3, MAX_KEPT)
    assert kept_tokens(flat, SamplingCfg(top_p=1e-9)).shape == (3, 1)
    assert not SamplingCfg(top_p=1.0, min_p=0.0).has_filters


EOS = (3, 8)
SAMPLING = SamplingCfg(repetition_penalty=1.8, presence_penalty=0.7, temperature=0.8, top_p=0.9, min_new_tokens=2)
PROMPT, FIRST, TOOL, SECOND = [5, 6, 7], [9, 5, 9, 11], [20, 9], [11, 9, 13]


def dialogue(generator):
    """A row of two turns, with a random support of 3 to 8 tokens at each token of the model."""
    tokens, turn = FIRST + TOOL + SECOND, [0] * 4 + [-1] * 2 + [1] * 3
    support = []
    for token, number in zip(tokens, turn, strict=True):
        others = torch.randperm(40, generator=generator)[: int(torch.randint(3, 9, (), generator=generator))]
        support.append(torch.tensor([-1]) if number < 0 else torch.cat([others, torch.tensor([token])]).unique())
    return TextRow(PROMPT, tokens, [0.0] * 9, 1.0, True, 0, turn, support)


def plain_loop(model, row):
    """Log-probability and entropy of each token of the model: all logits, then the rules, one token after another."""
    logits = model(torch.tensor([[*row.prompt, *row.completion]])).logits[0, len(row.prompt) - 1 : -1]
    log_probs, entropies = [], []
    for i, (token, turn) in enumerate(zip(row.completion, row.turn, strict=True)):
        if turn < 0:
            continue
        text = {*row.prompt, *row.completion[:i]}
        written = [t for t, other in zip(row.completion[:i], row.turn[:i], strict=True) if other == turn]
        early = len(written) < SAMPLING.min_new_tokens
        scores = {}
        for other in (other for other in row.support[i].tolist() if not (early and other in EOS)):
            score = logits[i, other]
            if other in text:
                score = score / SAMPLING.repetition_penalty if score > 0 else score * SAMPLING.repetition_penalty
            scores[other] = (score - SAMPLING.presence_penalty * (other in written)) / SAMPLING.temperature
        p = torch.distributions.Categorical(logits=torch.stack([*scores.values()]))
        log_probs.append(p.log_prob(torch.tensor([*scores].index(token))))
        entropies.append(p.entropy())
    return torch.stack(log_probs), torch.stack(entropies)


@pytest.mark.parametrize("chunk", [2**22, 90])  # all tokens at once, or two of them
@pytest.mark.parametrize("head", ["trained", "frozen"])
def test_scores_and_gradients_are_those_of_a_plain_loop(head, chunk, monkeypatch):
    monkeypatch.setattr("groupwise.text.policy.penalized_scores", partial(penalized_scores, chunk_elements=chunk))
    model = moved(tiny_model(), 0.3)
    model.lm_head.weight.requires_grad_(head == "trained")
    generator = torch.Generator().manual_seed(0)
    rows = [dialogue(generator) for _ in range(3)]
    rollout = text_rollout(rows)
    policy = CausalLM(model, SAMPLING, eos_ids=EOS)
    ours = policy.evaluate(dict(rollout.items()))
    mask = rollout["loss_mask"]
    expected = [torch.cat(parts) for parts in zip(*(plain_loop(model, row) for row in rows), strict=True)]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weight = torch.randn(len(expected[0]), generator=generator)
    for found, wanted in zip((ours.log_prob[mask], ours.entropy[mask]), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        both = ((weight * scores).sum() for scores in (found, wanted))
        gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in both]
        assert any(gradient.abs().max() > 0.1 for gradient in gradients[1])
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_no_token_in_the_mask_has_no_scores():
    policy = CausalLM(tiny_model(), SAMPLING, eos_ids=(3,))
    batch = dict(text_rollout([dialogue(torch.Generator())]).items())
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    assert not policy.evaluate(batch).log_prob.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0: .*greater than 0"),
        ({"presence_penalty": math.nan}, "presence_penalty = nan: .*finite number"),
        ({"frequency_penalty": 1.0}, "unknown key 'frequency_penalty'"),
        ({"min_new_tokens": 65}, "min_new_tokens=65 > max_new_tokens=64; fix: "),
    ],
)
def test_penalties_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SamplingCfg(**settings)


def test_what_was_kept_stays_kept_when_the_policy_changes():
    policy = CausalLM(moved(tiny_model(), 0.3), SamplingCfg(top_p=0.3, max_new_tokens=12), eos_ids=(3,))
    rollout = text_rollout(rows_of(policy, [[5, 6, 7]], torch.arange(8)[None], lambda _, tokens: float(sum(tokens))))
    settings = {"group_size": 8, "num_epochs": 20, "learning_rate": 1e-2, "max_grad_norm": 100.0}
    _, metrics = updated(policy, rollout, **settings)
    assert metrics["train/approx_kl"] > 0.01
    mask = rollout["loss_mask"]
    with torch.no_grad():
        changed = policy.evaluate(dict(rollout.items())).log_prob[mask]
        logits = policy.model(rollout["obs"]).logits[mask]
    now = kept_tokens(logits, policy.sampling)
    assert not (now == rollout["action"][mask][:, None]).any(dim=1).all()  # some left the nucleus of the new policy
    assert changed.isfinite().all()
    assert changed.min() > -20
