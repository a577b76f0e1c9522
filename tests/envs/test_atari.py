import ale_py
import gymnasium
import pytest

from groupwise.envs.atari import capture_ale, restore_ale
from groupwise.errors import EnvError

gymnasium.register_envs(ale_py)


@pytest.mark.parametrize("continuous", [False, True])
def test_no_action_from_before_sticks_in_the_captured_machine_or_another(continuous):
    def breakout():
        env = gymnasium.make("ALE/Breakout-v5", repeat_action_probability=0.9, continuous=continuous)
        env.reset(seed=0)
        return env.unwrapped.ale

    def path(ale):
        found = []
        for _ in range(8):
            ale.act(ale_py.Action.NOOP)
            found.append(ale.cloneState(include_rng=True).serialize())
        return found

    source, other = breakout(), breakout()
    for held, ale in ((ale_py.Action.LEFT, source), (ale_py.Action.RIGHT, other)):
        for _ in range(10):
            ale.act(held)
    state = capture_ale(source)
    expected = path(source)
    assert expected[0] != expected[-1]
    for ale in (source, other):
        restore_ale(ale, state)
        assert path(ale) == expected


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
    class Ale:
        def cloneState(self, include_rng):
            return self

        def serialize(self):
            return bytes(100)

    with pytest.raises(EnvError, match=r"state of 100 bytes is not as in ale-py 0\.12; fix"):
        capture_ale(Ale())
