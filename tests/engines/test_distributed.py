"""Two processes under torchrun give the parameters and metrics of one process on the union of their data."""

import json

import pytest
import torch
from forked import run_script

from groupwise.engines import DistributedEngine, Engine, from_environment
from groupwise.errors import ConfigError

WORKER = """
import json, sys
import gymnasium as gym, numpy as np, torch
from groupwise.config.algorithm import CreditCfg, GRPOCfg, ObjectiveCfg, PPOCfg
from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.ppo import PPO
from groupwise.data.rollout import RolloutBuffer
from groupwise.data.spaces import obs_spec
from groupwise.engines import from_environment
from groupwise.policies.actor_critic import ActorCritic
from groupwise.config.policy import PolicyCfg

torch.set_num_threads(1)
OBS, ACT, ROWS, STEPS = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(3), 8, 12
CASES = {
    "ppo": (PPO, PPOCfg, dict(normalize_advantage="batch", ent_coef=0.01)),
    "ppo_minibatch": (PPO, PPOCfg, dict(target_kl=1.0)),
    "grpo": (GRPO, GRPOCfg, dict(kl_coef=0.1, objective=ObjectiveCfg(aggregation="seq_mean_token_mean"))),
    "grpo_minibatches": (GRPO, GRPOCfg, dict(minibatch_size=9, objective=ObjectiveCfg(aggregation="seq_mean_token_mean"))),
    "grpo_knn": (GRPO, GRPOCfg, dict(credit=CreditCfg(group_key="group", returns="return_to_go", baseline={"name": "knn", "k": 3}, scale="none"))),
    "grpo_batch_std": (GRPO, GRPOCfg, dict(credit=CreditCfg(scale="batch_std"), objective=ObjectiveCfg(ratio="sequence"))),
}

def union(policy):
    g = torch.Generator().manual_seed(0)
    buffer = RolloutBuffer(ROWS, STEPS, obs_spec=obs_spec(OBS), action_spec=policy.action_spec, value=not policy.actor_only)
    rollout = buffer.start_rollout()
    rollout["obs"].copy_(torch.rand(ROWS, STEPS + 1, 3, generator=g) * 2 - 1)
    done = policy.act(rollout["obs"].reshape(-1, 3), generator=g)
    rollout["action"].copy_(done.action.reshape(ROWS, -1))
    rollout["sample_log_prob"].copy_(done.log_prob.reshape(ROWS, -1))
    if not policy.actor_only:
        rollout["value"].copy_(done.value.reshape(ROWS, -1))
        rollout["next_value"][:, :-1] = rollout["value"][:, 1:]
    for row in range(ROWS):
        length = 5 + row % 3  # ranks hold different numbers of steps
        rollout["reward"][row, :length] = torch.rand(length, generator=g)
        for key in ("valid", "loss_mask"):
            rollout[key][row, :length] = True
        rollout["group_id"][row, :length] = row // 2
        rollout["episode_id"][row, :length] = row
        rollout["step"][row, :length] = torch.arange(length)
        rollout["terminated"][row, length - 1] = True
    return rollout

def share(rollout, rank, size):
    rows = ROWS // size
    part = rollout[rank * rows : (rank + 1) * rows].clone()
    for key in ("group_id", "episode_id"):
        ids = part[key]
        ids[ids >= 0] -= ids[ids >= 0].min()
    return part

engine = from_environment()
out = {}
for name, (cls, cfg_cls, settings) in CASES.items():
    torch.manual_seed(engine.rank)  # rank 0's parameters must reach the others
    policy = ActorCritic(OBS, ACT, PolicyCfg(hidden_sizes=(8,), normalize_obs=True, normalize_reward=True), actor_only=cls.actor_only)
    algorithm = cls(cfg_cls(**dict(num_epochs=3, minibatch_size=10_000, learning_rate=0.05) | settings), policy, engine)
    for _ in range(2):
        metrics = algorithm.update(share(union(policy), engine.rank, engine.world_size))
    flat = torch.cat([t.double().flatten() for t in policy.state_dict().values()])
    out[name] = {"state": flat.tolist(), "metrics": {k: float(v) for k, v in metrics.items()}}
out["gathered"] = engine.gather_objects({"rank": engine.rank})
out["sum"] = int(engine.sum(torch.tensor(5 + engine.rank)))
with open(f"{sys.argv[1]}.{engine.rank}", "w") as file:
    json.dump(out, file)
engine.close()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    run_script(WORKER, folder / "one")
    run_script(WORKER, folder / "two", ranks=2)
    return {name: json.loads((folder / name).read_text()) for name in ("one.0", "two.0", "two.1")}


@pytest.mark.parametrize("case", ["ppo", "ppo_minibatch", "grpo", "grpo_knn", "grpo_batch_std"])
def test_two_processes_are_one_on_the_union(results, case):
    one, first, second = (results[name][case] for name in ("one.0", "two.0", "two.1"))
    assert first == second
    torch.testing.assert_close(torch.tensor(first["state"]), torch.tensor(one["state"]), atol=2e-5, rtol=1e-4)
    assert first["metrics"] == pytest.approx(one["metrics"], abs=2e-5, rel=1e-3)


def test_ranks_with_unequal_shares_stay_together(results):
    # more minibatches than a rank has episodes: some of its shares are empty, and it must not wait or fall behind
    first, second = (results[name]["grpo_minibatches"] for name in ("two.0", "two.1"))
    assert first == second
    assert first["metrics"]["train/optimizer_steps"] > 4


def test_every_rank_gets_the_objects_and_sums_of_all(results):
    assert results["two.0"]["gathered"] == results["two.1"]["gathered"] == [{"rank": 0}, {"rank": 1}]
    assert results["one.0"]["gathered"] == [{"rank": 0}]
    assert (results["two.0"]["sum"], results["two.1"]["sum"], results["one.0"]["sum"]) == (11, 11, 5)


def test_a_single_process_needs_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    engine = from_environment()
    assert type(engine) is Engine
    tensor = torch.ones(3)
    assert engine.sum(tensor) is tensor


def test_a_process_group_that_exists_is_used_by_a_single_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    engine = from_environment()
    try:
        assert type(engine) is DistributedEngine
        assert (engine.rank, engine.world_size) == (0, 1)
        assert engine.sum(torch.tensor(5)) == 5
        engine.close()  # it is not the engine's
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("local_rank", "gpus", "torchrun", "taken"),
    [
        pytest.param(0, 1, True, 0, id="one each"),
        pytest.param(3, 4, True, 3, id="its own of several"),
        pytest.param(3, 1, False, 0, id="the launcher shows one alone"),
        pytest.param(1, 1, True, None, id="two share one"),
        pytest.param(2, 2, False, None, id="three share two"),
    ],
)
def test_each_process_has_a_gpu_of_its_own(monkeypatch, local_rank, gpus, torchrun, taken):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    chosen = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    if taken is not None:
        from_environment("cuda", lambda device, timeout: Engine())
        assert chosen == [taken]
        return
    with pytest.raises(ConfigError, match=rf"{local_rank + 1} or more processes .* sees {gpus} GPU.*fix: torchrun"):
        from_environment("cuda", lambda device, timeout: Engine())
