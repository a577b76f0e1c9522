import ale_py
import gymnasium
import pytest

from groupwise.envs.atari import capture_ale, repeats_ahead, reseed_ale, restore_ale
from groupwise.errors import EnvError

gymnasium.register_envs(ale_py)

LEFT, RIGHT = ale_py.Action.LEFT, ale_py.Action.RIGHT


def breakout(stickiness):
    env = gymnasium.make("ALE/Breakout-v5", obs_type="ram", repeat_action_probability=stickiness)
    env.reset(seed=0)
    return env.unwrapped.ale


def machines(ale, state, action, frames):
    """The machine after each frame; in Breakout the paddle, a part of it, follows the action at once."""
    restore_ale(ale, state)
    found = []
    for _ in range(frames):
        ale.act(action)
        found.append(ale.cloneState(include_rng=False).serialize())
    return found


@pytest.mark.parametrize("stickiness", [0.25, 0.9])
def test_repeats_ahead_are_the_frames_in_which_no_action_is_heard(stickiness):
    ale = breakout(stickiness)
    seen = set()
    for seed in range(12):
        reseed_ale(ale, seed)
        state = capture_ale(ale)
        repeats = repeats_ahead(state.machine, stickiness)
        left, right = (machines(ale, state, action, repeats + 1) for action in (LEFT, RIGHT))
        assert left[:repeats] == right[:repeats]
        assert left[repeats] != right[repeats]
        seen.add(repeats)
    assert len(seen) > 2


@pytest.mark.parametrize("held", [LEFT, RIGHT])
def test_the_held_action_is_found(held):
    ale = breakout(0.5)
    for _ in range(10):
        ale.act(held)
    assert capture_ale(ale).held == held.value


def test_without_stickiness_nothing_is_drawn():
    ale = breakout(0.0)
    assert capture_ale(ale).held == ale_py.Action.NOOP.value


@pytest.mark.parametrize("stickiness", [0.0, 0.25])
def test_a_reset_that_stops_within_a_frame_can_be_captured(stickiness):
    """Q*bert's does; what comes out of the clone then depends on whether the machine is within a frame itself."""

    def qbert():
        env = gymnasium.make("ALE/Qbert-v5", frameskip=1, repeat_action_probability=stickiness)
        env.reset(seed=0)
        return env

    def path(env):
        screens = [env.step(action % 6)[0].tobytes() for action in range(12)]
        return [*screens, env.unwrapped.ale.cloneState(include_rng=True).serialize()]

    source, fresh, running = qbert(), qbert(), qbert()
    path(running)
    state = capture_ale(source.unwrapped.ale)
    expected = path(source)
    for env in (fresh, running, source):
        restore_ale(env.unwrapped.ale, state)
        assert path(env) == expected


def test_a_state_of_another_layout_is_refused():
    with pytest.raises(EnvError, match=r"state of 100 bytes is not laid out as in ale-py 0\.12; fix"):
        repeats_ahead(bytes(100), 0.25)
