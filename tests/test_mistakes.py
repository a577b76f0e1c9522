"""Forty mistakes of people who are new here: what is said names the value, what was expected, and the way out."""

import re
import traceback

import gymnasium
import numpy as np
import pytest
import shapes
import torch
from plain_envs import Plain
from text_runs import save_model

import groupwise as gw
from groupwise import cli

SMALL = {"name": "grpo", "num_steps": 8, "num_epochs": 1, "minibatch_size": 16, "group_size": 2}


def step_returning(name, **changed):
    """An environment whose steps return something else; None leaves a part out."""

    def step(self, action):
        parts = ("obs", "reward", "terminated", "truncated", "info")
        found = dict(zip(parts, Plain.step(self, action), strict=True)) | changed
        return tuple(part for part in found.values() if part is not LEFT_OUT)

    return type(name, (Plain,), {"step": step})


LEFT_OUT = object()
OldStep = step_returning("OldStep", truncated=LEFT_OUT)
NoReward = step_returning("NoReward", reward=None)
RewardArray = step_returning("RewardArray", reward=np.zeros(2))
NanShown = step_returning("NanShown", obs=np.full(3, np.nan, np.float32))


class OldReset(Plain):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class Unseeded(Plain):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=int(np.random.randint(2**31)))


class NoisyStep(Plain):
    def step(self, action):
        obs, *others = super().step(action)
        return obs + np.random.normal(size=3).astype(np.float32), *others


class Sim(gw.TorchGroupEnv):
    def __init__(self, num_envs):
        box, actions = gymnasium.spaces.Box(-9, 9, (4,), np.float32), gymnasium.spaces.Discrete(2)
        super().__init__(num_envs, observation_space=box, action_space=actions, max_episode_steps=10)

    def initial(self, random):
        return random.uniform(4, low=-1.0, high=1.0)

    def transition(self, state, action, random):
        return state * 0.9, state[:, 0], state[:, 0] > 9


class FloatDone(Sim):
    def transition(self, state, action, random):
        return state, state[:, 0], torch.zeros(len(state))


class TwoValues(Sim):
    def transition(self, state, action, random):
        return state, state[:, 0]


class OneStart(Sim):
    def initial(self, random):
        return torch.zeros(4)


class InPlace(Sim):
    def transition(self, state, action, random):
        state += 1
        return state, state[:, 0], state[:, 0] > 9


def typo(completions, anwser, **columns):
    return [0.0] * len(completions)


def strips(completions, **columns):
    return [float(completion.strip() == "1") for completion in completions]


def lengths(completions, **columns):
    return [float(len(completion)) for completion in completions]


MESSAGE, ROWS = {"role": "user", "content": "12"}, [{"prompt": "12", "answer": "12"}] * 2


class FloatReward(Sim):
    def transition(self, state, action, random):
        return state, 1.0, torch.zeros(len(state), dtype=torch.bool)


class ListState(Sim):
    def initial(self, random):
        return [0.0, 0.0]


BEGUN = [{"prompt": [MESSAGE, {"role": "assistant", "content": "1"}]}] * 2


def dataset_dict():
    import datasets

    return datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A trained run, and a function that trains in the smallest way."""
    folder = tmp_path_factory.mktemp("mistakes")
    model, count = str(save_model(folder / "model", chat=True)), iter(range(100))

    def train(env, **settings):
        common = {"run_dir": folder / f"run{next(count)}", "speed": "off"} | settings
        if not isinstance(env, gw.TextTask):
            return gw.train(env, SMALL, num_envs=2, total_steps=16, evaluation={"episodes": 1}, **common)
        return gw.train(
            env, gw.GRPOCfg(group_size=2), model=model, num_prompts=2, sampling={"max_new_tokens": 4}, total_steps=10, **common
        )  # fmt: skip

    return train(Plain), train


def unchecked(function, *arguments, **named):
    """The call without the tests' own checks of types."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "CHECKED_CALLS", 0)
        return function(*arguments, **named)


def trained(env):
    return lambda run, train: train(env)


def task(rows, reward):
    return lambda run, train: train(gw.TextTask(rows() if callable(rows) else rows, reward=reward))


def setting(name):
    """A name of another library, as a setting of a run on texts."""
    return lambda run, train: gw.TextRunCfg(**{name: 1})


CALL = r"return obs, float\(reward\), terminated, truncated, info"
FIVE = r"expected \(observation, reward, terminated, truncated, info\) with a number as reward"
SEED = r"draw all its randomness from self\.np_random, after super\(\)\.reset\(seed=seed\)"
SPACES = "numbers with spaces between"
ROW = re.escape("expected [2] and [2] of torch.bool")
MISTAKES = {
    # what was done, and patterns of the value, what was expected, and the fix; None: missing
    "1": ("train CartPol-v1", "'CartPol-v1'", "CartPole-v1", "did you mean 'CartPole-v1'"),
    "2": ("train CartPole-v1 --lr 3e-4", "--lr", "--algorithm.learning-rate", "did you mean --algorithm.learning-rate"),
    "3": ("train CartPole-v1 --n-timesteps 9", "--n-timesteps", "--total-steps", r"did you mean --total-steps\?"),
    "4": ("train CartPole-v1 --algo ppo", "--algo;", "--algorithm", r"did you mean --algorithm\?"),
    "5": ("train CartPole-v1 --algorithm sac", "'sac'", "there is no off-policy algorithm", "here: ppo or grpo"),
    "5 preset": ("train CartPole-v1 --algorithm dapo", "'dapo'", "a preset of grpo", "fix: --preset dapo"),
    "6": ("train CartPole-v1 --algorithm.group-size 1", "group_size = 1", "greater than or equal to 2", "to 2"),
    "7": ("train CartPole-v1 --algorithm.gamma 1.5", "gamma = 1.5", "less than or equal to 1", "to 1"),
    "8": ("train CartPole-v1 --seeds 0..3", r"0\.\.3", "expected numbers", "fix: a range like 0-9 or a list like 0,3,5"),
    "9": ("train CartPole-v1 --device gpu", "device = 'gpu'", "expected 'cpu', 'cuda', 'cuda:1'", "'auto' for a GPU"),
    "10": ("train CartPole-v1 --device cuda:99", "'cuda:99'", "torch finds", "fix: device='c"),
    "11": ("train CartPole-v1 --policy.hidden-sizes 64,64", "'64,64'", SPACES, "fix: --policy.hidden-sizes 64 64$"),
    "12": ("train CartPole-v1 --policy.hidden-sizes [64,64]", r"'\[64,64\]'", SPACES, "fix: .*hidden-sizes 64 64$"),
    "13": ("train CartPole-v1 --preset drgrpo", "'drgrpo'", "did you mean", "'dr_grpo'"),
    "14": ("train CartPole-v1 --policy MlpPolicy", "'MlpPolicy'", "here: actor_critic, the default", "leave it out"),
    "15": (trained(Plain()), "env is a Plain", "expected a Gymnasium id", "fix: pass the class or a lambda"),
    "16": (
        lambda run, train: unchecked(gw.PPO, "MlpPolicy", "CartPole-v1"),
        "got 'MlpPolicy'", "takes its settings and a Policy", r"fix: gw\.train\('CartPole-v1', 'ppo'\)",
    ),
    "16 verbose": (
        lambda run, train: unchecked(gw.GRPO, "MlpPolicy", "CartPole-v1", verbose=1),
        "got 'MlpPolicy', 'CartPole-v1', verbose;", "takes its settings and a Policy", r"'grpo'\), or .* groupwise\.contrib\.sb3\.GRPO",
    ),
    "16 n_envs": (lambda run, train: train(Plain, n_envs=4), "'n_envs'", "unknown setting", r"did you mean 'num_envs'\?"),
    "16 callback": (lambda run, train: train(Plain, callback=None), "'callback'", "unknown setting", r"here: callbacks of gw\.train"),
    "16 policy": (lambda run, train: gw.PPOCfg(policy_kwargs={}), "'policy_kwargs'", "unknown key", "here: policy, elsewhere"),
    "16 model": (lambda run, train: gw.evaluate(Plain()), "run is a Plain", "expected a Run or its folder", "fix: .*evaluate_policy"),
    "16 env_kwargs": (
        lambda run, train: gw.train("CartPole-v1", env_kwargs={"sutton_barto_reward": True}),
        "env_kwargs", "of the environment", r"fix: gw\.train\(gw\.EnvCfg\(id='CartPole-v1', kwargs=\.\.\.\)\)$",
    ),
    "16 kwargs": (
        lambda run, train: gw.train(gw.EnvCfg(id="Pendulum-v1"), kwargs={"g": 1.0}, vectorization="async"),
        "kwargs, vectorization", "of the environment", r"EnvCfg\(id='Pendulum-v1', kwargs=\.\.\., vectorization=\.\.\.\)\)$",
    ),
    "16 class": (lambda run, train: train(Plain, kwargs={"a": 1}), "kwargs", "of the environment", r"kwargs=\.\.\.\)\), after gymnasium\.register"),
    "17": (
        lambda run, train: gw.PPOCfg(learning_rate=lambda left: left),
        "learning_rate = <function", "expected data, got a function", "fix: a value .*schedule='linear' .*clip_coef={'name': 'linear', 'start'",
    ),
    "18 predict": (lambda run, train: run.predict(0), "'predict'", "a Run has no", r"did you mean run\.policy\.predict"),
    "18 learn": (lambda run, train: run.learn(9), "'learn'", "a Run has no", r"here: gw\.resume\(run\.path, total_"),
    "18 save": (lambda run, train: run.save("x"), "'save'", "here: nothing", r"run\.path has it all"),
    "18 typo": (lambda run, train: run.metric(), "'metric'", "did you mean", "'metrics'"),
    "19": (lambda run, train: gw.evaluate(run, n_eval_episodes=9), "'n_eval_episodes'", "fix: env, ", "mean episodes"),
    "20": (lambda run, train: gw.evaluate(run, episodes="10"), "'10'", "expected a whole number", "fix: episodes=1"),
    "21": (lambda run, train: train(Plain, run_dir=run.path), "run0' is taken", "another one", "groupwise resume"),
    "22": (
        lambda run, train: run.policy.predict(np.zeros(5, np.float32)),
        r"has shape \[5\]", r"expected \[3\] for one observation", r"or \[B, 3\] for a batch",
    ),
    "23": (trained(Unseeded), "members of Unseeded", "cannot share a start.*differ at the start", f"fix: .*{SEED}"),
    "24": (trained(NoisyStep), "differ at step 1", "of equal actions with equal noise, in 'obs'", f"fix: .*{SEED}"),
    "25": (trained(OldReset), r"returned array\(", r"expected \(observation, info\)", "fix: return obs, {}"),
    "26": (trained(OldStep), r"returned \(ndarray, float, bool, dict\): .* got 4\)", FIVE, CALL),
    "27": (trained(NoReward), "reward is None", FIVE, CALL),
    "28": (trained(RewardArray), r"returned \(ndarray, ndarray, bool, bool, dict\)", FIVE, CALL),
    "28 text": (trained(step_returning("Text", reward="1")), "reward is '1'", FIVE, CALL),
    "28 end": (trained(step_returning("End", truncated=None)), "truncated is None", FIVE, CALL),
    "28 info": (trained(step_returning("Info", truncated={}, info=False)), "truncated is {}", FIVE, CALL),
    "29": (trained(NanShown), r"\[nan, nan, nan\]", "obs .* is not finite", "fix: correct the environment"),
    "30": (trained(FloatDone), r"terminations \[2\] of torch\.float32", ROW, "fix: one number and one truth value a row"),
    "30 float": (trained(FloatReward), r"rewards 1\.0 and terminations \[2\]", ROW, "fix: one number and one truth value a row"),
    "30 state": (lambda run, train: unchecked(train, ListState), r"is \[0\.0, 0\.0\]", "expected a tensor or tensors by name", "fix: return these from initial"),
    "31": (trained(TwoValues), "2 values", r"expected \(state, reward, terminated\)", "fix: return all three"),
    "32": (trained(OneStart), r"states \[4\]", r"expected \[2, \.\.\.\]: a row for each", r"fix: random\.uniform"),
    "33": (trained(InPlace), "transition of InPlace wrote into the state", "return new", "fix: return new tensors"),
    "34": (task(ROWS, typo), "the column 'anwser'", "the data have 'answer'", "did you mean 'answer'"),
    "35": (
        task([{"prompt": [MESSAGE]}] * 2, strips),
        "'list' object has no attribute 'strip'", "a completion is a list of messages", r"fix: read completion\[0\]\['con",
    ),
    "36": (
        task("openai/gsm8k", lengths),
        "'openai/gsm8k'", r"expected a file that ends in \.jsonl", r"fix: .*datasets\.load_dataset\('openai/gsm8k', split",
    ),
    "37": (task(dataset_dict, lengths), "DatasetDict", "expected a path or a list", r"fix: .* such as data\['train'\]"),
    "38": (task(BEGUN, lengths), "2 prompts end with an assistant's message", "the completion continues", "leave it out"),
    "39 max_steps": (setting("max_steps"), "'max_steps'", "total_iterations", "did you mean 'total_iterations'"),
    "39 save_steps": (setting("save_steps"), "'save_steps'", "checkpoint_interval", "did you mean 'checkpoint_interval'"),
    "39 prompt": (setting("max_prompt_length"), "'max_prompt_length'", "max_prompt_tokens", r"mean task\.max_prompt_tok"),
    "39 accumulation": (setting("gradient_accumulation_steps"), "'gradient_ac", "num_prompts", "did you mean 'num_prompts'"),
    "39 batch": (setting("per_device_train_batch_size"), "'per_device_t", "num_prompts", "did you mean 'num_prompts'"),
    "39 sde": ("train CartPole-v1 --use-sde 1", "--use-sde", "actions are drawn from the policy", "here: nothing"),
    "40 lora": (setting("peft_config"), "'peft_config'", "lora", r"did you mean model\.lora"),
    "40 vllm": (setting("use_vllm"), "'use_vllm'", "generation", "did you mean 'generation'"),
    "40 bf16": (setting("bf16"), "'bf16'", "precision", r"did you mean model\.precision"),
    "40 warmup": (setting("warmup_ratio"), "'warmup_ratio'", "of schedule", "here: warmup of schedule"),
    "40 verbose": (setting("verbose"), "'verbose'", "progress", r"did you mean logging\.progress"),
    "40 tensorboard": ("train CartPole-v1 --tensorboard-log x", "--tensorboard-log", "report-to", r"mean --logging\.report-to"),
}  # fmt: skip
"""By their numbers, with siblings of each kind."""


@pytest.mark.parametrize("row", MISTAKES)
def test_what_is_said_names_the_value_what_was_expected_and_the_fix(row, made, capsys):
    mistake, *patterns = MISTAKES[row]
    if isinstance(mistake, str):
        assert cli.main(mistake.split()) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert said.startswith("groupwise: error: ")
    else:
        try:
            mistake(*made)
            said = "".join(capsys.readouterr())
        except (gw.errors.GroupwiseError, AttributeError) as error:
            said = "".join(traceback.format_exception_only(error))
    for pattern in patterns:
        assert pattern is None or re.search(pattern, said, re.MULTILINE), said


def test_what_is_none_by_default_may_be_given_as_none(made):
    _, train = made
    assert train(gw.TextTask(["1"], reward=lambda completions, **rest: [1.0] * len(completions)), lora=None).path


def test_most_say_all_three():
    scores = [sum(pattern is not None for pattern in patterns) for _, *patterns in MISTAKES.values()]
    assert {int(row.split()[0]) for row in MISTAKES} == {*range(1, 41)}
    assert sum(scores) / len(scores) >= 2.8
