"""Updates that stay on the device are the reference's, from the same data in the same order."""

import random
from contextlib import nullcontext

import pytest
import torch
from no_waiting import NoWaiting
from small_updates import parameters
from tape import Tape
from torch_rollouts import ENVS

import groupwise as gw
from groupwise.algorithms.optim import Schedule
from groupwise.algorithms.resident import shuffled
from groupwise.config.algorithm import AdaptiveKLCfg, CollectionCfg
from groupwise.data.minibatch import Epoch, cut_evenly
from groupwise.data.rollout import transition_view
from groupwise.engines.replay import WARM_UP

UPDATES = 20
NEAR_STATES = {"baseline": "near_states", "returns": "return_to_go", "scale": "none"}
STEPS = {"group_key": "group_step", "returns": "return_to_go", "scale": "batch_std"}
PPO = {
    "plain": {},
    "whole": {"minibatch_size": None},
    "advantages of the batch": {"normalize_advantage": "batch", "clip_value": 0.2, "ent_coef": 0.01},
    "limited": {"target_kl": 0.003},
    "led by the KL": {"schedule": {"name": "adaptive_kl", "desired_kl": 0.002}, "target_kl": 0.05},
    "micro-batches": {"micro_batch_size": 7, "max_grad_norm": None},
    "decay": {"optimizer": {"name": "adamw", "weight_decay": 0.1}, "schedule": {"name": "linear"}},
}
GRPO = {
    "by step": {"credit": STEPS},
    "by step, deviation of each": {"credit": STEPS | {"scale": "std", "baseline": "leave_one_out"}},
    "whole episodes where nobody is left": {
        "credit": STEPS | {"early_finisher": "trajectory", "lone_member": "trajectory"}
    },
    "outcome": {"credit": {"scale": "none"}},
    "process": {"credit": {"returns": "process", "normalize": "informative"}},
    "chance": {"credit": STEPS | {"baseline": "optimal_token", "scale": "none"}},
    "reference": {
        "kl_coef": 0.1,
        "objective": {"kl_estimator": "exact"},
        "reference": {"refresh": "interval", "interval": 3},
    },
    "KL in rewards": {"kl_coef": 0.1, "credit": STEPS | {"kl_placement": "reward"}},
    "divided by length": {"objective": {"aggregation": "seq_mean_token_sum_norm", "max_length": 50}},
    "whole": {"minibatch_size": None, "credit": STEPS},
    "limited": {"target_kl": 0.002, "credit": STEPS},
}
GROUP = 4


def build(kind, how, env, num_envs, num_steps, *, seed=0, **policy_cfg):
    """Algorithm, collector and buffer; the same each time."""
    env = ENVS[env](num_envs)
    torch.manual_seed(seed)
    policy = gw.ActorCritic(
        env.observation_space,
        env.action_space,
        gw.PolicyCfg(**{"hidden_sizes": (8,)} | policy_cfg),
        actor_only=kind == "grpo",
    )
    cfg = {"num_steps": num_steps, "num_epochs": 2, "minibatch_size": 29, "learning_rate": 3e-3} | how
    buffer = gw.RolloutBuffer(
        num_envs, num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=kind == "ppo", resident=True
    )
    if kind == "ppo":
        return gw.PPO(gw.PPOCfg(**cfg), policy, seed=seed), gw.TorchVectorCollector(env, policy, seed=seed), buffer
    cfg = gw.GRPOCfg(group_size=GROUP, collection=CollectionCfg(partial_groups="truncate"), **cfg)
    collector = gw.TorchGroupCollector(env, policy, group_size=GROUP, seed=seed)
    return gw.GRPO(cfg, policy, seed=seed), collector, buffer


def ordered_like(reference, resident, mask):
    """Have the reference take its steps that count in the order and the minibatches of the other."""
    place = mask.flatten().cumsum(0) - 1

    def epoch(elements, num_minibatches, generator, number):
        order = shuffled(resident.resident._seed, number, mask.numel())
        taken, minibatches = [], []
        for slices in cut_evenly(mask.numel(), num_minibatches, None):
            slots = torch.cat([order[part] for part in slices])
            slots = place[slots[mask.flatten()[slots]]]
            begin = sum(map(len, taken))
            minibatches.append([slice(begin, begin + len(slots))] if len(slots) else [])
            taken.append(slots)
        return Epoch(torch.cat(taken), minibatches)

    reference._epoch = epoch
    reference._total = lambda counted: mask.numel() if len(counted) else 0


def close(found, expected, atol=1e-5):
    torch.testing.assert_close(parameters(found), parameters(expected), rtol=0, atol=atol)


def train(kind, how, env, num_envs, num_steps, seed, updates=UPDATES, lost=0.0, **policy_cfg):
    """Resident updates beside the reference's on the same rollouts; metrics of the last ones."""
    resident, collector, buffer = build(kind, how, env, num_envs, num_steps, seed=seed, **policy_cfg)
    reference, _, _ = build(kind, how, env, num_envs, num_steps, seed=seed)
    assert resident.stay_on_device() is None
    close(resident, reference, 0)
    chance = torch.Generator().manual_seed(seed)
    pairs = []
    for update in range(updates):
        rollout = collector.collect(num_steps, buffer.start_rollout())
        rollout["loss_mask"] &= torch.rand(rollout["loss_mask"].shape, generator=chance) >= lost
        mask = transition_view(rollout)["loss_mask"]
        for algorithm in (resident, reference):
            algorithm.set_progress(update / updates)
        if resident.cfg.schedule.name == "adaptive_kl":
            # the first KL of an update is 0 but for rounding, which the rule looks at: both begin from the same bits
            reference.policy.load_state_dict(resident.policy.state_dict())
            reference.load_state_dict(resident.state_dict())
        found = {name: value.clone() for name, value in resident.update(rollout).items()}
        ordered_like(reference, resident, mask)
        pairs.append((found, reference.update(rollout)))
        assert resident.schedule.factor == pytest.approx(reference.schedule.factor)
        close(resident, reference)
    return pairs


def same_metrics(pairs):
    for found, expected in pairs:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name].double(), value.double(), rtol=2e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("case", range(2))
@pytest.mark.parametrize("how", PPO)
def test_ppo_comes_to_the_same_parameters(how, case):
    """Over random shapes; some or all steps do not count in some of them."""
    chance = random.Random(f"{how} {case}")
    env = chance.choice(["cut often", "pendulum", "named", "point mass"])
    lost = chance.choice([0.0, 0.3, 0.9, 1.0]) if case and how != "led by the KL" else 0.0
    num_envs, num_steps, seed = chance.randint(1, 12), chance.randint(2, 14), chance.randint(0, 1000)
    same_metrics(train("ppo", PPO[how], env, num_envs, num_steps, seed, lost=lost))


@pytest.mark.parametrize("case", range(2))
@pytest.mark.parametrize("how", GRPO)
def test_grpo_comes_to_the_same_parameters(how, case):
    """Over random shapes; members end early, and steps are left out beside that in some of them."""
    chance = random.Random(f"{how} {case}")
    envs = ["cartpole", "cut often"] + (["point mass"] if how != "chance" else [])  # which is about choices
    env, lost = chance.choice(envs), chance.choice([0.0, 0.3, 0.9]) if case else 0.0
    groups, num_steps, seed = chance.randint(1, 4), chance.randint(2, 14), chance.randint(0, 1000)
    same_metrics(train("grpo", GRPO[how], env, groups * GROUP, num_steps, seed, lost=lost))


def test_members_that_ended_early_are_left_out():
    """Not by chance: rows wait for their siblings in these rollouts."""
    _, collector, buffer = build("grpo", GRPO["by step"], "cartpole", 16, 40)
    rollout = collector.collect(40, buffer.start_rollout())
    assert 0.1 < float(1 - rollout["loss_mask"][:, :-1].float().mean()) < 0.6
    same_metrics(train("grpo", GRPO["by step"], "cartpole", 16, 40, 0, updates=5))


@pytest.mark.parametrize(("kind", "how"), [("ppo", PPO["limited"]), ("grpo", GRPO["limited"])])
def test_the_limit_of_the_kl_ends_updates(kind, how):
    how = how | {"learning_rate": 0.02, "num_epochs": 4}
    pairs = train(kind, how, "cartpole", 8, 30, 0, updates=3)
    full = 4 * round(8 * 30 / 29)
    steps = [float(expected["train/optimizer_steps"]) for _, expected in pairs]
    assert any(0 < taken < full for taken in steps)
    assert steps == [float(found["train/optimizer_steps"]) for found, _ in pairs]


def test_compiled_gradients_do_as_well():
    how = PPO["limited"] | {"learning_rate": 0.02, "num_epochs": 4}
    pairs = train("ppo", how, "cartpole", 8, 30, 0, updates=3, lost=0.3, mlp_kernel="compiled")
    assert len({float(found["train/optimizer_steps"]) for found, _ in pairs}) > 1
    same_metrics(pairs)


def test_minibatches_without_a_step_that_counts_change_nothing():
    pairs = train("ppo", {"minibatch_size": 2}, "cut often", 4, 6, 3, updates=6, lost=0.8)
    assert {float(found["train/optimizer_steps"]) for found, _ in pairs} != {24.0}
    assert [float(f["train/optimizer_steps"]) for f, _ in pairs] == [
        float(e["train/optimizer_steps"]) for _, e in pairs
    ]


def iterate(algorithm, collector, buffer, num_steps):
    buffer.add(collector.collect(num_steps, buffer.start_rollout()))
    return algorithm.update(buffer.get())


ITERATIONS = [
    *(("ppo", PPO[how], env) for how in PPO for env in ("cut often", "named")),
    *(("grpo", GRPO[how], "cut often") for how in GRPO),
    ("grpo", GRPO["by step"], "point mass"),
]


@pytest.mark.parametrize(("kind", "how", "env"), ITERATIONS)
def test_nothing_waits_in_a_whole_iteration(kind, how, env):
    networks = {"mlp_kernel": "torch", "normalize_obs": True, "normalize_reward": True}
    algorithm, collector, buffer = build(kind, how, env, 16, 6, **networks)
    assert algorithm.stay_on_device() is None
    for iteration in range(4):
        with NoWaiting() if iteration else nullcontext():
            algorithm.set_progress(0.5)
            iterate(algorithm, collector, buffer, 6)
        collector.metrics()  # what is told crosses once an iteration


@pytest.mark.parametrize(("kind", "how", "env"), ITERATIONS)
def test_replays_train_like_calls(kind, how, env):
    tape = Tape()
    networks = {"mlp_kernel": "torch", "normalize_obs": True, "normalize_reward": True}
    replayed, called = (build(kind, how, env, 8, 6, **networks) for _ in range(2))
    assert replayed[0].stay_on_device(tape) is None
    called[0].stay_on_device()
    for update in range(WARM_UP + 3):
        for algorithm, _, _ in (replayed, called):
            algorithm.set_progress(update / 10)
        found, expected = iterate(*replayed, 6), iterate(*called, 6)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)
        close(replayed[0], called[0], 1e-7)
    assert (tape.warm_ups, tape.replays) == (WARM_UP, 3)
    assert replayed[0].resident.is_recorded


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_a_resumed_update_goes_on_alike(kind):
    how = {"schedule": {"name": "adaptive_kl", "desired_kl": 0.002}} | ({"credit": STEPS} if kind == "grpo" else {})
    first, other = (build(kind, how, "cut often", 8, 6, mlp_kernel="torch") for _ in range(2))
    for algorithm, _, _ in (first, other):
        algorithm.stay_on_device(Tape())
    for _ in range(WARM_UP + 2):
        iterate(*first, 6)
    other[0].policy.load_state_dict(first[0].policy.state_dict())
    other[0].load_state_dict(first[0].state_dict())
    rollout = first[1].collect(6, first[2].start_rollout())
    for algorithm, _, _ in (first, other):
        algorithm.update(rollout)
    close(first[0], other[0], 1e-7)
    assert first[0].schedule.rate == pytest.approx(other[0].schedule.rate)
    assert isinstance(first[0].state_dict()["optimizer"]["param_groups"][0]["lr"], float)
    first[0].load_state_dict(first[0].state_dict())  # into other tensors
    assert not first[0].resident.is_recorded


def test_the_order_is_one_of_all_and_another_each_time():
    seed = torch.tensor(7)
    orders = [shuffled(seed, epoch, 500) for epoch in range(3)] + [shuffled(seed + 1, 0, 500)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(500))
        assert abs(float(torch.corrcoef(torch.stack([order.double(), torch.arange(500.0).double()]))[0, 1])) < 0.15
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)
    assert torch.equal(orders[1], shuffled(torch.tensor(7), 1, 500))


@pytest.mark.parametrize("kl", [0.0, 0.001, 0.006, 0.02, 0.03])
def test_both_ways_to_adapt_the_rate_agree(kl):
    cfg = AdaptiveKLCfg(min_factor=0.5, max_factor=2.0)
    one, two = (Schedule(cfg, torch.optim.SGD([torch.zeros(1)], lr=0.1), 0.1) for _ in range(2))
    two.stay_on(torch.device("cpu"))
    for _ in range(3):
        one.adapt(kl)
        two.adapt_in_place(torch.tensor(kl), torch.ones(()))
        assert one.factor == pytest.approx(two.factor)
        assert float(two.optimizer.param_groups[0]["lr"]) == pytest.approx(one.rate)
    before = two.factor
    two.adapt_in_place(torch.tensor(kl), torch.zeros(()))
    assert two.factor == before


@pytest.mark.parametrize(
    ("kind", "how", "says"),
    [
        ("ppo", {"optimizer": {"name": "sgd"}}, "optimizer.name='sgd' cannot leave a step out"),
        ("ppo", {"objective": {"entropy": {"control": "adaptive"}}}, "control='adaptive' goes by single steps"),
        ("ppo", {"objective": {"ratio": "sequence"}}, "keeps episodes whole"),
        ("grpo", {"objective": {"aggregation": "seq_mean_token_mean"}}, "keeps episodes whole"),
        ("grpo", {"objective": {"old_log_prob": "recomputed"}}, "old_log_prob='recomputed'"),
        ("grpo", {"objective": {"trust_region": "kl_cov"}}, "trust_region='kl_cov' looks for steps"),
        ("grpo", {"objective": {"top_entropy": 0.2}}, "top_entropy=0.2 looks for steps"),
        ("grpo", {"credit": STEPS | {"early_finisher": "absorb"}}, "early_finisher='absorb' counts"),
        ("grpo", {"credit": STEPS | {"returns": "turn"}}, "returns='turn' counts"),
        ("grpo", {"credit": {"anchor_weight": 1.0}}, "anchor_weight looks for"),
        ("grpo", {"credit": {"baseline": "ema", "scale": "none"}}, "baseline='ema' looks for"),
        ("grpo", {"credit": NEAR_STATES}, "baseline='near_states' looks for"),
    ],
)
def test_what_cannot_stay_says_why_and_is_updated_as_before(kind, how, says):
    algorithm, collector, buffer = build(kind, how, "cut often", 8, 12)
    assert says in algorithm.stay_on_device()
    reference, _, _ = build(kind, how, "cut often", 8, 12)
    rollout = collector.collect(12, buffer.start_rollout())
    for each in (algorithm, reference):
        each.update(rollout)
    close(algorithm, reference, 0)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_on_a_gpu_iterations_are_replayed_and_wait_for_nothing(kind):
    how = {"schedule": {"name": "adaptive_kl"}, "target_kl": 0.05} | ({"credit": STEPS} if kind == "grpo" else {})
    found = []
    for recorded in (True, False):
        device = torch.device("cuda")
        env = gw.TorchCartPole(64, device=device)
        torch.manual_seed(0)
        policy = gw.ActorCritic(env.observation_space, env.action_space, actor_only=kind == "grpo").to(device)
        buffer = gw.RolloutBuffer(
            64,
            16,
            obs_spec=env.obs_spec,
            action_spec=policy.action_spec,
            value=kind == "ppo",
            device=device,
            resident=True,
        )
        if kind == "ppo":
            algorithm = gw.PPO(gw.PPOCfg(num_steps=16, num_epochs=2, **how), policy)
            collector = gw.TorchVectorCollector(env, policy)
        else:
            algorithm = gw.GRPO(gw.GRPOCfg(num_steps=16, num_epochs=2, group_size=8, **how), policy)
            collector = gw.TorchGroupCollector(env, policy, group_size=8)
        assert algorithm.stay_on_device() is None
        if not recorded:  # calls in place of replays
            algorithm.resident._replayed._recorder = collector._fill._recorder = None
        for _ in range(WARM_UP + 1):
            iterate(algorithm, collector, buffer, 16)
            collector.metrics()
        for _ in range(3):
            torch.cuda.set_sync_debug_mode("error")
            try:
                algorithm.set_progress(0.5)
                iterate(algorithm, collector, buffer, 16)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            collector.metrics()  # what is told crosses once an iteration
        assert algorithm.resident.is_recorded == recorded
        assert collector._fill.is_recorded == recorded
        found.append((parameters(algorithm).cpu(), collector.metrics()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-4)
    assert found[0][1] == pytest.approx(found[1][1])


def test_a_subclass_says_itself_that_its_parts_stay_on_the_device():
    """What it reads besides tensors would be what it was when the update was recorded."""

    class OwnTerms(gw.PPO):
        def terms(self, batch, evaluation):
            return super().terms(batch, evaluation)

    class OwnUpdate(gw.PPO):
        def update(self, rollout):
            return super().update(rollout)

    class Says(OwnTerms):
        learn = gw.PPO.learn

    def of(cls):
        policy = gw.ActorCritic(ENVS["cartpole"](2).observation_space, ENVS["cartpole"](2).action_space)
        return cls(gw.PPOCfg(), policy).stay_on_device()

    assert of(OwnTerms) == "OwnTerms has a terms() that may read what Python changes, and no learn() of its own"
    assert of(OwnUpdate) == "OwnUpdate has a update() that may read what Python changes, and no learn() of its own"
    assert of(Says) is None
