"""SkyRL's environments: a row of the data is the start; turns, rewards and ends."""

import pytest
from public_games import game

import groupwise as gw
from groupwise.errors import ConfigError, EnvError
from groupwise.text.envs import TextEpisode, check_text_starts
from groupwise.text.games.skyrl import SkyRL
from groupwise.text.task import Start

base = pytest.importorskip("skyrl_gym.envs.base_text_env")
ROW = {
    "prompt": [{"role": "user", "content": "2 + 3?"}],
    "reward_spec": {"ground_truth": "5"},
    "extra_info": {"max_turns": 3},
}


def test_a_row_is_an_episode_of_several_turns():
    env = game("skyrl:gsm8k_multi_turn")()
    assert env.reset(seed=1, options=ROW) == (tuple(ROW["prompt"]), {})
    observation, reward, *rest = env.step("#### 4")
    assert "#### ANSWER" in observation
    assert reward == pytest.approx(0.2 / 3)
    assert rest == [False, False, {}]
    assert env.step("#### 5") == ("", 1.0, True, False, {"success": True})
    env.reset(seed=2, options=ROW | {"reward_spec": {"ground_truth": "6"}})
    assert [env.step("five")[1:] for _ in range(3)][-1] == (0.0, True, False, {"success": False})


def test_members_of_a_row_share_its_start():
    def play(episode, start, prompt):
        turns = ["#### 1", "one"]
        for turn in turns:
            if episode.ending is None:
                episode.step(turn)
        return turns

    starts = [Start(seed, ROW | {"reward_spec": {"ground_truth": str(seed)}}) for seed in (1, 2)]
    report = check_text_starts(game("skyrl:gsm8k_multi_turn"), "auto", starts, play)
    assert (report.mode, report.turns, report.start_varies) == ("seed", 3, True)


def test_a_class_of_your_own_is_given_in_python_and_closed():
    closed = []

    class Echo(base.BaseTextEnv):
        def __init__(self, extras):
            super().__init__()
            self.word = extras["word"]

        def init(self, prompt):
            return f"{prompt} {self.word}", {}

        def step(self, action):
            said = [{"role": "user", "content": part} for part in (action, self.word)]
            return {"observations": said, "reward": 0.5, "done": False, "metadata": {}}

        def close(self):
            closed.append(self.word)

    env = SkyRL(Echo)
    assert env.reset(options={"prompt": "say", "word": "a"}) == ("say a", {})
    assert env.step("x") == ("x\na", 0.5, False, False, {})
    env.reset(options={"prompt": "say", "word": "b"})
    env.close()
    env.close()
    assert closed == ["a", "b"]
    assert gw.TextTask([{"prompt": "say", "word": "a"}], env=lambda: SkyRL(Echo)).given["env"]


@pytest.mark.parametrize("name", ["lcb", "search", "text2sql", "searchcode", "os:system"])
def test_names_that_run_programs_or_ask_servers_are_refused(name):
    with pytest.raises(
        ConfigError, match=rf"^skyrl:{name}: expected aime, gsm8k, .*; fix: in Python, env=lambda: SkyRL"
    ):
        game(f"skyrl:{name}")()


def test_rows_are_needed():
    with pytest.raises(EnvError, match=r"^SkyRL needs rows with a column 'prompt'; fix: data="):
        TextEpisode(game("skyrl:gsm8k")()).reset(Start(0))
