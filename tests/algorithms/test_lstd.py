"""Values by least squares on random features: equal to the textbook's traces, near exact values, and what it refuses."""

import numpy as np
import pytest
import torch
from credit_rollouts import credit, rollout
from tensordict import TensorDict
from two_ranks import in_two_threads

import groupwise as gw
from groupwise.algorithms.advantages import random_features
from groupwise.errors import DataError

CREDIT = {"group_key": "group", "returns": "return_to_go", "scale": "none"}


def lstd(**settings):
    return CREDIT | {"baseline": {"name": "lstd"} | settings}


def random_episodes(seed=0, lengths=(5, 9, 7, 6, 8, 9, 5), ends=("truncated", "terminated")):
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(length, 3, generator=generator) for length in lengths]
    episodes = [(0, part[:, 0].tolist(), ends[i % len(ends)]) for i, part in enumerate(numbers)]
    return rollout(episodes, obs=[part[:, 1:].tolist() for part in numbers])


def features_of(obs, mask, number):
    obs = obs.double()
    return random_features(obs, obs[mask].mean(dim=0), obs[mask].square().mean(dim=0), number)


def by_traces(batch, gamma, gae_lambda, value_lambda, features, ridge, folds):
    """Advantages by the algorithm as it is printed: eligibility traces forward in time, one episode after another."""
    mask = batch["loss_mask"]
    phi = features_of(batch["obs"], mask, features).numpy()
    size = phi.shape[-1]
    lhs, rhs = np.zeros((folds, size, size)), np.zeros((folds, size))
    count = np.zeros(folds)
    steps = [int(row.sum()) for row in mask]
    after = np.zeros_like(phi)
    for row, length in enumerate(steps):
        part, z = row % folds, np.zeros(size)
        for t in range(length):
            z = gamma * value_lambda * z + phi[row, t]
            if batch["terminated"][row, t]:
                after[row, t] = 0
            else:
                after[row, t] = phi[row, t if batch["truncated"][row, t] else t + 1]
            lhs[part] += np.outer(z, phi[row, t] - gamma * after[row, t])
            rhs[part] += z * float(batch["reward"][row, t])
            count[part] += 1
    held_back = np.ones(size)
    held_back[-1] = 1e-3
    found = np.zeros(mask.shape)
    for row, length in enumerate(steps):
        others = [part for part in range(folds) if part != row % folds]
        held = lhs[others].sum(axis=0) + ridge * count[others].sum() * np.diag(held_back)
        w = np.linalg.solve(held, rhs[others].sum(axis=0))
        total = 0.0
        for t in reversed(range(length)):
            delta = float(batch["reward"][row, t]) + gamma * after[row, t] @ w - phi[row, t] @ w
            total = delta + gamma * gae_lambda * total
            found[row, t] = total
    return torch.from_numpy(found).float()


@pytest.mark.parametrize(("gae_lambda", "value_lambda"), [(0.0, 0.0), (0.9, 0.9), (1.0, 1.0), (0.5, 0.9), (0.9, 0.5)])
@pytest.mark.parametrize(("features", "ridge", "folds"), [(4, 1e-2, 3), (16, 1e-3, 2)])
@pytest.mark.parametrize("lengths", [(5, 9, 7, 6, 8, 9, 5), (100, 40, 90, 76, 75, 74, 73)])  # of one block, and of two
def test_it_is_the_printed_algorithm(gae_lambda, value_lambda, features, ridge, folds, lengths):
    batch = random_episodes(lengths=lengths)
    settings = {
        "gae_lambda": gae_lambda,
        "value_lambda": value_lambda,
        "features": features,
        "ridge": ridge,
        "folds": folds,
    }
    found = credit(batch, gamma=0.9, **lstd(**settings))
    torch.testing.assert_close(found, by_traces(batch, 0.9, **settings), rtol=1e-4, atol=1e-5)


def test_its_defaults():
    batch = random_episodes()
    expected = by_traces(batch, 0.9, gae_lambda=0.95, value_lambda=0.99, features=512, ridge=1e-3, folds=4)
    torch.testing.assert_close(credit(batch, gamma=0.9, **lstd()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trace", [0.5, 0.95])
def test_values_of_the_random_walk_are_the_exact_ones(trace):
    """Sutton and Barto, example 6.2: from five states in a row to an end on either side, 1 for the right one: V = s / 6."""
    generator = np.random.default_rng(0)
    episodes, obs = [], []
    for _ in range(400):
        state, seen = 3, []
        while 0 < state < 6:
            seen.append([float(state)])
            state += 1 if generator.random() < 0.5 else -1
        episodes.append((0, [0.0] * (len(seen) - 1) + [float(state == 6)], "terminated"))
        obs.append(seen)
    batch = rollout(episodes, obs=obs)
    advantage = credit(batch, gamma=1.0, **lstd(gae_lambda=trace, value_lambda=trace, features=32, ridge=1e-6))
    # the mean of the values is that of the returns: advantages have mean 0 in each state
    for state in range(1, 6):
        here = batch["loss_mask"] & (batch["obs"][..., 0] == state)
        assert abs(float(advantage[here].mean())) < 0.03
    # with single steps of the end: r + 0 - V
    left = batch["terminated"] & (batch["obs"][..., 0] == 1)
    right = batch["terminated"] & (batch["obs"][..., 0] == 5)
    assert float(-advantage[left].mean()) == pytest.approx(1 / 6, abs=0.05)
    assert float(1 - advantage[right].mean()) == pytest.approx(5 / 6, abs=0.05)


def test_an_episode_is_not_measured_by_its_own_rewards():
    """More reward raises the advantages of its own steps by just that: its values come from other folds."""
    batch = random_episodes()
    settings = lstd(features=8, folds=7, gae_lambda=0.5)
    before = credit(batch, gamma=0.8, **settings)
    richer = batch.clone()
    richer["reward"][2, 3] += 1.0
    change = (credit(richer, gamma=0.8, **settings) - before)[2]
    torch.testing.assert_close(change[:5], torch.tensor([0.4**3, 0.4**2, 0.4, 1.0, 0.0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trace", [0.0, 0.95, 1.0])
def test_the_clock_is_neither_praised_nor_blamed(trace):
    """Episodes that all earn 1 a step until they are cut deserve nothing, early or late."""
    obs = torch.randn(6, 40, 2, generator=torch.Generator().manual_seed(0)).tolist()
    batch = rollout([(0, [1.0] * 40, "truncated")] * 6, obs=obs)
    found = credit(batch, gamma=0.9, **lstd(gae_lambda=trace, value_lambda=trace, features=16))
    assert found.abs().max() < 0.01  # of a value of 10


def test_a_discount_of_one_leaves_the_level_of_cut_episodes_in_place():
    """Without any discount a step's own value after a cut leaves the level open, and the solution explodes."""
    batch = random_episodes(lengths=(40,) * 12, ends=("truncated",))
    near, at = (credit(batch, gamma=gamma, **lstd(gae_lambda=0.95, value_lambda=0.95)) for gamma in (0.999, 1.0))
    assert float(at.abs().max()) < 2 * float(near.abs().max())
    assert float(torch.corrcoef(torch.stack([near.flatten(), at.flatten()]))[0, 1]) > 0.8


def test_anything_may_stand_in_gaps():
    batch = random_episodes()
    clean = credit(batch.clone(), gamma=0.9, **lstd(features=8))
    for name in ("obs", "reward"):
        batch[name][~batch["valid"]] = torch.nan
    assert torch.equal(credit(batch, gamma=0.9, **lstd(features=8)), clean)


def test_rewards_of_a_moving_unit_are_refused():
    algorithm, policy = gw.GRPOCfg(credit=lstd()), {"normalize_reward": True}
    with pytest.raises(ValueError, match=r"normalize_reward=True changes the unit .*normalize_reward=False"):
        gw.RunCfg(env=gw.EnvCfg(id="Pendulum-v1"), algorithm=algorithm, policy=policy)
    forgetful = gw.GRPOCfg(credit=lstd(decay=0.0))
    assert gw.RunCfg(env=gw.EnvCfg(id="Pendulum-v1"), algorithm=forgetful, policy=policy).policy.normalize_reward


def test_earlier_updates_fade():
    """After the same rollout again and again all sums are twice as large at decay 0.5, so the ridge's share is the same:
    episodes are measured by themselves, too, with half of the weight of the others."""
    batch, memory = random_episodes(), {}
    settings = lstd(features=4, folds=2, decay=0.5)
    first = credit(batch, gamma=0.9, memory=memory, **settings)
    kept = memory["products"].clone()
    again = credit(batch, gamma=0.9, memory=memory, **settings)
    torch.testing.assert_close(memory["products"], 1.5 * kept)  # states have the same scale
    assert not torch.equal(first, again)
    for _ in range(40):
        credit(batch, gamma=0.9, memory=memory, **settings)
    torch.testing.assert_close(memory["products"], 2 * kept)
    # without decay nothing is kept but the scale of states, which does not move here
    alone: dict = {}
    settings = lstd(features=4, folds=2, decay=0.0)
    found = [credit(batch, gamma=0.9, memory=alone, **settings) for _ in range(3)]
    torch.testing.assert_close(found[0], found[2])
    assert not alone["products"].any()


def test_the_memory_is_used_by_an_episode_alone():
    batch, memory = random_episodes(), {}
    credit(batch, gamma=0.9, memory=memory, **lstd(features=4))
    batch["loss_mask"][1:] = False
    assert credit(batch, gamma=0.9, memory=memory, **lstd(features=4))[0, :5].all()


def test_another_number_of_features_begins_anew():
    batch, memory = random_episodes(), {}
    credit(batch, gamma=0.9, memory=memory, **lstd(features=4))
    seen = memory["seen"].clone()
    credit(batch, gamma=0.9, memory=memory, **lstd(features=8))
    fresh: dict = {}
    credit(batch, gamma=0.9, memory=fresh, **lstd(features=8))
    torch.testing.assert_close(memory["products"], fresh["products"])
    torch.testing.assert_close(memory["seen"], 2 * seen)  # which are of states


def test_two_ranks_are_one_batch():
    whole, choices = random_episodes(), lstd(features=8, folds=3) | {"normalize": "batch"}
    expected = credit(whole, gamma=0.9, **choices)
    parts = [whole[:4], whole[4:].clone()]
    parts[1]["episode_id"] = torch.where(parts[1]["valid"], parts[1]["episode_id"] - 4, -1)
    found = in_two_threads(lambda e: credit(parts[e.rank], gamma=0.9, engine=e, **choices))
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-4)


def test_a_rank_without_a_step_that_counts_has_no_advantages():
    batch, nothing = random_episodes(), random_episodes(1)
    nothing["loss_mask"] = torch.zeros_like(nothing["loss_mask"])
    found = in_two_threads(lambda e: credit((batch, nothing)[e.rank].clone(), gamma=0.5, engine=e, **lstd()))
    torch.testing.assert_close(found[0], credit(batch, gamma=0.5, **lstd()), rtol=1e-4, atol=1e-5)
    assert not found[1].any()


def test_an_episode_alone_has_nothing_to_be_measured_against():
    batch = random_episodes()
    batch["loss_mask"][1:] = False
    assert not credit(batch, gamma=0.9, **lstd()).any()
    batch["loss_mask"][:] = False
    assert not credit(batch, gamma=0.9, **lstd()).any()


def test_features_are_waves_of_standardised_states_these_and_one():
    batch = random_episodes()
    mask, obs = batch["loss_mask"], torch.cat([batch["obs"], torch.full_like(batch["obs"][..., :1], 1e6)], dim=-1)
    features = features_of(obs, mask, 2000)[mask]
    waves, state, one = features.split([2000, 3, 1], dim=-1)
    torch.testing.assert_close(state.mean(dim=0), torch.zeros(3).double())
    # a feature that never changes says nothing
    torch.testing.assert_close(state.std(dim=0, correction=0), torch.tensor([1.0, 1.0, 0.0]).double())
    assert one.unique().tolist() == [1.0]
    assert waves.square().mean().item() == pytest.approx(1, abs=0.05)
    # products of waves are the kernel: 1 for equal states, less the further they are apart
    kernel = waves @ waves.T / 2000
    distance = torch.cdist(state, state)
    assert kernel.diagonal().mean().item() == pytest.approx(1, abs=0.05)
    assert kernel[(distance > 0) & (distance < 1)].mean() > kernel[distance > 2].mean() + 0.1


def test_products_of_waves_are_a_mixture_of_gaussian_kernels():
    # the mean of e^(-d^2 / 2 w^2) over w = sqrt(2) 3^u, u uniform in [-1, 1], at the distances d = 0, 1, 2, 5
    obs = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [3.0, 4.0]]]).double()
    waves = random_features(obs, torch.zeros(2).double(), torch.ones(2).double(), 50_000)[0, :, :50_000]
    kernel = waves[0] @ waves.T / 50_000
    # products have a deviation of at most 1, so their mean one of .0045
    torch.testing.assert_close(kernel, torch.tensor([1.0, 0.6825, 0.3932, 0.0860]).double(), atol=0.015, rtol=0)


@pytest.mark.parametrize(
    ("obs", "says"),
    [
        (torch.zeros(7, 9, dtype=torch.int64), r"torch.int64 of shape \[7, 9\]"),
        (TensorDict({"a": torch.zeros(7, 9, 1)}, batch_size=[7, 9]), "several tensors"),
    ],
)
def test_other_observations_are_refused(obs, says):
    with pytest.raises(
        DataError, match=rf"baseline='lstd' needs vectors of numbers .*got {says}; fix: .*or baseline='mean'"
    ):
        credit(random_episodes().set("obs", obs), gamma=0.9, **lstd())


@pytest.mark.parametrize("rule", [lstd(), lstd() | {"baseline": "knn"}], ids=["lstd", "knn"])
def test_whole_numbers_are_as_good_as_floats(rule):
    batch = random_episodes()
    whole = (batch["obs"] * 3).long()
    one, other = (credit(batch.clone().set("obs", obs), gamma=0.9, **rule) for obs in (whole, whole.float()))
    assert torch.equal(one, other)
    assert one.abs().sum() > 0


@pytest.mark.parametrize(
    "change",
    [
        {"returns": "outcome"},
        {"scale": "std"},
        *({"baseline": {"name": "lstd", name: value}} for name, value in {"folds": 1, "value_lambda": 1.5}.items()),
    ],
)
def test_settings_that_contradict_it_are_refused(change):
    with pytest.raises(ValueError, match=r"baseline='lstd' needs|folds|value_lambda"):
        gw.CreditCfg(**lstd() | change)


def test_wide_states_are_left_to_random_features():
    """1,025 numbers for each of them would be as many equations."""
    obs, mask = torch.randn(4, 6, 1025), torch.ones(4, 6, dtype=torch.bool)
    assert features_of(obs, mask, 16).shape == (4, 6, 17)
    assert features_of(obs[..., 1:], mask, 16).shape == (4, 6, 16 + 1024 + 1)


@pytest.mark.parametrize("preset", ["knn", "lstd"])
def test_numbers_of_a_discrete_space_are_states(preset, tmp_path):
    class Keep(gw.Callback):
        def on_rollout_end(self, trainer, rollout):
            states = trainer.algorithm._encode(rollout["obs"])
            assert torch.equal(states, torch.nn.functional.one_hot(rollout["obs"], 16).float())

    run = gw.train(
        "FrozenLake-v1",
        {"name": "grpo", "num_steps": 64, "group_size": 4},
        preset=preset,
        num_envs=4,
        total_steps=600,
        seed=1,
        run_dir=tmp_path / "run",
        callbacks=[Keep()],
        evaluation={"interval": None, "episodes": 2},
    )
    assert any(entry["train/grad_norm"] > 0 for entry in run.metrics())


def test_a_policy_s_own_encoder_gives_states_without_gradient(tmp_path):
    class Encoded(gw.ActorCritic):
        def __init__(self, *args):
            super().__init__(*args, actor_only=True)
            self.state_encoder = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh())

    class Keep(gw.Callback):
        def on_iteration_end(self, trainer, rollout, metrics):
            algorithm = trainer.algorithm
            assert algorithm.memory["seen"].shape == (3, 5)
            assert not any(kept.requires_grad for kept in algorithm.memory.values())
            assert not algorithm.advantage.requires_grad

    env = gw.make_env(gw.EnvCfg(id="CartPole-v1"))
    gw.train(
        "CartPole-v1",
        {"name": "grpo", "num_steps": 32, "num_epochs": 2},
        preset="lstd",
        policy=Encoded(env.observation_space, env.action_space),
        num_envs=4,
        total_iterations=2,
        run_dir=tmp_path / "run",
        callbacks=[Keep()],
        evaluation={"interval": None, "episodes": 1},
    )
    env.close()
