"""``groupwise convert embodichain``: agent configs written by hand after EmbodiChain's documentation."""

import json
from pathlib import Path

import pytest

from groupwise import cli
from groupwise.cli.convert import convert_embodichain
from groupwise.config import load_config

PPO = {
    "trainer": {
        "exp_name": "push", "seed": 7, "device": "cpu", "headless": True, "iterations": 100, "buffer_size": 64,
        "eval_freq": 2048, "save_freq": 4096, "use_wandb": True, "wandb_project_name": "arms",
    },
    "env": {"id": "Pendulum-v1", "cfg": {"num_envs": 4, "extensions": {"success_threshold": 0.1}}},
    "policy": {
        "name": "actor_critic",
        "actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [256, 256], "activation": "relu"}},
        "critic": {"type": "mlp", "network_cfg": {"hidden_sizes": [128], "activation": "relu"}},
    },
    "algorithm": {
        "name": "ppo",
        "cfg": {
            "learning_rate": 1e-4, "n_epochs": 5, "batch_size": 32, "gamma": 0.98, "gae_lambda": 0.9, "clip_coef": 0.1,
            "ent_coef": 0.02, "vf_coef": 0.4, "max_grad_norm": 0.7,
        },
    },
}  # fmt: skip
GRPO = {
    "trainer": {"seed": 1, "iterations": 10, "buffer_size": 32},
    "env": {"id": "CartPole-v1", "cfg": {"num_envs": 8}},
    "policy": {"name": "actor_only", "actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [64], "activation": "tanh"}}},
    "algorithm": {
        "name": "grpo",
        "cfg": {
            "learning_rate": 1e-3, "n_epochs": 2, "batch_size": 64, "gamma": 0.99, "gae_lambda": 0.95, "clip_coef": 0.2,
            "ent_coef": 0.001, "kl_coef": 0, "group_size": 4, "eps": 1e-7, "reset_every_rollout": True,
            "max_grad_norm": 0.5, "truncate_at_first_done": False,
        },
    },
}  # fmt: skip


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """The settings file of an agent config, and the lines on stderr."""
    monkeypatch.chdir(tmp_path)

    def converted(agent: dict) -> tuple[str, list[str]]:
        (tmp_path / "agent.json").write_text(json.dumps(agent))
        assert cli.main(["convert", "embodichain", "agent.json"]) == 0
        captured = capsys.readouterr()
        (tmp_path / "run.json").write_text(captured.out)
        return str(tmp_path / "run.json"), captured.err.splitlines()

    return converted


def test_ppo(convert):
    path, missing = convert(PPO)
    cfg = load_config(path)
    algorithm = cfg.algorithm
    assert (algorithm.name, algorithm.learning_rate, algorithm.num_epochs, algorithm.minibatch_size) == (
        "ppo",
        1e-4,
        5,
        32,
    )
    assert (algorithm.gamma, algorithm.gae_lambda, algorithm.clip_coef, algorithm.ent_coef) == (0.98, 0.9, 0.1, 0.02)
    assert (algorithm.vf_coef, algorithm.max_grad_norm, algorithm.num_steps) == (0.4, 0.7, 64)
    assert (cfg.env.id, cfg.env.num_envs, cfg.seed, cfg.device) == ("Pendulum-v1", 4, 7, "cpu")
    assert cfg.total_iterations == 100
    assert (cfg.evaluation.interval, cfg.checkpoint_interval) == (2048, 4096)
    assert (cfg.policy.hidden_sizes, cfg.policy.activation) == ((256, 256), "relu")
    assert not cfg.policy.normalize_obs
    assert [(tracker.name, getattr(tracker, "project", "")) for tracker in cfg.logging.report_to] == [
        ("tensorboard", ""), ("wandb", "arms"),
    ]  # fmt: skip
    assert missing == [
        "no counterpart: env.cfg.extensions.success_threshold = 0.1",
        "no counterpart: policy.critic.network_cfg.hidden_sizes = [128]",
        'no counterpart: trainer.exp_name = "push"',
        "no counterpart: trainer.headless = true",
    ]


def test_grpo_trains(convert):
    path, missing = convert(GRPO)
    algorithm = load_config(path).algorithm
    assert (algorithm.name, algorithm.group_size, algorithm.kl_coef, algorithm.credit.eps) == ("grpo", 4, 0, 1e-7)
    assert (algorithm.credit.group_key.name, algorithm.credit.returns) == ("group_step", "return_to_go")
    assert missing == [
        "no counterpart: algorithm.cfg.gae_lambda = 0.95",
        "no counterpart: algorithm.cfg.truncate_at_first_done = false",
    ]
    argv = ["--total-iterations", "2", "--evaluation.episodes", "1", "--logging.progress", "none"]
    assert cli.main(["train", path, *argv]) == 0


def test_what_is_left_out_has_embodichains_defaults(convert):
    path, missing = convert({"env": {"id": "CartPole-v1"}, "algorithm": {"name": "grpo"}})
    algorithm = load_config(path).algorithm
    assert missing == []
    assert (algorithm.learning_rate, algorithm.minibatch_size, algorithm.num_epochs) == (3e-4, 64, 10)
    assert (algorithm.group_size, algorithm.kl_coef, algorithm.credit.eps) == (4, 0.02, 1e-8)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (
            {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "apg"}},
            "algorithm.name = 'apg': expected one of ppo, grpo",
        ),
        ({"algorithm": {"name": "ppo"}}, "agent.json: env.id is missing"),
        (
            {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "grpo", "cfg": {"group_size": 1}}},
            "group_size = 1: input",
        ),
    ],
)
def test_mistakes_are_named(agent, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.json").write_text(json.dumps(agent))
    assert cli.main(["convert", "embodichain", "agent.json"]) == 2
    assert said in capsys.readouterr().err
    assert cli.main(["convert", "rllib", "agent.json"]) == 2
    assert "unknown library 'rllib'" in capsys.readouterr().err


def test_the_layout_in_the_docs_is_one_that_converts():
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    found = convert_embodichain(json.loads(page.partition("```json\n")[2].partition("```")[0]))
    assert found.missing == []
    assert found.settings["algorithm"]["minibatch_size"] == 256
    assert found.settings["policy"]["hidden_sizes"] == [64, 64]
