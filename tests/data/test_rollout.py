import pytest
import torch
from tensordict import TensorDict

from groupwise.data.rollout import (
    RolloutBuffer,
    TensorSpec,
    all_finite,
    allocate,
    find_nonfinite,
    lengthen,
    transition_view,
)
from groupwise.errors import DataError, DivergedError

OBS = {"image": TensorSpec((2, 2), torch.uint8), "inner": {"speed": TensorSpec((3,), torch.float32)}}


def make_buffer(value=True, **settings):
    return RolloutBuffer(2, 3, obs_spec=OBS, action_spec=TensorSpec((), torch.int64), value=value, **settings)


def test_allocate_follows_a_nested_spec():
    out = allocate(OBS, 4, 5)
    assert isinstance(out, TensorDict)
    assert out["image"].shape == (4, 5, 2, 2)
    assert out["image"].dtype == torch.uint8
    assert out["inner", "speed"].shape == (4, 5, 3)
    assert out.batch_size == (4, 5)


def test_a_fresh_rollout_is_empty_and_has_one_slot_more_than_steps():
    rollout = make_buffer().start_rollout()
    assert rollout.shape == (2, 4)
    assert not rollout["valid"].any()
    assert not rollout["loss_mask"].any()
    assert rollout["episode_id"].eq(-1).all()
    assert rollout["group_id"].eq(-1).all()
    assert rollout["reward"].eq(0).all()
    assert {"value", "next_value"} <= set(rollout.keys())
    assert "value" not in make_buffer(value=False).start_rollout()


def test_rollouts_share_no_memory():
    buffer = make_buffer()
    first = buffer.start_rollout()
    first["reward"].fill_(7.0)
    assert buffer.start_rollout()["reward"].eq(0).all()
    assert first["reward"].eq(7.0).all()


def test_get_returns_the_rollout_itself_or_its_flat_transitions():
    buffer = make_buffer()
    rollout = buffer.start_rollout()
    rollout["reward"].copy_(torch.arange(8.0).reshape(2, 4))
    buffer.add(rollout)
    assert buffer.get(flatten=False) is rollout
    # slots 3 and 7 are the padded last ones
    assert buffer.get(flatten=True)["reward"].tolist() == [0, 1, 2, 4, 5, 6]
    assert buffer.get(flatten=True)["obs", "image"].shape == (6, 2, 2)
    assert transition_view(rollout)["reward"].data_ptr() == rollout["reward"].data_ptr()


def test_a_buffer_without_a_number_of_rows_takes_any():
    buffer = RolloutBuffer(0, 3, obs_spec=OBS, action_spec=TensorSpec((), torch.int64), value=True)
    whole = make_buffer().start_rollout()
    for rollout in (whole, whole[:1]):
        buffer.add(rollout)
        assert buffer.get() is rollout
    with pytest.raises(DataError, match=r"batch \[1, 4\], expected \[2, steps \+ 1\]"):
        make_buffer().add(whole[:1])
    with pytest.raises(DataError, match=r"batch \[2, 1\], expected \[rows, steps \+ 1\]"):
        buffer.add(whole[:, :1])


def test_get_before_add_says_what_to_do():
    with pytest.raises(DataError, match=r"empty; fix: buffer\.add"):
        make_buffer().get()


def test_lengthen_keeps_what_is_there_and_adds_empty_slots():
    rollout = make_buffer().start_rollout()
    rollout["reward"].fill_(3.0)
    rollout["valid"].fill_(True)
    rollout["episode_id"].fill_(0)
    longer = lengthen(rollout, 3)
    assert longer.shape == (2, 7)
    assert longer["reward"].tolist() == [[3, 3, 3, 3, 0, 0, 0]] * 2
    assert longer["valid"].tolist() == [[True] * 4 + [False] * 3] * 2
    assert longer["episode_id"].tolist() == [[0, 0, 0, 0, -1, -1, -1]] * 2
    assert longer["obs", "image"].dtype == torch.uint8
    longer["obs", "inner", "speed"][:, 5].fill_(1.0)
    assert longer["obs", "inner", "speed"][:, 6].eq(0).all(), "new slots share no memory"
    assert rollout.shape == (2, 4)


def test_a_longer_rollout_makes_the_next_ones_longer_and_a_shorter_one_does_not():
    buffer = make_buffer()
    buffer.add(lengthen(buffer.start_rollout(), 5))
    assert buffer.start_rollout().shape == (2, 9)
    buffer.add(buffer.start_rollout()[:, :3])
    assert buffer.get().shape == (2, 3)
    assert buffer.start_rollout().shape == (2, 9)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("reward", DataError),
        ("obs.inner.speed", DataError),
        ("value", DivergedError),
        ("next_value", DataError),
        ("sample_log_prob", DivergedError),
    ],
)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named_by_environment_and_step(key, error, number):
    buffer = make_buffer()
    rollout = buffer.start_rollout()
    rollout["valid"][:, :3] = True
    path = tuple(key.split("."))
    rollout[path][1, 2] = number
    with pytest.raises(error, match=rf"{key} of environment 1 at step 2 of the rollout is not finite"):
        buffer.add(rollout)


def test_numbers_in_slots_that_are_not_valid_do_not_matter():
    rollout = make_buffer().start_rollout()
    rollout["reward"].fill_(float("nan"))
    assert find_nonfinite(rollout, rollout["valid"]) == []


def without(rollout, key):
    return rollout.exclude(key)


def with_dtype(rollout, key, dtype):
    return rollout.clone(recurse=False).set(key, rollout[key].to(dtype))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: without(r, "reward"), r"rollout\['reward'\] is missing, expected torch\.float32"),
        (lambda r: without(r, ("obs", "inner", "speed")), r"rollout\[\('obs', 'inner', 'speed'\)\] is missing"),
        (lambda r: with_dtype(r, "reward", torch.float64), r"rollout\['reward'\] is torch\.float64 .*expected torch\.float32 of shape \[N, T\+1\]"),
        (lambda r: r.clone(recurse=False).set("reward", torch.zeros(2, 4, 3)), r"of shape \[2, 4, 3\], expected torch\.float32 of shape \[N, T\+1\]"),
        (lambda r: with_dtype(r, "action", torch.int32), r"rollout\['action'\] is torch\.int32"),
        (lambda r: r[:1], r"rollout has batch \[1, 4\], expected \[2, steps \+ 1\]"),
        (lambda r: r[:, :1], r"rollout has batch \[2, 1\]"),
        (lambda r: r.reshape(-1), r"rollout has batch \[8\]"),
    ],
)  # fmt: skip
def test_a_wrong_layout_is_refused(spoil, message):
    buffer = make_buffer()
    with pytest.raises(DataError, match=message):
        buffer.add(spoil(buffer.start_rollout()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_finite_numbers_whose_sum_is_not_are_finite(dtype):
    large = torch.full((7,), 3e38, dtype=dtype)
    assert all_finite(large)
    assert all_finite(torch.cat([large, -large]))
    assert all_finite(torch.zeros(0))
    for number in (float("nan"), float("inf"), -float("inf")):
        large[3] = number
        assert not all_finite(large)
    assert not all_finite(torch.tensor([float("inf"), -float("inf")]))


def test_normalisers_learn_nothing_from_the_zeros_of_a_dropped_group():
    buffer = make_buffer(on_nonfinite="drop")
    rollout = buffer.start_rollout()
    rollout["valid"][:, :3] = rollout["loss_mask"][:, :3] = True
    rollout["group_id"][:, :3] = torch.tensor([[0], [1]])
    rollout["reward"][1, 2] = float("nan")
    buffer.add(rollout)
    assert rollout["loss_mask"].sum(dim=1).tolist() == rollout["valid"].sum(dim=1).tolist() == [3, 0]
