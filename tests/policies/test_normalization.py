import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tensordict import TensorDict

from groupwise.policies.actor_critic import ObsNormalizer, RewardNormalizer, RunningMeanStd

NUMBERS = st.floats(-1e4, 1e4, width=32)


def moments(statistics):
    return statistics.mean.numpy(), statistics.var.numpy(), statistics.count.item()


def full(*shape):
    return torch.ones(*shape, dtype=torch.bool)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 7).flatmap(lambda n: arrays(np.float32, (n, 2), elements=NUMBERS)), min_size=1, max_size=4)
)
def test_running_moments_are_those_of_all_data(chunks):
    statistics = RunningMeanStd((2,))
    for chunk in chunks:
        statistics.update(torch.from_numpy(chunk), full(len(chunk)))
    data = np.concatenate(chunks).astype(np.float64)
    mean, var, count = moments(statistics)
    np.testing.assert_allclose(mean, data.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(var, data.var(0), rtol=1e-7, atol=1e-7)
    assert count == len(data)


def test_statistics_before_any_data_are_the_identity():
    x = torch.tensor([[3.0, -4.0]])
    statistics = RunningMeanStd((2,))
    assert torch.equal(statistics.normalize(x), x)
    statistics.update(x, torch.tensor([False]))
    assert torch.equal(statistics.normalize(x), x)


def test_what_is_masked_out_may_be_anything():
    x = torch.tensor([[1.0], [float("nan")], [3.0], [float("inf")]])
    statistics = RunningMeanStd((1,))
    statistics.update(x, torch.tensor([True, False, True, False]))
    # mean of 1 and 3 is 2, population variance 1
    assert (statistics.mean.item(), statistics.var.item(), statistics.count.item()) == (2.0, 1.0, 2.0)


def test_statistics_are_those_of_both_ranks(two_ranks):
    halves = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)) * 3 + 7
    masks = torch.rand(2, 5, generator=torch.Generator().manual_seed(1)) < 0.6

    def updated(x, mask, *all_sum):
        statistics = RunningMeanStd((3,))
        statistics.update(x, mask, *all_sum)
        return torch.cat([statistics.mean, statistics.var, statistics.count[None]])

    parts = zip(halves, masks, strict=True)
    torch.testing.assert_close(two_ranks(updated, *parts), updated(halves, masks), rtol=1e-12, atol=0)


def test_normalize_by_hand_and_clip():
    statistics = RunningMeanStd((1,))
    statistics.shift.fill_(2.0)
    statistics.scale.fill_(0.5)
    # (6 - 2) / sqrt(4) = 2; (100 - 2) / 2 = 49, clipped
    torch.testing.assert_close(
        statistics.normalize(torch.tensor([[6.0], [100.0], [-100.0]])), torch.tensor([[2.0], [10.0], [-10.0]])
    )


def test_constant_data_normalises_to_zero():
    statistics = RunningMeanStd(())
    statistics.update(torch.full((4,), 5.0), full(4))
    assert statistics.normalize(torch.tensor(5.0)).item() == 0.0


def test_bytes_are_normalised_and_images_are_not():
    vector, image = spaces.Box(0, 255, (2,), np.uint8), spaces.Box(0, 255, (8, 8, 3), np.uint8)
    assert ObsNormalizer(spaces.Dict({"a": vector, "b": image})).paths == [("a",)]
    assert not ObsNormalizer(image).paths
    normalizer = ObsNormalizer(vector)
    obs = torch.tensor([[0, 7], [2, 7], [4, 7]], dtype=torch.uint8)
    normalizer.update(obs, full(3))
    # mean 2 and variance 8 / 3; a constant element is 0
    torch.testing.assert_close(normalizer(obs)[:, 0], torch.tensor([-1.0, 0.0, 1.0]) * 1.5**0.5)
    assert not normalizer(obs)[:, 1].any()


def test_obs_normalizer_leaves_the_rest_alone():
    space = spaces.Dict(
        {
            "x": spaces.Box(-9, 9, (2,)),
            "n": spaces.Discrete(3),
            "t": spaces.Tuple((spaces.Box(0, 255, (4,), np.int32), spaces.Box(0, 9, ()))),
        }
    )
    normalizer = ObsNormalizer(space)
    assert normalizer.paths == [("t", "1"), ("x",)]
    tree = TensorDict({"0": torch.arange(12, dtype=torch.int32).reshape(3, 4), "1": torch.tensor([1.0, 2.0, 3.0])}, [3])
    obs = TensorDict(
        {"x": torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]]), "n": torch.tensor([0, 1, 2]), "t": tree}, [3]
    )
    before = obs.clone()
    normalizer.update(obs, full(3))
    out = normalizer(obs)
    # 1, 2, 3 has mean 2 and population variance 2/3: (1 - 2) / sqrt(2/3) = -1.2247449
    torch.testing.assert_close(out["t", "1"], torch.tensor([-1.2247449, 0.0, 1.2247449]))
    torch.testing.assert_close(out["x"], torch.tensor([[-1.2247449, 0.0], [0.0, 0.0], [1.2247449, 0.0]]))
    assert torch.equal(out["n"], before["n"])
    assert torch.equal(out["t", "0"], before["t", "0"])
    assert (obs == before).all(), "the given observation was changed"


def test_obs_normalizer_of_integers_does_nothing():
    obs = torch.tensor([1, 2])
    normalizer = ObsNormalizer(spaces.Discrete(3))
    normalizer.update(obs, full(2))
    assert normalizer(obs) is obs


def rollout_of(reward, terminated, truncated, valid):
    keys = {"terminated": terminated, "truncated": truncated, "valid": valid}
    leaves = {name: torch.tensor([mask], dtype=torch.bool) for name, mask in keys.items()}
    return TensorDict({"reward": torch.tensor([reward]), **leaves}, [1, len(reward)])


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_reward_normalizer_by_hand(end):
    # gamma 0.5; first episode rewards 1, 2: returns 1 + 0.5 * 2 = 2 and 2; dead slot; second episode, cut: 6
    # returns 2, 2, 6: mean 10/3, population variance (16/9 + 16/9 + 64/9) / 3 = 32/9, deviation 1.8856181
    flags = {"terminated": [0, 0, 0, 0, 0], "truncated": [0, 0, 0, 0, 0]} | {end: [0, 1, 0, 0, 0]}
    rollout = rollout_of([1.0, 2.0, float("nan"), 6.0, 9.0], **flags, valid=[1, 1, 0, 1, 0])
    normalizer = RewardNormalizer(0.5)
    normalizer.update(rollout)
    # 6 / 1.8856181 = 3.1819805; the sign and zero of a reward never change
    torch.testing.assert_close(normalizer(torch.tensor([6.0, 0.0, -6.0])), torch.tensor([3.1819805, 0.0, -3.1819805]))
