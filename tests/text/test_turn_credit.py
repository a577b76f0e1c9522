"""Updates on texts of several turns: what was answered trains nothing, ratios and credit of turns, layouts."""

import pytest
import text_updates
import torch
from credit_rollouts import credit, preset
from text_updates import SGD, flat
from tiny_models import tiny_model

from groupwise.config import load as presets
from groupwise.data.rollout import transition_view
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.policy import CausalLM

PRESETS = ["agilerl_turn", "agilerl_turn_ratio", "gspo", "grpo"]


def row(prompt, turns, reward, group=0, shift=()):
    """Turns of the model's and what it was answered, in turn; log-probabilities are the model's, less ``shift`` of each turn."""
    tokens = [token for part in turns for token in part]
    turn = [-1 if number % 2 else number // 2 for number, part in enumerate(turns) for _ in part]
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        scores = tiny_model()(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    exact = scores.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    shifts = [d for part in shift for d in part] or [0.0] * len(tokens)
    log_probs = [value - d if t >= 0 else 0.0 for value, d, t in zip(exact, shifts, turn, strict=True)]
    return TextRow(prompt, tokens, log_probs, reward, terminated=True, group=group, turn=turn)


def some_rows():
    first, second = [5, 6, 7], [9]
    return [
        row(first, [[10, 11], [20, 21, 22], [12, 3]], 1.0),
        row(first, [[10, 13, 11], [23], [14, 15, 3]], 0.0),
        row(first, [[16, 3]], 0.5),
        row(second, [[10], [20], [11], [21, 22], [12, 3]], 0.3, 1),
        row(second, [[17, 18, 3]], 0.7, 1),
        row(second, [[17], [24], [19, 3]], 0.1, 1),
    ]


def updated(rollout, name, **settings):
    chosen = SGD | presets.objective_preset(name).settings | {"group_size": 3}
    return text_updates.updated(CausalLM(tiny_model()), rollout, **chosen | settings)


@pytest.mark.parametrize("name", PRESETS)
def test_what_was_answered_has_neither_loss_nor_gradient(name):
    rollout = text_rollout(some_rows())
    answered = rollout["valid"] & (rollout["turn_id"] < 0)
    answered[:, 0] = False
    expected, metrics = updated(rollout, name, num_epochs=2)
    assert metrics["train/grad_norm"] > 1e-3
    changed = rollout.clone()
    changed["sample_log_prob"][answered] = -7.0
    assert torch.equal(updated(changed, name, num_epochs=2)[0], expected)
    # the test above would tell: the same change of tokens that were written changes the update
    changed = rollout.clone()
    changed["sample_log_prob"][rollout["loss_mask"]] -= 7.0
    assert not torch.equal(updated(changed, name, num_epochs=2)[0], expected)


@pytest.mark.parametrize("name", PRESETS)
def test_an_update_is_the_same_however_its_rows_are_laid_out(name):
    rows = some_rows()
    expected, _ = updated(rows, name)
    assert not torch.equal(expected, flat(tiny_model()))
    for other, size in ((rows, 8), ([rows[i] for i in (4, 1, 3, 0, 5, 2)], None)):
        torch.testing.assert_close(updated(other, name, micro_batch_size=size)[0], expected, rtol=1e-5, atol=1e-6)


def test_the_ratio_of_a_turn_is_the_mean_over_its_own_tokens():
    # the policy's log-probabilities less the sampler's; 9.0 stands where the model did not write
    rows = [
        row([5], [[10, 11], [20], [12, 3]], 1.0, shift=[[0.5, -0.5], [9.0], [1.0, 0.5]]),
        row([5], [[13, 3]], 0.0, shift=[[0.0, 0.0]]),
    ]
    # advantages .5 and -.5; turn 0 has ratio 1, turn 1 exp(.75), of which only 1.2 counts: two of six tokens are clipped
    _, turn = updated(text_rollout(rows), "agilerl_turn_ratio")
    assert turn["train/clip_fraction"] == pytest.approx(2 / 6)
    # over all six: (2 * .5 * 1 + 2 * .5 * 1.2 - 2 * .5 * 1) / 6, as a loss
    assert turn["train/policy_loss"] == pytest.approx(-1.2 / 6, abs=1e-5)
    # token by token, the ratios exp(.5) and exp(-.5) of turn 0 are out of range, too
    by_token = presets.objective_preset("agilerl_turn_ratio").settings["objective"] | {"ratio": "token"}
    _, token = updated(text_rollout(rows), "dr_grpo", objective=by_token)
    assert token["train/clip_fraction"] == pytest.approx(4 / 6)


def test_credit_of_a_turn_is_among_those_who_played_it():
    # turn 0 scores 0, 0 and 1 (a single turn has the reward): mean 1/3; turn 1 scores 1 and 0: mean 1/2
    rows = [
        row([5], [[10, 11], [20], [12, 3]], 1.0),
        row([5], [[13], [21, 22], [14, 15, 3]], 0.0),
        row([5], [[16, 3]], 1.0),
    ]
    batch = transition_view(text_rollout(rows))
    advantage = credit(batch, **preset("agilerl_turn"))
    third = 1 / 3
    expected = [
        [-third, -third, 0.0, 0.5, 0.5, 0.0],
        [-third, 0.0, 0.0, -0.5, -0.5, -0.5],
        [2 * third, 2 * third, 0.0, 0.0, 0.0, 0.0],
    ]
    torch.testing.assert_close(advantage * batch["loss_mask"], torch.tensor(expected))


def test_a_turn_that_one_member_played_has_its_episodes_advantage():
    rows = [row([5], [[10], [20], [12], [21], [13, 3]], 1.0), row([5], [[11], [20], [12, 3]], 0.0)]
    batch = transition_view(text_rollout(rows))
    advantage = credit(batch, **preset("agilerl_turn")) * batch["loss_mask"]
    # turns 0 and 1 have no reward; of turn 2 nobody else knows: .5 of the whole episode
    expected = [[0.0, 0.0, 0.0, 0.0, 0.5, 0.5], [0.0] * 6]
    torch.testing.assert_close(advantage, torch.tensor(expected))


@pytest.mark.parametrize("returns", ["turn", "turn_to_go", "outcome"])
def test_a_turn_that_earns_nothing_is_left_alone_where_turns_are_compared(returns):
    """The first turn decides; what the second says changes nothing."""
    turns = [[[10], [20], [12, 3]], [[11], [20], [13, 3]]]
    rows = [row([5], turns[0], [1.0, 0.0, 0.0, 0.0]), row([5], turns[1], [0.0] * 4)]
    settings = {"rule": "composed", "returns": returns, "baseline": "mean", "scale": "none"}
    settings |= {"group_key": "group"} if returns == "outcome" else {"group_key": "group_step"}
    batch = transition_view(text_rollout(rows))
    advantage = credit(batch, **settings) * batch["loss_mask"]
    later = 0.5 if returns == "outcome" else 0.0
    expected = torch.tensor([[0.5, 0.0, later, later], [-0.5, 0.0, -later, -later]])
    torch.testing.assert_close(advantage, expected)
