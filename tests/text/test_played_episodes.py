"""Episodes of text environments, played by `groupwise sample` and `gw.sample`."""

import random

import pytest
from text_games import Guess
from text_runs import train
from tiny_tokenizers import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import groupwise as gw
from groupwise.cli import main
from groupwise.errors import ConfigError
from groupwise.plugins import TEXT_ENVS
from groupwise.text import evaluation
from groupwise.text.calls import Call
from groupwise.text.generation import Completion

ONE = {"max_new_tokens": 2, "stop": tuple("0123456789 ")}
PLUGIN = """
import groupwise as gw
from text_games import Guess
gw.register_text_env("played/Guess-v0")(Guess)
"""


class Unseeded(Guess):
    """Draws from the process, and shows it."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return str(random.randrange(10**6)), {}


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    task = gw.TextTask(env=Unseeded, max_turns=3, data_size=20, eval_size=4)
    return train(task, model, tmp_path_factory.mktemp("played") / "run", sampling=ONE)


def test_an_episode_is_what_the_environment_says(run):
    episodes = gw.sample(run, count=40)
    assert len(episodes) == 40
    for episode in episodes:
        turns = [message["content"] for message in episode.messages if message["role"] == "assistant"]
        told = [message["content"] for message in episode.messages if message["role"] == "user"]
        possible = []
        for secret in range(10):
            game = Guess()
            game.reset(seed=0)
            game.secret = secret
            steps = [game.step(turn) for turn in turns[: len(told)]]
            possible.append(([step[0] for step in steps], [step[1] for step in steps]) == (told, episode.rewards))
        assert any(possible)
        assert (episode.success is True) == (episode.stop_reason == "terminated")
    assert {"terminated", "truncated"} <= {episode.stop_reason for episode in episodes}
    first = str(episodes[0]).splitlines()
    assert first[0] == episodes[0].start
    assert first[1].startswith("[turn 1, reward ")
    assert first[2].startswith("[environment] ")
    assert first[-1].startswith(
        f"[end] {episodes[0].stop_reason}, {'won' if episodes[0].success else 'not won'}: reward "
    )


def test_a_seed_repeats_episodes_and_others_begin_elsewhere(run):
    episodes = gw.sample(run, count=4, seed=3)
    random.random()  # the environment draws from a generator of its own
    assert gw.sample(run.path, count=4, seed=3, env=Unseeded) == episodes
    assert gw.sample(run, count=2, seed=3) == episodes[:2]
    assert {episode.start for episode in gw.sample(run, count=4, seed=4)} != {episode.start for episode in episodes}
    assert gw.sample(run, count=2, deterministic=True) == gw.sample(run, count=2, deterministic=True)


def test_rows_of_data_begin_episodes(model, tmp_path):
    class Row(Guess):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return str(options["number"]), {}

    rows = [{"number": number} for number in range(30)]
    for eval_data, expected in ((None, range(30)), ([{"number": 77}], [77])):
        task = gw.TextTask(rows, env=Row, eval_data=eval_data)
        played = train(task, model, tmp_path / str(eval_data is None), sampling=ONE, total_steps=20)
        assert {int(episode.start) for episode in gw.sample(played, count=5)} <= {*expected}


@pytest.fixture
def plugin(tmp_path):
    file = tmp_path / "my_game.py"
    file.write_text(PLUGIN)
    yield ["--plugin", str(file)]
    TEXT_ENVS.pop("played/Guess-v0", None)


def test_the_command_plays_models_and_runs(model, plugin, tmp_path, capsys):
    settings = ["--model", str(model), "--task.max-turns", "2", "--sampling.max-new-tokens", "4"]
    assert main(["sample", "played/Guess-v0", *settings, "--count", "2", "--seed", "5", *plugin]) == 0
    out = capsys.readouterr().out
    assert out.count("[end] ") == 2
    path = str(tmp_path / "run")
    budget = [
        "--algorithm.group-size",
        "4",
        "--num-prompts",
        "2",
        "--total-iterations",
        "1",
        "--algorithm.learning-rate=1e-30",
    ]
    assert main(["train", "played/Guess-v0", *settings, *budget, "--run-dir", path]) == 0
    capsys.readouterr()
    for words, same in ((["--seed", "5"], True), (["--seed", "5"], True), (["--seed", "6"], False)):
        assert main(["sample", path, "--count", "2", *words]) == 0
        assert (capsys.readouterr().out == out) == same  # of a run that has learned nothing
    assert main(["sample", "played/Guess-v0", "--model", str(model), "--cuont", "2"]) == 2
    assert "unknown option --cuont" in capsys.readouterr().err


def test_prompts_are_of_runs_without_an_environment(run, model, tmp_path, capsys):
    with pytest.raises(ConfigError, match="prompt = 'x': the run has an environment, whose first observation"):
        gw.sample(run, "x")
    assert main(["sample", str(run.path), "x"]) == 2
    assert "leave it out" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="the environment was given in Python; fix: give it again as env"):
        gw.sample(run.path)


def test_samples_of_a_run_with_tools_call_them(model, tmp_path, monkeypatch):
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    tokenizer = tiny_tokenizer()
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
        )
    )
    policy = gw.CausalLM(network, tokenizer=tokenizer, sampling=gw.SamplingCfg(max_new_tokens=2))
    task = gw.TextTask(
        [{"prompt": "2 + 5 = ?"}] * 4, tools=[add], max_turns=2, reward=lambda completions, **_: [0.0] * 8
    )
    run = gw.train(
        task, gw.GRPOCfg(group_size=4), policy=policy, num_prompts=2, total_iterations=1, run_dir=tmp_path / "run",
        logging={"progress": "none"},
    )  # fmt: skip

    def scripted(policy, texts, seeds, sampling, deterministic=False, pasts=None):
        calls = ["7" in tokenizer.decode(text) for text in texts]
        turns = ["It is 7." if answered else str(Call("add", {"a": 2, "b": 5})) for answered in calls]
        ids = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
        return [[Completion(one, [0.0] * len(one), "stop")] * len(row) for one, row in zip(ids, seeds, strict=True)]

    monkeypatch.setattr(evaluation, "complete", scripted)
    for texts in (gw.sample(run, "2 + 5 = ?", 2), gw.sample(run.path, "2 + 5 = ?", 2, policy=policy, tools=[add])):
        assert len(texts) == 2
        for text in texts:
            assert text.startswith(str(Call("add", {"a": 2, "b": 5})))
            assert text.endswith("It is 7.")
    with pytest.raises(ConfigError, match="tools"):
        gw.sample(run.path, "2 + 5 = ?", policy=policy)
