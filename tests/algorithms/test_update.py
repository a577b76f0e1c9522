"""What one update does, for PPO and GRPO on the same made-up rollout."""

import copy
import math

import numpy as np
import pytest
import torch
from small_updates import ACT, GRPO_SHAPES, OBS, build, make_policy, make_rollout, parameters, updated

from groupwise.config.algorithm import CreditCfg, ObjectiveCfg
from groupwise.config.policy import PolicyCfg
from groupwise.data.rollout import transition_view
from groupwise.errors import ConfigError, DataError, UnknownNameError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.speed.control import flat_adam


@pytest.mark.parametrize("normalize", ["none", "batch", "minibatch"])
def test_micro_batches_never_change_ppos_gradient(normalize):
    cfg = {
        "minibatch_size": 25,
        "num_epochs": 2,
        "ent_coef": 0.01,
        "normalize_advantage": normalize,
        "clip_range_vf": 0.2,
    }
    whole, _ = updated("ppo", **cfg)
    cut, _ = updated("ppo", micro_batch_size=7, **cfg)
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_row_order_and_padding_never_change_the_gradient(kind):
    algorithm = build(kind)
    rollout = make_rollout(algorithm.policy)
    whole, _ = updated(kind, rollout)
    order = torch.randperm(rollout.shape[0], generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(updated(kind, rollout[order])[0], whole, atol=1e-6, rtol=1e-5)
    empty = torch.zeros_like(rollout[:, :5])
    empty["group_id"].fill_(-1), empty["episode_id"].fill_(-1)
    torch.testing.assert_close(updated(kind, torch.cat([rollout, empty], dim=1))[0], whole, atol=1e-6, rtol=1e-5)


def test_no_step_is_taken_on_nothing():
    # 16 whole episodes fill 16 minibatches, however many were asked for; momentum would move on in empty ones
    objective = ObjectiveCfg(aggregation="seq_mean_token_mean")
    _, metrics = updated("grpo", objective=objective, minibatch_size=1, optimizer="adam")
    assert metrics["train/optimizer_steps"] == 16


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_the_first_minibatch_has_ratio_one(kind):
    _, metrics = updated(kind, objective=ObjectiveCfg(old_log_prob="sampled"))
    assert metrics["train/clip_fraction"] == 0
    assert abs(metrics["train/approx_kl"]) < 1e-7
    _, later = updated(kind, num_epochs=3)
    assert later["train/approx_kl"] > 1e-6


def test_normalisation_keeps_the_ratio_at_one_and_learns_afterwards():
    policy = make_policy(True, normalize_obs=True, normalize_reward=True)
    algorithm = build("grpo", policy=policy)
    for seed in range(2):
        rollout = make_rollout(policy, seed=seed)
        before = policy.act(rollout["obs"][:, 0], deterministic=True).log_prob
        assert abs(algorithm.update(rollout)["train/approx_kl"]) < 1e-7
        assert not torch.equal(policy.act(rollout["obs"][:, 0], deterministic=True).log_prob, before)


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_training_inside_autocast_which_keeps_copies_of_weights_is_refused(kind):
    algorithm = build(kind)
    rollout = make_rollout(algorithm.policy)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigError, match=r"inside torch\.autocast.*train outside"),
    ):
        algorithm.update(rollout)
    assert algorithm.update(rollout)["train/optimizer_steps"] > 0


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_update_does_not_write_into_the_rollout(kind):
    algorithm = build(kind, num_epochs=2, minibatch_size=20)
    rollout = make_rollout(algorithm.policy)
    before = {key: (tensor._version, tensor.clone()) for key, tensor in rollout.items()}
    algorithm.update(rollout)
    for key, (version, copied) in before.items():
        assert rollout[key]._version == version, key
        torch.testing.assert_close(rollout[key], copied, equal_nan=True)


def test_ppo_gradient_is_that_of_the_loss_written_out():
    algorithm = build("ppo", ent_coef=0.02, vf_coef=0.7, gamma=0.9, gae_lambda=0.8, normalize_advantage="none")
    policy, rollout = copy.deepcopy(algorithm.policy), make_rollout(algorithm.policy)
    algorithm.update(rollout)
    # generalised advantage of every episode, backwards, in plain Python
    loss, count = torch.zeros(()), 0
    for row in rollout:
        for episode in row["episode_id"].unique().tolist():
            steps = (row["episode_id"] == episode).nonzero()[:, 0].tolist()
            running = 0.0
            for t in reversed(steps if episode >= 0 else []):
                bootstrap = 0.0 if row["terminated"][t] else 0.9 * float(row["next_value"][t])
                delta = float(row["reward"][t]) + bootstrap - float(row["value"][t])
                running = delta + 0.72 * running * (t != steps[-1])
                scores = policy.evaluate({"obs": row["obs"][t : t + 1], "action": row["action"][t : t + 1]})
                target = running + float(row["value"][t])
                loss = loss - (scores.log_prob[0] - row["sample_log_prob"][t]).exp() * running
                loss = loss + 0.7 * (scores.value[0] - target) ** 2 - 0.02 * scores.entropy[0]
                count += 1
    (loss / count).backward()
    expected = torch.cat([(p - 0.5 * p.grad).detach().flatten() for p in policy.parameters()])
    torch.testing.assert_close(parameters(algorithm), expected, atol=1e-5, rtol=1e-4)


def test_grpo_gradient_is_that_of_the_paper_written_out():
    # one row an episode here: outcomes, group mean and deviation, mean over episodes of the mean over steps, k3
    objective = ObjectiveCfg(aggregation="seq_mean_token_mean")
    algorithm = build("grpo", kl_coef=0.3, objective=objective)
    with torch.no_grad():
        for p in algorithm.policy.parameters():
            p.add_(0.1)
    policy, rollout = copy.deepcopy(algorithm.policy), make_rollout(algorithm.policy)
    reference = make_policy(True)
    algorithm.update(rollout)
    episodes = {}
    for row in rollout:
        for episode in row["episode_id"].unique().tolist():
            if episode >= 0:
                episodes[episode] = row[row["episode_id"] == episode]
    outcomes = {i: float(e["reward"].sum()) for i, e in episodes.items()}
    loss = torch.zeros(())
    for i, e in episodes.items():
        group = [outcomes[j] for j, other in episodes.items() if other["group_id"][0] == e["group_id"][0]]
        advantage = (outcomes[i] - np.mean(group)) / (np.std(group, ddof=1) + 1e-4)
        new, ref = (p.evaluate({"obs": e["obs"], "action": e["action"]}).log_prob for p in (policy, reference))
        ratio = (new - e["sample_log_prob"]).exp()
        gap = ref.detach() - new
        loss = loss + (-ratio * float(advantage) + 0.3 * (gap.exp() - gap - 1)).mean() / len(episodes)
    loss.backward()
    expected = torch.cat([(p - 0.5 * p.grad).detach().flatten() for p in policy.parameters()])
    torch.testing.assert_close(parameters(algorithm), expected, atol=1e-5, rtol=1e-4)


def test_no_reference_without_kl_and_an_exact_one_with_it():
    assert build("grpo").reference is None
    for estimator in ("k1", "k2", "k3", "exact"):
        algorithm = build("grpo", kl_coef=0.1, num_epochs=3, kl_estimator=estimator)
        rollout = make_rollout(algorithm.policy)
        first = algorithm.update(rollout)["train/kl"]
        # the first pass is at distance 0, later ones are not
        assert abs(first) > 1e-9
        assert all(not p.requires_grad for p in algorithm.reference.parameters())


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ({}, [0.0, 0.0]),
        ({"sync_ref_model": {"steps": 2}}, [0.0, 1.0]),
        ({"sync_ref_model": {"mixup_alpha": 0.25}}, [0.25, None]),
    ],
)
def test_reference_renewal(reference, expected):
    algorithm = build("grpo", kl_coef=1e-9, **reference)
    start = parameters(algorithm)
    for share in expected:
        algorithm.update(make_rollout(algorithm.policy))
        now = torch.cat([p.flatten() for p in algorithm.reference.parameters()])
        if share is not None:
            torch.testing.assert_close(now, torch.lerp(start, parameters(algorithm), share))


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_target_kl_ends_the_update(kind):
    settings = {"num_epochs": 20, "learning_rate": 2.0, "max_grad_norm": 0.5}  # unclipped, PPO diverges
    _, free = updated(kind, **settings)
    _, limited = updated(kind, **settings, target_kl=1e-4)
    assert limited["train/optimizer_steps"] < free["train/optimizer_steps"] == 20


def test_a_sampler_that_is_too_far_for_any_step_is_measured():
    rollout = make_rollout(make_policy(True)).clone()
    rollout["sample_log_prob"] -= 0.5 * torch.randn(rollout["sample_log_prob"].shape)
    _, free = updated("grpo", rollout)
    _, limited = updated("grpo", rollout, target_kl=1e-4)
    assert limited["train/optimizer_steps"] == 0
    assert limited["rollout/sampler_kl"] == limited["train/approx_kl"] == pytest.approx(free["rollout/sampler_kl"])
    assert limited["rollout/sampler_kl"] > 0.01


def test_gradient_clipping_bounds_the_step():
    rollout = make_rollout(make_policy(False))
    start = parameters(build("ppo"))
    after, metrics = updated("ppo", rollout, max_grad_norm=0.01, learning_rate=1.0)
    assert metrics["train/grad_norm"] > 0.01
    torch.testing.assert_close((after - start).norm(), torch.tensor(0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("kind", "fast"), [("ppo", {}), ("ppo", {"optimizer": flat_adam}), ("grpo", {})])
def test_state_goes_on_where_it_was(kind, fast):
    cfg = {"optimizer": "adam", "minibatch_size": 20, "num_epochs": 2, "learning_rate": 1e-2, "fast": fast}
    if kind == "grpo":
        cfg |= {"kl_coef": 0.1, "sync_ref_model": {"mixup_alpha": 0.6}, "ent_coef": 0.01}
    one = build(kind, **cfg)
    rollouts = [make_rollout(one.policy, seed=s) for s in range(3)]
    one.update(rollouts[0])
    two = build(kind, policy=copy.deepcopy(one.policy), **cfg)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for algorithm in (one, two):
        algorithm.update(rollouts[1])
        algorithm.update(rollouts[2])
    assert torch.equal(parameters(one), parameters(two))


def test_compute_gae_takes_its_own_discount():
    algorithm = build("ppo", gamma=0.5)
    rollout = make_rollout(algorithm.policy)
    advantage, target = algorithm.compute_gae(rollout, 1.0, 1.0)
    batch = transition_view(rollout)
    # gamma = lambda = 1: the target at an episode's start is its whole return, plus the last value where truncated
    row = batch[1]
    first = row["episode_id"] == row["episode_id"][0]
    end = int(first.sum()) - 1
    whole = row["reward"][first].sum() + (0 if row["terminated"][end] else row["next_value"][end])
    torch.testing.assert_close(target[1, 0], whole)
    torch.testing.assert_close(advantage, target - batch["value"])


def test_errors():
    with pytest.raises(ConfigError, match="actor_only=False"):
        build("ppo", policy=make_policy(True))
    with pytest.raises(ConfigError, match="max_length"):
        build("grpo", objective=ObjectiveCfg(aggregation="constant"))
    with pytest.raises(UnknownNameError, match="did you mean 'composed'"):
        build("grpo", credit=CreditCfg(rule="composd"))
    algorithm = build("ppo")
    with pytest.raises(DataError, match="no 'value'"):
        algorithm.update(make_rollout(make_policy(True)))
    with pytest.raises(DataError, match="no 'next_value'"):
        algorithm.compute_gae(make_rollout(algorithm.policy).exclude("next_value"), 1.0, 1.0)


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_flat_transitions_are_refused(kind):
    algorithm = build(kind)
    flat = transition_view(make_rollout(algorithm.policy)).reshape(-1)
    with pytest.raises(DataError, match=r"is \[96\]; expected \[N, T\+1\]; fix: no flatten=True"):
        algorithm.update(flat)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
@pytest.mark.parametrize("empty", ["skipped", "dead"])
def test_a_rollout_in_which_no_step_counts_changes_nothing(name, empty):
    policy = make_policy(name == "grpo")
    algorithm = build(name, policy=policy)
    rollout = make_rollout(policy).clone()
    rollout["loss_mask"].fill_(False)
    if empty == "dead":
        rollout["valid"].fill_(False)
        rollout["group_id"].fill_(-1)
        rollout["episode_id"].fill_(-1)
    before = parameters(algorithm)
    metrics = algorithm.update(rollout)
    assert torch.equal(parameters(algorithm), before)
    assert metrics["train/optimizer_steps"] == 0
    assert all(math.isfinite(number) for number in metrics.values())
    assert algorithm.iteration == 1


AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]
AGGREGATIONS += [{"name": name, "max_length": 7} for name in ("constant", "seq_mean_token_sum_norm")]


@pytest.mark.parametrize("micro", [None, 14])
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_the_logged_loss_is_the_one_that_is_minimised(monkeypatch, kind, aggregation, micro):
    minimised, backward = [], torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: (minimised.append(loss.item()), backward(loss)))
    settings = {"objective": {"aggregation": aggregation}, "num_epochs": 2, "minibatch_size": 40}
    settings |= {"micro_batch_size": micro} | ({"ent_coef": 0.0, "vf_coef": 0.7} if kind == "ppo" else {})
    algorithm = build(kind, **settings)
    metrics = algorithm.update(make_rollout(algorithm.policy))
    expected = sum(minimised) / float(metrics["train/optimizer_steps"])
    assert metrics["train/optimizer_steps"] > 2
    assert abs(expected) > 1e-4
    torch.testing.assert_close(float(metrics["train/loss"]), expected, rtol=1e-4, atol=1e-6)
    parts = metrics["train/policy_loss"] + 0.7 * metrics.get("train/value_loss", 0)
    torch.testing.assert_close(metrics["train/loss"], parts, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ids", ["own", "none"])
def test_grpo_refuses_a_rollout_without_groups(ids):
    rollout = make_rollout(make_policy(True)).clone()
    rollout["group_id"] = rollout["episode_id"] if ids == "own" else torch.full_like(rollout["group_id"], -1)
    before = build("grpo")
    with pytest.raises(
        DataError, match=r"no group .* has two members \(16 episodes, (16|0) groups\).*fix: .*GroupCollector"
    ):
        before.update(rollout)
    # this one compares with other groups
    credit = {"baseline": "none", "scale": "none", "normalize": "batch"}
    if ids == "own":
        assert updated("grpo", rollout, credit=credit)[1]["train/grad_norm"] > 0


@pytest.mark.parametrize("placement", ["reward", "advantage"])
def test_without_a_weight_the_place_of_the_kl_changes_nothing(placement):
    rollout = make_rollout(make_policy(True))
    expected, _ = updated("grpo", rollout)
    assert torch.equal(updated("grpo", rollout, credit={"kl_placement": placement})[0], expected)


def test_a_group_whose_rewards_come_in_another_order_has_no_variance():
    rollout = make_rollout(make_policy(True)).clone()
    rewards = torch.tensor([[0.2, 1.9, 0.1], [0.1, 0.2, 1.9], [1.9, 0.1, 0.2]])
    assert len({float(first + second + third) for first, second, third in rewards.unbind(0)}) > 1
    at = torch.arange(3)
    for episode in range(16):
        row, column = (index[0] for index in torch.where(rollout["episode_id"] == episode))
        rollout["reward"][row, rollout["episode_id"][row] == episode] = 0.0
        rollout["reward"][row, column + at] = rewards[episode % 3]
    metrics = updated("grpo", rollout, credit={"eps": 1e-6})[1]
    assert metrics["rollout/zero_variance_groups"] == 1.0
    assert metrics["train/optimizer_steps"] == 0


def test_zero_variance_groups_are_counted():
    rollout = make_rollout(make_policy(True)).clone()
    reward = torch.zeros_like(rollout["reward"])
    reward[rollout["step"] == 0] = 1.0
    rollout["reward"] = torch.where(rollout["valid"], reward, 0.0)
    assert updated("grpo", rollout)[1]["rollout/zero_variance_groups"] == 1.0
    # one member of one of the four groups does better
    rollout["reward"][0, 0] = 2.0
    assert updated("grpo", rollout)[1]["rollout/zero_variance_groups"] == 0.75


class RowPolicy(ActorCritic):
    """Scores whole rows at once, as sequence models do, and makes no sense of padding."""

    scored_by = "row"

    def evaluate(self, batch):
        flat = super().evaluate({k: batch[k].flatten(0, 1) for k in ("obs", "action")})
        padding = ~batch["loss_mask"]
        log_prob, entropy = (x.view(padding.shape).masked_fill(padding, torch.nan) for x in flat[:2])
        dist = flat.dist.view(*padding.shape, -1).masked_fill(padding[..., None], torch.nan)
        return flat._replace(log_prob=log_prob, entropy=entropy, dist=dist)


@pytest.mark.parametrize("micro", [None, 14])
@pytest.mark.parametrize("objective", [*GRPO_SHAPES, {"old_log_prob": "recomputed"}])
def test_scoring_by_row_or_by_step_is_the_same_update(objective, micro):
    torch.manual_seed(0)
    rows = RowPolicy(OBS, ACT, PolicyCfg(hidden_sizes=(8,)), actor_only=True)
    steps = make_policy(True)
    rows.load_state_dict(steps.state_dict())
    estimator = "k3" if objective else "exact"
    cfg = {"kl_coef": 0.1, "kl_estimator": estimator, "objective": ObjectiveCfg(**objective)}
    rollout = make_rollout(steps)
    by_row, _ = updated("grpo", rollout, policy=rows, micro_batch_size=micro, **cfg)
    by_step, _ = updated("grpo", rollout, policy=steps, **cfg)
    torch.testing.assert_close(by_row, by_step, atol=1e-6, rtol=1e-5)


def test_a_policy_in_training_mode_is_scored_without_dropout():
    torch.manual_seed(0)
    actor = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    policy = ActorCritic(OBS, ACT, actor=actor, actor_only=True).train()
    algorithm = build("grpo", policy=policy)
    assert abs(algorithm.update(make_rollout(policy))["train/approx_kl"]) < 1e-7


def test_a_mixed_reference_has_mixed_statistics_too():
    policy = make_policy(True, normalize_obs=True)
    algorithm = build("grpo", policy=policy, kl_coef=1e-9, sync_ref_model={"mixup_alpha": 0.25})
    before = {name: buffer.clone() for name, buffer in algorithm.reference.named_buffers()}
    algorithm.update(make_rollout(policy))
    for name, buffer in algorithm.reference.named_buffers():
        target = dict(policy.named_buffers())[name]
        if buffer.is_floating_point():
            torch.testing.assert_close(buffer, torch.lerp(before[name], target, 0.25))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 0),
        ({"ent_coef": 0.01}, 3),
        ({"kl_coef": 0.1}, 3),
        ({"objective": {"trust_region": "kl_cov"}}, 0),  # every covariance is 0
        ({"objective": {"trust_region": "dppo"}}, 0),
        ({"objective": {"trust_region": {"name": "dppo", "pull": 0.1}}}, 3),
    ],
)
def test_a_rollout_of_equal_groups_takes_no_optimiser_step_unless_something_else_has_a_gradient(settings, steps):
    algorithm = build("grpo", num_epochs=3, optimizer="adam", **settings)
    rollout = make_rollout(algorithm.policy)
    algorithm.update(rollout)  # moments that would move the parameters on
    before = parameters(algorithm)
    equal = rollout.clone()
    equal["reward"].zero_()
    metrics = algorithm.update(equal)
    assert metrics["train/optimizer_steps"] == steps
    assert (metrics["train/grad_norm"] > 0) is (steps > 0)
    assert torch.equal(parameters(algorithm), before) is (steps == 0)


def test_an_update_of_equal_groups_alone_still_moves_the_normalisers():
    algorithm = build("grpo", policy=make_policy(True, normalize_obs=True))
    rollout = make_rollout(algorithm.policy).clone()
    rollout["reward"].zero_()
    counts = [name for name, _ in algorithm.policy.named_buffers() if name.endswith("count")]
    metrics = algorithm.update(rollout)
    assert metrics["train/optimizer_steps"] == 0
    assert metrics["train/grad_norm"] == 0
    assert all(algorithm.policy.get_buffer(name) > 0 for name in counts)
