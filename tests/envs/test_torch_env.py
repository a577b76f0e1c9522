import numpy as np
import pytest
import torch
from gymnasium import spaces

import groupwise as gw
from groupwise.data.spaces import obs_spec
from groupwise.envs.starts import verify_group_start
from groupwise.envs.torch_env import TorchGroupEnv
from groupwise.errors import DataError, EnvError, GroupStartError

N = 4
ALL = np.ones(N, np.bool_)
STARTS = np.array([3, 8, 3, 8], np.int64)
NOISE = np.array([1, 2, 3, 4], np.int64)
BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Drift(TorchGroupEnv):
    """A walker that drifts with the wind and ends beyond 3; its state is a dictionary."""

    def __init__(self, num_envs=N, limit=50, **options):
        self.options = options
        super().__init__(
            num_envs,
            env_id="Drift",
            observation_space=BOX,
            action_space=spaces.Box(-1, 1, (1,), np.float32),
            max_episode_steps=limit,
        )

    def initial(self, random):
        return {"x": random.uniform(low=-1.0, high=1.0), "wind": random.normal(2)}

    def transition(self, state, action, random):
        if "cheat" in self.options:
            gust = torch.randn(self.num_envs)
        elif "calm" in self.options:
            gust = torch.zeros(self.num_envs)
        else:
            gust = random.normal(std=0.1)
        if "in_place" in self.options:
            state["x"] += action[:, 0]
            x = state["x"]
        else:
            x = state["x"] + action[:, 0] + gust
        if "drop" in self.options:
            return {"x": x}, -x.abs(), x.abs() > 3
        reward = -x.abs()[:, None] if "column" in self.options else -x.abs()
        return {"x": x, "wind": state["wind"] * 0.9}, reward, x.abs() > 3

    def observe(self, state):
        return torch.stack([state["x"], state["wind"][:, 0]], dim=1)


def push(*amounts):
    return torch.tensor([[amount] for amount in amounts])


def still(num_envs=N):
    return torch.zeros(num_envs, 1)


def mask(*rows):
    return np.isin(np.arange(N), rows)


class Dice(TorchGroupEnv):
    """Shows the last uniform number of its row."""

    def __init__(self):
        box = spaces.Box(0, 1, (1,), np.float32)
        super().__init__(N, env_id="Dice", observation_space=box, action_space=box, max_episode_steps=9)

    def initial(self, random):
        return random.uniform(1)

    def transition(self, state, action, random):
        return random.uniform(1), torch.zeros(N), torch.zeros(N, dtype=torch.bool)


def test_start_and_steps_never_share_numbers():
    env = Dice()
    numbers = [env.start(ALL, NOISE, NOISE)]  # one seed for both streams
    numbers += [env.step(still()).obs for _ in range(5)]
    assert len(torch.cat(numbers).unique()) == 6 * N


def test_check_of_the_start_passes_and_reports_noise():
    report = verify_group_start(Drift())
    assert (report.start_mode, report.start_varies, report.noise_varies) == ("native", True, True)
    assert verify_group_start(Drift(calm=True)).noise_varies is False


def test_global_randomness_is_refused():
    with pytest.raises(
        GroupStartError, match=r"Drift .*; fix: draw all randomness from the argument random of initial"
    ):
        verify_group_start(Drift(cheat=True))


def test_rows_that_never_started_are_paused():
    env = Drift()
    env.start(mask(2), STARTS, NOISE)
    step = env.step(push(9.0, 9.0, 9.0, 9.0))
    assert step.terminated.tolist() == [False, False, True, False]


def test_limit_truncates_and_says_nothing_of_termination():
    env = Drift(limit=3, calm=True)
    env.start(ALL, STARTS, NOISE)
    for count in range(1, 3):
        assert not env.step(still()).truncated.any(), count
    env.start(mask(1), STARTS, NOISE)
    end = env.step(push(9.0, 0.0, 0.0, 0.0))
    assert end.truncated.tolist() == [True, False, True, True]
    assert end.terminated.tolist() == [True, False, False, False]  # both, as in Gymnasium
    assert not env.step(still()).truncated.any()
    assert env.step(still()).truncated.tolist() == [False, True, False, False]


def test_resets_of_other_rows_do_not_disturb_a_rows_stream():
    calm, busy = Drift(), Drift()
    calm.reset(seed=5)
    busy.reset(seed=5)
    busy.reset(mask=mask(1))
    assert torch.equal(calm.reset(mask=mask(0))[0], busy.reset(mask=mask(0))[0])


def test_works_under_inference_mode():
    with torch.inference_mode():
        env = Drift()
        env.start(ALL, STARTS, NOISE)
        assert env.step(still()).obs.shape == (N, 2)


def play(env):
    env.start(ALL, STARTS, NOISE)
    env.step(still())


class Blind(Drift):
    observe = TorchGroupEnv.observe


class TwoValues(Drift):
    def transition(self, state, action, random):
        return super().transition(state, action, random)[:2]


class OneRow(Drift):
    def initial(self, random):
        return {name: leaf[0] for name, leaf in super().initial(random).items()}


class Looks(Drift):
    """Observes something else than its space says."""

    def __init__(self, made, space=BOX):
        super().__init__()
        self.made, self.obs_spec = made, obs_spec(space)

    def observe(self, state):
        return self.made


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Looks(torch.zeros(N, 1)), r"observe of Drift returned observations \[4, 1\], expected \[4, 2\]; fix: "),
        (Looks(torch.zeros(2)), r"returned observations \[2\], expected \[4, 2\]"),
        (Looks({"x": torch.zeros(N, 2)}), r"returned observations dict, expected \[4, 2\]"),
        (Looks(torch.zeros(N, 2), spaces.Dict(x=BOX)), "returned observations as a Tensor, expected x by name"),
        (Looks({"y": torch.zeros(N, 2)}, spaces.Dict(x=BOX)), "returned observations without 'x'"),
        (Looks({"x": torch.zeros(N)}, spaces.Dict(x=BOX)), r"returned observations 'x' \[4\], expected \[4, 2\]"),
    ],
)
def test_observations_are_what_the_space_says(env, message):
    with pytest.raises(EnvError, match=message):
        env.reset(seed=0)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (TwoValues(), r"returned 2 values, expected \(state, reward, terminated\); fix: return all three"),
        (OneRow(), r"initial of .* returned states \[2?\], expected \[4, \.\.\.\]: a row for each environment"),
        (Drift(in_place=True), "wrote into the state"),
        (Drift(drop=True), "returned states"),
        (Drift(column=True), r"rewards \[4, 1\]"),
        (Blind(), "define observe"),
    ],
)
def test_impure_or_misshapen_environments_are_refused(env, message):
    with pytest.raises(EnvError, match="before anything started"):
        env.step(still())
    with pytest.raises(EnvError, match=message):
        play(env)


class Bytes(Drift):
    """Says that it shows bytes, and shows floats."""

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.env_id = "Bytes"
        self.observation_space = spaces.Box(0, 255, (2,), np.uint8)
        self.obs_spec = obs_spec(self.observation_space)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_observations_are_not_changed_to_fit_the_space(algorithm, tmp_path):
    with pytest.raises(DataError, match=r"the observation of Bytes has dtype torch\.float32, expected torch\.uint8"):
        gw.train(Bytes, algorithm, num_envs=N, total_steps=64, run_dir=tmp_path / "run")


class Named(Drift):
    """Observes a plain dictionary, of numbers in double precision far from 0."""

    def __init__(self, num_envs=N):
        super().__init__(num_envs)
        far = spaces.Box(-np.inf, np.inf, (), np.float64)
        self.observation_space = spaces.Dict(place=spaces.Dict(x=far), wind=BOX)
        self.obs_spec = obs_spec(self.observation_space)

    def observe(self, state):
        return {"place": {"x": 5e6 + state["x"].double()}, "wind": state["wind"], "more": state["x"]}


@pytest.mark.parametrize(
    "algorithm",
    [gw.PPOCfg(), gw.GRPOCfg(group_size=2), gw.GRPOCfg(group_size=2, collection={"partial_groups": "truncate"})],
)
def test_policies_act_on_the_numbers_of_the_rollout(algorithm, tmp_path):
    obs = Named().reset(seed=0)
    assert (obs["place", "x"].dtype, obs.batch_size) == (torch.float32, (N,))
    assert "more" not in obs.keys()  # noqa: SIM118  of a TensorDict
    options = {"num_envs": N, "total_steps": 400, "policy": {"normalize_obs": True}, "run_dir": tmp_path / "run"}
    metrics = gw.train(Named, algorithm.model_copy(update={"num_steps": 16}), **options).metrics()
    assert len(metrics) > 1
    assert max(row["rollout/sampler_kl"] for row in metrics) < 1e-9
