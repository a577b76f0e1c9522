"""Credit above the states near each step: numbers by hand, and what it refuses."""

import pytest
import torch
from small_updates import build, make_rollout, parameters

import groupwise as gw
from groupwise.algorithms import near_states
from groupwise.algorithms.credit import advantages
from groupwise.algorithms.near_states import above_near_states, foreign, visited
from groupwise.errors import DataError
from groupwise.lean_tensordict import TensorDict

NEAR = {"group_key": "group", "returns": "return_to_go", "baseline": "near_states", "scale": "none", "near_states": 1}


def rollout():
    """Two attempts of three and two steps along a line, the second one cut, and a step that does not count."""
    no, yes = False, True
    return TensorDict(
        {
            "obs": torch.tensor([[[0.0], [1.0], [2.0]], [[0.1], [1.1], [50.0]]]),
            "reward": torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 0.0]]),
            "terminated": torch.tensor([[no, no, yes], [no, no, no]]),
            "truncated": torch.tensor([[no, no, no], [no, yes, no]]),
            "loss_mask": torch.tensor([[yes, yes, yes], [yes, yes, no]]),
            "group_id": torch.zeros(2, 3, dtype=torch.int64),
            "episode_id": torch.tensor([[0, 0, 0], [1, 1, 1]]),
            "step": torch.tensor([[0, 1, 2], [0, 1, 0]]),
        },
        batch_size=[2, 3],
    )


def credit_of(batch, gamma=0.5, **options):
    cfg = gw.CreditCfg(**NEAR | options)
    return advantages(gw.CreditInput(batch, batch["reward"], cfg, gamma, num_groups=1, num_episodes=2))


@pytest.mark.parametrize(
    ("gae_lambda", "expected"),
    [
        # returns to go 1.75, 1.5, 1 and 3, 2; each step's value is that of the other attempt's nearest step:
        # 3, 2, 2 and 1.75, 1.5; behind the cut stands the last step's own
        (1.0, [[-1.25, -0.5, -1.0], [1.625, 1.25, 0.0]]),
        (0.0, [[-1.0, 0.0, -1.0], [1.0, 1.25, 0.0]]),
        (0.5, [[-1.0625, -0.25, -1.0], [1.3125, 1.25, 0.0]]),
    ],
)
def test_by_hand(gae_lambda, expected):
    torch.testing.assert_close(credit_of(rollout(), gae_lambda=gae_lambda), torch.tensor(expected))


def test_normalised_over_the_batch():
    found = credit_of(rollout(), gae_lambda=1.0, normalize="batch")
    counted = rollout()["loss_mask"]
    assert float(found[counted].mean()) == pytest.approx(0, abs=1e-6)
    raw = credit_of(rollout(), gae_lambda=1.0)[counted]
    torch.testing.assert_close(found[counted], (raw - raw.mean()) / (raw.std() + 1e-4), rtol=1e-3, atol=1e-3)


def test_no_more_states_than_the_pool_holds_are_looked_at(monkeypatch):
    """Evenly spaced: of five, at most two are every third, the first ones of both attempts."""
    monkeypatch.setattr(near_states, "POOL", 2)
    batch = rollout()
    pool = visited(batch, batch["reward"], 0.5)
    assert pool.state[:, 0].tolist() == pytest.approx([0.0, 0.1])
    assert pool.score.tolist() == [1.75, 3.0]
    # values 3 and 1.75 everywhere
    found = credit_of(batch, gae_lambda=1.0)
    torch.testing.assert_close(found, torch.tensor([[-1.25, -1.5, -2.0], [1.6875, 1.125, 0.0]]))


def test_states_of_earlier_rollouts_are_near_too_and_nobody_owns_them():
    """Three of an attempt with the same number, and with other scores."""
    batch = rollout()
    earlier = rollout().set("reward", torch.tensor([[8.0, 8.0, 8.0], [0.0, 0.0, 0.0]]))
    past = foreign(visited(earlier, earlier["reward"], 0.5))
    assert set(past.episode.tolist()) == {-1}
    cfg = gw.CreditCfg(**NEAR | {"gae_lambda": 1.0})
    found = above_near_states(batch, batch["reward"], 0.5, cfg, [past])
    # each step's nearest state is itself, a rollout ago: 14, 12, 8 and 0, 0
    torch.testing.assert_close(found[0], torch.tensor([-12.25, -10.5, -7.0]))
    torch.testing.assert_close(found[1, :2], torch.tensor([3.0, 2.0]))


def test_a_rollout_without_a_step_that_counts_has_no_values():
    batch = rollout()
    assert not credit_of(batch.set("loss_mask", torch.zeros(2, 3, dtype=torch.bool))).any()


@pytest.mark.parametrize(
    ("obs", "says"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), r"torch.int64 of shape \[2, 3\]"),
        (torch.zeros(2, 3, 4, 4), r"torch.float32 of shape \[2, 3, 4, 4\]"),
        (TensorDict({"a": torch.zeros(2, 3, 1)}, batch_size=[2, 3]), "several tensors"),
    ],
)
def test_what_has_no_distance_is_refused(obs, says):
    with pytest.raises(DataError, match=rf"got {says}; mend: group_key='group_step'"):
        credit_of(rollout().set("obs", obs))


@pytest.mark.parametrize(
    "change",
    [
        {"returns": "outcome"},
        {"group_key": "group_step"},
        {"scale": "batch_std"},
        {"scale": "std"},
        {"reward": "parts"},
    ],
)
def test_settings_that_contradict_it_are_refused(change):
    with pytest.raises(ValueError, match="baseline='near_states' compares returns from states on"):
        gw.CreditCfg(**NEAR | change)


def test_training_with_it(tmp_path):
    """The whole way, where attempts end early and late; what the policy learns is the business of ``make learn``."""
    cfg = gw.GRPOCfg(num_steps=64, credit=NEAR | {"near_states": 4, "near_iterations": 2, "normalize": "batch"})
    run = gw.train("CartPole-v1", cfg, total_steps=300, run_dir=tmp_path / "run", logging={"progress": "none"})
    assert run.summary["env_steps"] >= 300
    assert all(torch.isfinite(parameter).all() for parameter in run.policy.parameters())


def test_as_many_rollouts_are_remembered_as_asked_for_and_a_resumed_run_knows_them():
    algorithm = build("grpo", credit=NEAR | {"near_iterations": 3, "normalize": "batch"})
    for seed in range(4):
        algorithm.update(make_rollout(algorithm.policy, seed))
        assert len(algorithm.past) == min(seed + 1, 2)
    other = build("grpo", credit=NEAR | {"near_iterations": 3, "normalize": "batch"})
    other.policy.load_state_dict(algorithm.policy.state_dict())
    other.load_state_dict(algorithm.state_dict())
    for one in (algorithm, other):
        one.update(make_rollout(one.policy, 9))
    assert torch.equal(parameters(algorithm), parameters(other))
    assert build("grpo", credit=NEAR | {"normalize": "batch"}).past == ()


def test_updates_then_wait_for_the_device():
    cfg = gw.GRPOCfg(
        group_size=4, num_steps=8, credit=NEAR | {"normalize": "batch"}, collection={"unfinished": "branch"}
    )
    env = gw.TorchCartPole(8)
    policy = gw.ActorCritic(env.observation_space, env.action_space, actor_only=True)
    assert gw.GRPO(cfg, policy).stay_on_device() == "credit.baseline='near_states' looks for steps that count"
