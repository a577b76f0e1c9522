"""The part of contrib that the default run looks at."""

import pytest


def test_sb3_takes_an_update():
    pytest.importorskip("stable_baselines3")
    from groupwise.contrib.sb3 import GRPO

    model = GRPO("MlpPolicy", "CartPole-v1", n_steps=256, seed=0, device="cpu").learn(512)
    assert model.num_timesteps >= 512
