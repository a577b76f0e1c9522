"""Simulators of others, by a double for each interface (``simulator_doubles``)."""

import inspect
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from no_waiting import NoWaiting
from simulator_doubles import (
    DOUBLES,
    LIMIT,
    EmbodiChainEnv,
    IsaacLabEnv,
    LearningEnv,
    ManiSkillEnv,
    PlaygroundEnv,
    RslRlEnv,
)

import groupwise as gw
from groupwise.config.algorithm import CollectionCfg
from groupwise.config.run import EnvCfg
from groupwise.envs.make import make_env
from groupwise.errors import EnvError, GroupStartError

NUMBER = spaces.Box(-np.inf, np.inf, (1,), np.float32)
PICTURE = spaces.Dict(rgb=spaces.Box(0, 255, (2, 3), np.uint8))
SEEDED = (LearningEnv, EmbodiChainEnv, ManiSkillEnv)
EVERY = np.ones(4, dtype=np.bool_)
STILL, RIGHT = torch.zeros(4, 1), torch.ones(4, 1)


def flat(obs):
    """The position [N] that an observation shows."""
    for key in ("robot", "qpos", "agent", "policy", "state"):
        if not isinstance(obs, torch.Tensor) and key in obs.keys():  # noqa: SIM118
            obs = obs[key]
    return (obs if isinstance(obs, torch.Tensor) else obs["qpos"]).squeeze(1)


@pytest.fixture(params=DOUBLES, ids=lambda double: double.__name__)
def double(request):
    return request.param


@pytest.mark.parametrize(
    ("double", "space"),
    [
        (LearningEnv, NUMBER),
        (EmbodiChainEnv, spaces.Dict(robot=spaces.Dict(qpos=NUMBER), limit=NUMBER)),  # float64 is stored as float32
        (ManiSkillEnv, spaces.Dict(agent=spaces.Dict(qpos=NUMBER), sensor_data=spaces.Dict(base=PICTURE))),
    ],
)
def test_nested_observations_are_kept_as_dict_spaces(double, space):
    sim = gw.from_torch_sim(double(4))
    assert sim.observation_space == space
    obs = sim.reset(seed=1)
    assert all(leaf.shape[0] == 4 for leaf in ([obs] if isinstance(obs, torch.Tensor) else obs.values(True, True)))


def test_limits_actions_and_names_are_found_under_the_names_of_each_interface(double):
    sim = gw.from_torch_sim(double(4))
    assert (sim.max_episode_steps, sim.num_envs, sim.autoreset) == (LIMIT, 4, "same_step")
    assert sim.action_space.shape == (1,)
    assert bool(np.isinf(sim.action_space.high[0])) == (double in (RslRlEnv, PlaygroundEnv))
    assert sim.env_id == {ManiSkillEnv: "Push-v1"}.get(double, double.__name__)


def test_a_reset_begins_every_episode_anew(double):
    """All rows that stand still reach the limit in the same step, whatever happened before the reset."""
    sim = gw.from_torch_sim(double(4))
    for _ in range(3):
        sim.step(STILL)
    start = flat(sim.reset(seed=2))
    near = start.abs() < 0.1
    for step in range(1, LIMIT + 1):
        outcome = sim.step(STILL)
        assert torch.equal(outcome.terminated & ~near, torch.zeros(4, dtype=torch.bool))
        assert torch.equal(outcome.truncated & ~near, ~near & (step == LIMIT))
        torch.testing.assert_close(outcome.reward[~near], -start.abs()[~near])


def test_simulators_alone_decide_when_episodes_are_reset_and_time_out():
    """``get_observations`` of mujoco_playground resets: it is never called while episodes run. rsl_rl's runner spreads the
    ages of episodes."""
    sim = gw.from_torch_sim(env := PlaygroundEnv(4))
    sim.reset()
    before = env.num_resets
    for _ in range(2 * LIMIT):
        sim.step(STILL)
    assert env.num_resets == before
    env = RslRlEnv(4)
    sim = gw.from_torch_sim(env)
    env.episode_length_buf = torch.tensor([0, 2, 4, 6])
    env.points.position = torch.full((4, 1), 0.9)
    late = torch.stack([sim.step(STILL).truncated for _ in range(LIMIT)])
    assert late.int().argmax(dim=0).tolist() == [7, 5, 3, 1]


class TellsTheEnd(LearningEnv):
    """A simulator of the user's that has final observations."""

    def step(self, action):
        final = self.position + 0.2 * action
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, info | {"final_observation": final}


@pytest.mark.parametrize("double", [*DOUBLES, TellsTheEnd])
def test_final_observations_are_those_of_the_simulator_or_the_ones_before(double):
    sim = gw.from_torch_sim(double(4))
    before = flat(sim.reset(seed=2))
    for _ in range(LIMIT):
        step = sim.step(RIGHT)
        ended = step.terminated | step.truncated
        after = before + 0.2
        expected = after if double in (ManiSkillEnv, TellsTheEnd) else before
        assert torch.equal(flat(step.final_obs)[ended], expected[ended])
        assert torch.equal(flat(step.obs)[~ended], after[~ended])
        before = flat(step.obs)


def test_truncated_episodes_are_bootstrapped_by_the_last_observation_there_is(double):
    sim = gw.from_torch_sim(double(4))
    policy = gw.ActorCritic(sim.observation_space, sim.action_space)
    buffer = gw.RolloutBuffer(4, 24, obs_spec=sim.obs_spec, action_spec=policy.action_spec, value=True)
    rollout = gw.VectorCollector(sim, policy, seed=1).collect(24, buffer.start_rollout())
    cut = rollout["truncated"] & ~rollout["terminated"]
    assert cut.any()
    assert (rollout["next_value"][rollout["terminated"]] == 0).all()
    seen = rollout["value"][cut]  # of the observation before the last action
    if double is ManiSkillEnv:
        assert not torch.isclose(rollout["next_value"][cut], seen).any()
    else:
        torch.testing.assert_close(rollout["next_value"][cut], seen)


def test_time_outs_are_truncations_where_they_are_flagged():
    for horizon, truncated in ((False, True), (True, False)):
        env = IsaacLabEnv(4, is_finite_horizon=horizon)
        sim = gw.from_torch_sim(env)
        env.position = torch.tensor([[0.1], [0.9], [0.9], [0.9]])
        env.elapsed = torch.tensor([0, LIMIT - 1, 0, LIMIT - 1])
        step = sim.step(-RIGHT / 2)
        assert step.terminated.tolist() == [True, not truncated, False, not truncated]
        assert step.truncated.tolist() == [False, truncated, False, truncated]


@pytest.mark.parametrize("double", [IsaacLabEnv, LearningEnv])
def test_numbers_of_rows_may_be_columns(double):
    class Columns(double):
        def step(self, action):
            *parts, info = super().step(action)
            columns = [part[:, None] if isinstance(part, torch.Tensor) and part.dim() == 1 else part for part in parts]
            return *columns, {key: v[:, None] if key == "time_outs" else v for key, v in info.items()}

    found = gw.from_torch_sim(Columns(4)).step(RIGHT)
    expected = gw.from_torch_sim(double(4)).step(RIGHT)
    for name in ("reward", "terminated", "truncated"):
        assert getattr(found, name).shape == getattr(expected, name).shape == (4,)


@pytest.mark.parametrize("double", SEEDED)
def test_success_is_that_of_the_episode_that_ended(double):
    """ManiSkill's info describes the next start in the step in which an episode ends; ``final_info`` does not."""
    sim = gw.from_torch_sim(env := double(4))
    sim.reset(seed=2)
    base = env.unwrapped if double is ManiSkillEnv else env
    base.position, base.elapsed = torch.tensor([[0.1], [-0.9], [0.2], [0.9]]), torch.tensor([0, LIMIT - 1, 0, 0])
    step = sim.step(-RIGHT / 2)  # the first two end: at 0.0, and by the limit
    assert (step.terminated | step.truncated).tolist() == [True, True, False, False]
    assert step.info["success"].tolist()[:2] == [True, False]


def test_a_step_copies_nothing_to_the_host(double):
    """The outcomes are recorded, since some simulators themselves wait."""
    env = double(4)
    sim = gw.from_torch_sim(env)
    groups = sim.as_group_env() if double in SEEDED else None
    outcomes = [env.step(torch.randn(4, 1)) for _ in range(3 * LIMIT)]
    for stepped in (sim, groups):
        if stepped is not None:
            played = iter(outcomes)
            env.step = lambda action, played=played: next(played)
            with NoWaiting():
                for _ in outcomes:
                    stepped.step(STILL)


@pytest.mark.parametrize(
    ("env", "lost"),
    [
        (LearningEnv, ["loses final observations: truncated episodes are valued by the one before"]),
        (EmbodiChainEnv, ["loses final observations"]),
        (IsaacLabEnv, ["loses final observations", "sees 'critic', too, unless policy.actor_keys leaves it out"]),
        (partial(IsaacLabEnv, is_finite_horizon=True), ["flags no time_outs: every end counts", "sees 'critic'"]),
        (RslRlEnv, ["loses final observations"]),
        (PlaygroundEnv, ["loses final observations"]),
        (ManiSkillEnv, []),
        (TellsTheEnd, []),
    ],
)
def test_what_is_lost_is_named(env, lost):
    sim = gw.from_torch_sim(env(4))
    assert ("success" in sim.step(STILL).info) == (env in (*SEEDED, TellsTheEnd))
    notes = sim.notes
    assert len(notes) == len(lost)
    assert all(part in note for note, part in zip(notes, lost, strict=True))


def test_groups_of_observations_are_chosen_by_name():
    sim = gw.from_torch_sim(IsaacLabEnv(4), obs_groups=["policy"])
    assert list(sim.observation_space) == ["policy"]
    assert list(sim.step(STILL).obs.keys()) == ["policy"]
    with pytest.raises(EnvError, match="obs_groups has 'actor', but the observation of IsaacLabEnv has policy, critic"):
        gw.from_torch_sim(IsaacLabEnv(4), obs_groups=["actor"])


class ForgetsStates(ManiSkillEnv):
    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.base_env.set_state_dict = lambda state, env_idx: None


@pytest.mark.parametrize(
    ("double", "mode"),
    [(ManiSkillEnv, "native"), (ForgetsStates, "seed"), (LearningEnv, "seed"), (EmbodiChainEnv, "seed")],
)
def test_members_share_their_start_by_states_or_by_seeds(double, mode):
    groups = gw.from_torch_sim(double(4)).as_group_env()
    assert groups.start_mode == groups.start_report.start_mode == mode
    assert groups.start_report.start_varies
    first = flat(groups.start(EVERY, np.array([5, 5, 6, 6]), np.arange(4))).clone()
    assert first[0] == first[1] != first[2] == first[3]
    for _ in range(3):
        groups.step(RIGHT)
    some = np.array([False, True, True, False])  # members that start later, in other rows and another number of them
    later = flat(groups.start(some, np.array([0, 6, 5, 0]), np.arange(4)))
    assert later[1] == first[2]
    assert later[2] == first[0]
    start = flat(groups.start(EVERY, np.full(4, 11), np.arange(4))).clone()
    groups.step(0.1 * RIGHT)
    groups.start(np.array([True, False, False, False]), np.full(4, 12), np.arange(4))
    torch.testing.assert_close(flat(groups.step(0.1 * RIGHT).obs)[1:], start[1:] + 0.04, msg="these rows ran on")


def test_a_row_is_over_at_its_first_end():
    groups = gw.from_torch_sim(env := LearningEnv(4)).as_group_env()
    groups.start(EVERY, np.arange(4), np.arange(4))
    env.position = torch.tensor([[0.2], [0.9], [0.9], [-0.9]])
    groups.pause(np.array([False, False, False, True]))
    first = groups.step(-RIGHT / 2 * torch.tensor([[1.5], [1], [1], [1]]))
    assert first.terminated.tolist() == [True, False, False, False]
    held = flat(first.obs)[[0, 3]].clone()
    for _ in range(LIMIT):
        step = groups.step(STILL)
        assert step.reward[[0, 3]].tolist() == [0, 0]
        assert not (step.terminated | step.truncated)[[0, 3]].any()
        assert torch.equal(flat(step.obs)[[0, 3]], held)


def test_a_start_that_depends_on_the_row_is_refused():
    class ByRow(LearningEnv):
        def begin(self, rows, generator=None):
            super().begin(rows, generator)
            self.position[rows] += 0.01 * rows[:, None]

    with pytest.raises(GroupStartError, match=r"seed: .*differ at the start, in 'obs' of row 1; fix: .*'none'"):
        gw.from_torch_sim(ByRow(4)).as_group_env()


def test_a_start_that_depends_on_the_company_is_refused():
    """The state of the leader is copied, so that only a start alone shows that it depends on the row."""
    env = ManiSkillEnv(4)
    begin = env.base_env.begin

    def by_row(rows, generator=None):
        begin(rows, generator)
        env.base_env.position[rows] += 0.01 * rows[:, None]

    env.base_env.begin = by_row
    with pytest.raises(GroupStartError, match="native: a row of Push-v1 that starts alone starts apart; seed: "):
        gw.from_torch_sim(env).as_group_env()


@pytest.mark.parametrize("double", [IsaacLabEnv, RslRlEnv, PlaygroundEnv])
def test_starts_that_cannot_be_shared_are_refused_unless_the_user_wants_that(double):
    reason = rf"members of {double.__name__} cannot share a start: its reset takes no seed.*start_mode='none'"
    with pytest.raises(GroupStartError, match=reason):
        make_env(EnvCfg(), grouped=True, env=gw.from_torch_sim(double(4)))
    groups = make_env(EnvCfg(), grouped=True, env=gw.from_torch_sim(double(4), start_mode="none"))
    assert groups.start_report.start_mode == "none"
    groups.start(EVERY, np.zeros(4, np.int64), np.arange(4))
    groups.step(STILL)
    with pytest.raises(EnvError, match="resets no single rows"):
        groups.start(~EVERY, np.zeros(4, np.int64), np.arange(4))
    env = make_env(EnvCfg(), grouped=True, env=gw.from_torch_sim(LearningEnv(4), start_mode="none"))  # which could
    assert (env.start_mode, env.block_size) == ("none", 1)
    assert len(flat(env.start(EVERY, np.full(4, 3), np.arange(4))).unique()) == 4


def test_without_single_resets_all_groups_start_together():
    sim = gw.from_torch_sim(RslRlEnv(8), start_mode="none", obs_groups=["policy"])
    env = make_env(EnvCfg(), grouped=True, env=sim)
    policy = gw.ActorCritic(env.observation_space, env.action_space, actor_only=True)
    with pytest.raises(EnvError, match="starts blocks of 8 rows together, but a group has 3 episodes"):
        gw.GroupCollector(env, policy, group_size=3)
    collector = gw.GroupCollector(env, policy, group_size=4, collection=CollectionCfg())
    buffer = gw.RolloutBuffer(8, 16, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=False)
    rollout = collector.collect(16, buffer.start_rollout())
    valid, step = rollout["valid"][:, :-1], rollout["step"][:, :-1]
    starts = valid & (step == 0)
    assert all(column.all() or not column.any() for column in starts.T)
    assert len(collector.finished) == 8 * int(starts[0].sum())


class NextStep(ManiSkillEnv):
    metadata = {"autoreset_mode": "NextStep"}


class Silent(RslRlEnv):
    num_actions = property()


class Endless(RslRlEnv):
    def step(self, action):
        self.episode_length_buf = torch.zeros(self.num_envs)
        return super().step(action)


class SixValues(RslRlEnv):
    def step(self, action):
        obs, *rest, info = super().step(action)
        return obs, None, obs, *rest, info


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ManiSkillEnv(4, auto_reset=False), "resets no row in the step that ends it"),
        (lambda: NextStep(4), "resets no row in the step that ends it"),
        (dict, "dict has no num_envs or no step"),
        (lambda: Silent(4), "Silent has neither single_action_space nor num_actions"),
        (lambda: Endless(4), "Endless did not reset rows by its episode_length_buf"),
        (lambda: SixValues(4), r"returned 6 values, expected obs, reward, done, info or"),
    ],
)
def test_what_is_no_simulator_is_refused(make, reason):
    with pytest.raises(EnvError, match=reason):
        gw.from_torch_sim(make()).reset()
    with pytest.raises(EnvError, match="start_mode = 'seed': expected 'auto' or 'none'"):
        inspect.unwrap(gw.from_torch_sim)(make(), start_mode="seed")  # the tests check types, too


def test_the_policy_must_be_on_the_device_of_the_simulator():
    sim = gw.from_torch_sim(LearningEnv(4))
    sim.device = torch.device("cuda")
    with pytest.raises(EnvError, match="LearningEnv is on cuda, the policy on cpu; fix: device='cuda'"):
        make_env(EnvCfg(), env=sim)


def train(env, algorithm, steps, tmp_path, **settings):
    return gw.train(env, algorithm, total_steps=steps, run_dir=tmp_path / "run", seed=3, **settings)


PPO = gw.PPOCfg(num_steps=16, minibatch_size=64, num_epochs=4)
GRPO = gw.GRPOCfg(num_steps=16, group_size=4, minibatch_size=64)


@pytest.mark.slow
def test_algorithms_train_on_every_interface(double, tmp_path, capsys):
    run = train(gw.from_torch_sim(double(8)), PPO, 256, tmp_path / "ppo")
    assert len(run.metrics()) == 2
    err = capsys.readouterr().err
    assert ("loses final observations" in err) == (double is not ManiSkillEnv)
    assert "Group starts" not in err
    run = train(gw.from_torch_sim(double(8), start_mode="auto" if double in SEEDED else "none"), GRPO, 256, tmp_path)
    assert len(run.metrics()) >= 2
    mode = "native" if double is ManiSkillEnv else "seed"
    shown = f"shared ({mode}), verified." if double in SEEDED else "not shared."
    assert f"Group starts: {shown}" in capsys.readouterr().err
    assert run.summary["start_mode"] == (f"{mode}, verified" if double in SEEDED else "not shared")


def test_a_callable_is_checked_and_makes_a_second_simulator_for_evaluation(tmp_path):
    def make(num_envs):
        return gw.from_torch_sim(LearningEnv(num_envs))

    assert gw.check_env(make).training.value.start_mode == "seed"
    report = gw.check_env(lambda num_envs: gw.from_torch_sim(RslRlEnv(num_envs)))
    assert "its reset takes no seed" in report.training.reason
    for algorithm in (PPO, GRPO):
        run = train(make, algorithm, 256, tmp_path / algorithm.name, num_envs=8, evaluation={"episodes": 6})
        assert run.summary["episodes"] == 6
        assert gw.evaluate(run, 10).returns == gw.evaluate(run, 10).returns


@pytest.mark.learn
@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=["ppo", "grpo"])
@pytest.mark.parametrize("double", [LearningEnv, ManiSkillEnv])
def test_the_point_learns_to_reach_the_origin(double, algorithm, tmp_path):
    """Who walks straight ends within 5 steps; who stands still or walks at random mostly meets the limit."""
    sim = gw.from_torch_sim(double(32))
    run = train(sim, algorithm, 20_000, tmp_path, policy={"hidden_sizes": (32,)})
    lengths = [entry["rollout/length_mean"] for entry in run.metrics()]
    assert lengths[0] > 5.5
    assert lengths[-1] < 4
