"""The groups that a run keeps: what is in them, how many, and that training does not notice."""

import gymnasium
import numpy as np
import pandas
import pytest
from at_events import on
from plain_envs import Plain
from run_folders import logged, same_weights

import groupwise as gw
from groupwise.errors import RunFolderError
from groupwise.report import folder as groups
from groupwise.training.callbacks import choose

QUIET = {"logging": {"progress": "none"}}


def train(path, algorithm, *, kept=8, total_steps=600, **settings):
    env = gw.EnvCfg(id="CartPole-v1", num_envs=4, max_episode_steps=40)
    evaluation = {"interval": 300, "episodes": 2, "num_logged_groups": kept}
    settings = {"policy": {"normalize_obs": True, "normalize_reward": True}} | settings
    return gw.train(env, algorithm, run_dir=path, total_steps=total_steps, evaluation=evaluation, **settings, **QUIET)


def table(run, number=-1):
    return pandas.read_parquet(list(groups.kept_iterations(run.path / "groups").values())[number])


@pytest.mark.parametrize("algorithm", [{"name": "grpo", "group_size": 3}, {"name": "ppo"}], ids=["grpo", "ppo"])
def test_training_does_not_notice(algorithm, tmp_path):
    cfg = algorithm | {"num_steps": 32}
    with_groups, without = (train(tmp_path / str(kept), cfg, kept=kept) for kept in (2, 0))
    assert len(groups.kept_iterations(with_groups.path / "groups")) >= 2
    assert not (without.path / "groups").exists()
    assert same_weights(with_groups, without)
    assert logged(with_groups) == logged(without)


def test_steps_of_groups_are_those_of_the_rollout(tmp_path):
    cfg = gw.GRPOCfg(group_size=3, num_steps=32)
    run = train(tmp_path / "run", cfg, kept=100, preset="grpo")
    last = run.metrics()[-1]
    found = table(run)
    members = found.groupby(["group", "member"])
    assert len(found) == last["rollout/env_steps"]
    assert found.group.nunique() == last["rollout/groups"]
    assert members.reward.sum().mean() == pytest.approx(last["rollout/return_mean"])
    assert set(members.end.last()) <= {"terminated", "truncated"}
    assert (members.step.max() == members.size() - 1).all()
    assert set(found.iteration) == {last["iteration"]}
    assert set(found.env_steps) == {last["env_steps"]}
    # CartPole's actions and observations, siblings in the same first state, groups in their own
    assert set(found.action.str[0]) == {0, 1}
    first = members.observation.first().map(tuple)
    assert first.groupby("group").nunique().eq(1).all()
    assert first.nunique() == found.group.nunique() == found.start.nunique()
    for start, observation in found.groupby("start").observation.first().items():
        own, _ = gymnasium.make("CartPole-v1").reset(seed=int(start))
        assert observation == pytest.approx(own)
    assert members.advantage.first().groupby("group").sum().abs().max() < 1e-4
    assert found.ratio.between(0.5, 2).all()
    assert found.ratio.std() > 0


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_ratios_are_those_of_the_weights_alone(algorithm, tmp_path):
    still = {"name": algorithm, "learning_rate": 1e-30, "num_steps": 32}
    found = table(train(tmp_path / "run", still, total_steps=300), 0)  # though normalisers have learned
    assert found.ratio.to_numpy() == pytest.approx(np.ones(len(found)), abs=1e-5)


def test_episodes_of_ppo_are_members_of_their_row(tmp_path):
    found = table(train(tmp_path / "run", gw.PPOCfg(num_steps=64), kept=100))
    assert found.group.nunique() == 4
    assert found.groupby("group").size().eq(64).all()
    assert found.groupby(["group", "member"]).step.apply(lambda step: step.diff().dropna().eq(1).all()).all()
    assert set(found.start) == {""}
    assert "running" in set(found.groupby(["group", "member"]).end.last())


def test_large_observations_are_left_out(tmp_path):
    class Wide(Plain):
        observation_space = gymnasium.spaces.Box(-1, 1, (groups.MAX_WIDTH + 1,))

    run = gw.train(Wide, gw.PPOCfg(num_steps=16), num_envs=2, total_steps=32, run_dir=tmp_path / "run", **QUIET)
    found = table(run)
    assert found.observation.isna().all()
    assert found.action.notna().all()


def test_the_spread_decides_which_groups_are_kept():
    spread = {group: float((group * 7) % 20) for group in range(20)}
    kept = choose(spread, 8, seed=1)
    assert len(set(kept)) == 8
    by_spread = sorted(spread, key=spread.get)
    assert set(by_spread[-4:]) | set(by_spread[:2]) < set(kept)
    assert kept == choose(spread, 8, seed=1)
    assert {tuple(choose(spread, 8, seed=seed)) for seed in range(9)} != {tuple(kept)}
    for count in range(1, 25):
        assert len(set(choose(spread, count, seed=0))) == min(count, 20)
    assert choose(spread, 1, seed=0) == by_spread[-1:]


@pytest.mark.slow
def test_a_resumed_run_keeps_what_an_uninterrupted_one_does(tmp_path):
    cfg = gw.GRPOCfg(group_size=3, num_steps=32)
    train(tmp_path / "whole", cfg, total_steps=900)

    stop = on("iteration_end", lambda trainer, *_: trainer.interrupt() if trainer.env_steps > 400 else None)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "part", cfg, total_steps=900, callbacks=[stop])
    (tmp_path / "part/groups/000999.parquet").write_bytes(b"of a training that was lost")
    gw.resume(tmp_path / "part")
    kept = [
        {path.name: path.read_bytes() for path in (tmp_path / name / "groups").iterdir()} for name in ("whole", "part")
    ]
    assert kept[0] == kept[1]


def write(folder, iteration, count=500, **columns):
    noise = np.random.default_rng(iteration)
    numbers = {name: noise.normal(size=count) for name in ("reward", "log_prob", "ratio", "advantage")}
    whole = {name: np.zeros(count, np.int64) for name in ("env_steps", "group", "member")} | {"step": np.arange(count)}
    masks = {name: np.arange(count) % 3 == 0 for name in ("loss_mask", "greedy")}
    texts = dict.fromkeys(("start", "end"), ["x"] * count)
    nothing = dict.fromkeys(
        ("observation", "action", "token", "turn", "messages", "reward_parts", "stop_reason", "success")
    )
    groups.write_groups(folder, iteration, nothing | texts | masks | whole | numbers | columns)


def test_columns_are_written_as_they_are(tmp_path):
    vectors = np.arange(12, dtype=np.float32).reshape(4, 3)
    tokens = ["", "Größe", " \N{SNOWMAN}\ud800", "</s>"]
    some = {"messages": ["[]", None, "", None], "success": np.array([1.0, np.nan, 0.0, np.nan])}
    write(tmp_path, 7, 4, observation=vectors, token=tokens, ratio=np.array([1.0, np.nan, 2.0, np.nan]), **some)
    found = groups.read_groups(tmp_path / "000007.parquet")
    assert found["iteration"] == [7] * 4
    assert found["observation"] == vectors.tolist()
    assert found["token"] == ["", "Größe", " \N{SNOWMAN}?", "</s>"]
    assert found["ratio"] == [1.0, None, 2.0, None]
    assert found["loss_mask"] == [True, False, False, True]
    assert found["step"] == [0, 1, 2, 3]
    assert found["action"] == [None] * 4
    assert found["messages"] == some["messages"]
    assert found["success"] == [True, None, False, None]


def test_old_files_make_room_but_the_first(tmp_path, monkeypatch):
    write(tmp_path, 1)
    monkeypatch.setattr(groups, "MAX_MIB", 3.5 * sum(path.stat().st_size for path in tmp_path.iterdir()) / 2**20)
    for iteration in range(2, 8):
        write(tmp_path, iteration)
    assert list(groups.kept_iterations(tmp_path)) == [1, 6, 7]


def test_a_file_has_so_many_values_at_most(tmp_path, monkeypatch):
    write(tmp_path, 1, 50, observation=np.zeros((50, 3)))
    with monkeypatch.context() as patch:
        patch.setattr(groups, "MAX_VALUES", 1_000)
        with pytest.raises(RunFolderError, match=r"it has 1,150 values, more than the limit of 1,000; fix: delete it"):
            groups.read_groups(tmp_path / "000001.parquet", "step")
        write(tmp_path, 2, 50, observation=np.zeros((50, 3)))
        assert groups.read_groups(tmp_path / "000002.parquet", "step")["step"] == list(range(43))  # of 23 values each


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "000001.parquet").write_bytes(b"nothing")
    with pytest.raises(RunFolderError, match=r"000001\.parquet is damaged: .*; fix: delete it"):
        groups.read_groups(tmp_path / "000001.parquet")
    pandas.DataFrame({"prompt": ["1 + 1"]}).to_parquet(tmp_path / "000002.parquet")
    with pytest.raises(RunFolderError, match=r"000002\.parquet has other columns: prompt; fix"):
        groups.read_groups(tmp_path / "000002.parquet")
