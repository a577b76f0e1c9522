"""The example for MuJoCo Warp: it trains, its steps are MuJoCo's, and rows start and are copied bit for bit."""

import re

import numpy as np
import pytest
import torch
from scripts import ROOT, load

from groupwise.envs.starts import verify_group_start
from groupwise.functional.random import RowRandom

SCRIPT = ROOT / "examples" / "mujoco_warp_push.py"
pytest.importorskip("mujoco_warp")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # kernels are compiled the first time, a minute or two


@pytest.fixture(scope="module")
def example():
    return load(SCRIPT)


def test_it_trains(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example, "SUBSTEPS", 1)  # all five are recorded for each number of environments
    monkeypatch.setattr("sys.argv", ["script", "--total-steps=300", "--num-envs=8", f"--run-dir={tmp_path / 'run'}"])
    example.main()
    out = capsys.readouterr().out
    assert "share their start by native" in out
    assert re.search(r"^\d+% of 100 cubes reach their goals, return -\d", out, re.MULTILINE)


def test_a_step_is_mujocos(example):
    import mujoco

    env, zero = example.CubePush(1), torch.zeros(1, dtype=torch.int64)
    state, data = env.initial(RowRandom(zero, zero)), mujoco.MjData(env.model)
    draws = np.random.default_rng(0)
    for _ in range(20):
        data.qpos, data.qvel = state["qpos"][0].double().numpy(), state["qvel"][0].double().numpy()
        data.qacc_warmstart = state["qacc_warmstart"][0].double().numpy()
        data.ctrl = draws.uniform(-1, 1, 3).astype(np.float32)
        state, _, _ = env.transition(state, torch.tensor(data.ctrl, dtype=torch.float32)[None], RowRandom(zero, zero))
        for _ in range(example.SUBSTEPS):
            mujoco.mj_step(env.model, data)
        np.testing.assert_allclose(state["qpos"][0], data.qpos, atol=1e-3)
    assert (state["qpos"][0, :3] - torch.tensor(example.FOLDED)).abs().max() > 0.1  # the arm moved


def test_rows_share_starts_and_copies_go_on_bit_for_bit(example):
    report = verify_group_start(example.CubePush(4))
    assert (report.start_mode, report.start_varies, report.noise_varies) == ("native", True, False)
    env, everyone = example.CubePush(4), torch.ones(4, dtype=torch.bool)
    env.start(everyone.numpy(), np.arange(4), np.arange(4))
    action = torch.tensor([0.5, -0.3, 0.1]).expand(4, 3)
    env.step(action)
    rows = env.copied(env.rows, everyone, torch.full((4,), 2), torch.zeros(4, dtype=torch.int64))
    for _ in range(5):
        rows, step = env.stepped(rows, action)
        assert all(torch.equal(step.obs[row], step.obs[2]) for row in range(4))
