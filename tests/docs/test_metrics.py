"""The metrics page names every metric that a run logs, and no other."""

import re
from pathlib import Path

import gymnasium
import pytest
import torch
from success_envs import Touch
from text_games import Guess
from text_runs import save_model, share_copied, train
from vllm_double import VLLMDouble

import groupwise as gw
from groupwise.embodied.demos import record_demos
from groupwise.envs.torch_env import TorchCartPole

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
NAME = r"(?:rollout|train|eval|time|reward|completions)/[\w<>]+"
FOR_EXAMPLE = {"callbacks.md": {"rollout/terminated_share"}, "metrics.md": {"train/<name>"}}
"""Names on other pages, and in the prose of this one, that no run logs by itself."""


def named(text: str) -> set[str]:
    return set(re.findall(rf"`({NAME})`", text))


def matches(name: str, logged: str) -> bool:
    """Whether a name of the page, such as ``rollout/pass_at_<k>``, stands for a logged one."""
    pattern = re.sub(r"<[kn]>", r"\\d+", name).replace("<name>", r"\w+")
    return re.fullmatch(pattern, logged) is not None


ON_THE_PAGE = named("".join(line for line in PAGE.splitlines(keepends=True) if line.startswith("|")))


def share_that_is_logged(prompts, completions, log_metric, **columns):
    scores = share_copied(prompts, completions)
    log_metric("completions", len(completions))
    return scores


def two_choices():
    env = gymnasium.make("CartPole-v1")
    return gymnasium.wrappers.TransformAction(env, max, gymnasium.spaces.MultiDiscrete([2, 2]))


def clones(folder, env, action):
    """Settings that clone an expert who always does the same."""
    number = len(list(folder.iterdir()))
    path = record_demos(env, lambda obs: action, episodes=2, out=folder / f"demos{number}").path
    return gw.config.BCCfg(data=path, num_steps=16)


class SpoilsAGradient(gw.Callback):
    def on_training_start(self, trainer):
        norms = iter([torch.tensor(torch.nan)])
        clip = trainer.algorithm.clip_gradients
        trainer.algorithm.clip_gradients = lambda limit: next(norms, None) or clip(limit)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What tiny runs log: each algorithm on environments and texts, with the settings that add metrics."""
    folder = tmp_path_factory.mktemp("metrics")
    short = {"total_steps": 64, "evaluation": {"interval": 32, "episodes": 2}, "num_envs": 4}
    everything = gw.GRPOCfg(
        group_size=2, num_steps=8, kl_coef=0.1, on_nonfinite="drop",
        objective={"old_log_prob": "recomputed"}, collection={"dynamic_sampling": 0, "on_env_error": "retry"},
    )  # fmt: skip
    truncating = gw.GRPOCfg(group_size=2, num_steps=8, collection={"partial_groups": "truncate"})
    prompts = [{"prompt": digits} for digits in ("123", "456", "789", "012")]
    task = gw.TextTask(prompts, reward=share_that_is_logged, eval_data=[{"prompt": "345"}])
    model = save_model(folder / "model")
    sampled = {"evaluation": {"completions_per_prompt": 2, "deterministic": False}, "total_steps": 40}
    runs = [
        gw.train("CartPole-v1", gw.PPOCfg(num_steps=16), run_dir=folder / "ppo", stop={"time_limit": 999}, **short),
        gw.train(
            "CartPole-v1", everything, preset="grpo", run_dir=folder / "grpo", callbacks=[SpoilsAGradient()], **short
        ),
        gw.train(Touch, gw.PPOCfg(num_steps=16), run_dir=folder / "success", **short),
        gw.train("CliffWalking-v1", gw.PPOCfg(num_steps=16), run_dir=folder / "endless", **short),
        gw.train(TorchCartPole, truncating, run_dir=folder / "truncate", **short),
        gw.train("CartPole-v1", clones(folder, "CartPole-v1", 1), run_dir=folder / "bc", **short),
        gw.train("Pendulum-v1", clones(folder, "Pendulum-v1", [1.0]), run_dir=folder / "bc_box", **short),
        gw.train(two_choices, clones(folder, two_choices, [0, 1]), run_dir=folder / "bc_two", **short),
        train(task, model, folder / "text", gw.GRPOCfg(group_size=2), **sampled),
        train(task, model, folder / "text_ppo", gw.PPOCfg(), **sampled),
        train(gw.TextTask(env=Guess, max_turns=2), model, folder / "text_env", gw.GRPOCfg(group_size=2), **sampled),
    ]
    with VLLMDouble(model) as server:
        generation = {"name": "server", "urls": [server.url], "max_staleness": 1}
        cfg = gw.GRPOCfg(group_size=2, objective={"old_log_prob": "sampled"})
        runs.append(train(task, model, folder / "served", cfg, generation=generation, **sampled))
    return {name for run in runs for entry in run.metrics() for name in entry} - {"iteration", "env_steps"}


@pytest.mark.slow
def test_every_logged_metric_is_named_and_every_named_one_is_logged(logged):
    assert {name for name in logged if not any(matches(known, name) for known in ON_THE_PAGE)} == set()
    assert {known for known in ON_THE_PAGE if not any(matches(known, name) for name in logged)} == set()


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: page.stem)
def test_other_pages_name_metrics_that_exist(page):
    found = named(page.read_text(encoding="utf-8")) - FOR_EXAMPLE.get(page.name, set())
    assert {name for name in found - ON_THE_PAGE if not any(matches(known, name) for known in ON_THE_PAGE)} == set()
