import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from run_folders import write_seeds
from safetensors.torch import load_file

import groupwise
from groupwise import cli, config
from groupwise.cli.train import print_run
from groupwise.config.algorithm import SGDCfg, StepCfg
from groupwise.errors import RunFolderError
from groupwise.training.evaluation import EvaluationResult

SCORE = EvaluationResult((11.0, 12.5, 14.0), (12, 12, 13))


@pytest.fixture
def api(monkeypatch):
    """Stands in for ``groupwise.run`` and keeps what it was called with."""
    calls: list[tuple] = []
    summary = {"seconds": 6.1, "return_mean": 500.0, "ci95": [490.0, 510.0], "episodes": 20, "stopped": "total_steps"}
    summary |= {"best_return_mean": 500.0, "best_env_steps": 23_457, "env_steps": 100_000}
    run = SimpleNamespace(path=Path("runs/x"), summary=summary, cfg=config.resolve("CartPole-v1"))

    def record(name, result):
        def call(*args, **kwargs):
            calls.append((name, args, kwargs))
            return result

        return call

    fake = ModuleType("groupwise.run")
    fake.train_from_config = record("train", run)
    fake.resume = record("resume", run)
    fake.evaluate = record("evaluate", SCORE)
    monkeypatch.setitem(sys.modules, "groupwise.run", fake)
    return calls


def trained(api):
    [(name, (cfg,), options)] = api
    assert (name, options) == ("train", {"callbacks": []})
    return cfg


def test_train_takes_the_environment_s_preset(api, capsys):
    assert cli.main(["train", "CartPole-v1"]) == 0
    assert trained(api) == config.resolve("CartPole-v1")
    assert capsys.readouterr().out == (
        "Done in 6.1 s: greedy return 500.0 (20 episodes, 95 % interval 490.0 to 510.0). Best 500.0 at step 23,457.\n"
        "Look:  groupwise report runs/x\n"
        "Next:  groupwise eval runs/x\n"
    )


@pytest.mark.parametrize(
    ("score", "ends", "shown"),
    [
        (0.0625, [-0.03425, 0.1593], "0.06250 (20 episodes, 95 % interval -0.03425 to 0.1593). Best 0.06250"),
        (0.9597, [0.9592, 0.9602], "0.9597 (20 episodes, 95 % interval 0.9592 to 0.9602). Best 0.9597"),
        (12345.6, [12300.1, 12391.1], "12346 (20 episodes, 95 % interval 12300 to 12391). Best 12346"),
        (1.0, None, "1.000 (20 episodes, no interval). Best 1.000"),
    ],
)
def test_a_score_is_shown_as_exactly_as_its_interval(capsys, score, ends, shown):
    summary = {"seconds": 6.1, "return_mean": score, "ci95": ends, "episodes": 20, "stopped": "total_steps"}
    summary |= {"best_return_mean": score, "best_env_steps": 23_457}
    print_run(SimpleNamespace(path=Path("runs/x"), summary=summary, cfg=config.resolve("CartPole-v1")))
    assert f"greedy return {shown} at step" in capsys.readouterr().out


def test_a_clone_goes_on_with_training_in_its_own_environment(capsys):
    env = {"kwargs": {"sutton": True}, "action_chunk": 5, "obs_keys": ["a", "b"], "action_masks": True}
    cfg = config.resolve("CartPole-v1", {"name": "bc", "data": "demos"}, env=env, policy="recurrent")
    run = SimpleNamespace(path=Path("runs/x"), summary={"seconds": 1.0, "stopped": "total_steps"}, cfg=cfg)
    assert print_run(run) == 0
    expected = (
        """--env.kwargs '{"sutton": true}' --env.action-chunk 5 --env.obs-keys a b --env.action-masks """
        "--policy recurrent --policy.init-from runs/x\n"
    )
    assert capsys.readouterr().out.endswith(expected)


NESTED = {"max_grad_norm": None, "optimizer": {"betas": [0.8, 0.9]}}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--preset dr_grpo --seed 4", {"preset": "dr_grpo", "seed": 4}),
        ("--algorithm.name ppo --algorithm.gae-lambda 0.5", {"algorithm": {"name": "ppo", "gae_lambda": 0.5}}),
        ("--total-steps 1e5 --env.max-episode-steps 2e2", {"total_steps": 100_000, "env": {"max_episode_steps": 200}}),
        ("--algorithm=grpo --algorithm.clip_coef=0.3 --seed 3", {"algorithm": {"clip_coef": 0.3}, "seed": 3}),
        ("--policy.normalize-obs --policy.no-normalize-reward", {"policy": {"normalize_obs": True}}),
        ('--env.kwargs {"g":9.0} --run-dir some/where', {"env": {"kwargs": {"g": 9.0}}, "run_dir": "some/where"}),
        ("--policy.hidden-sizes 32 16 --seed 0", {"policy": {"hidden_sizes": [32, 16]}}),
        ("--algorithm.max-grad-norm None --algorithm.optimizer.betas 0.8 0.9", {"algorithm": NESTED}),
        (
            "--algorithm.schedule step --algorithm.schedule.decay 0.25 --algorithm.optimizer.name sgd",
            {"algorithm": {"schedule": StepCfg(decay=0.25), "optimizer": SGDCfg()}},
        ),
    ],
)
def test_train_options_reach_the_config(api, words, expected):
    assert cli.main(["train", "CartPole-v1", *words.split()]) == 0
    assert trained(api) == config.resolve("CartPole-v1", **expected)


def test_train_from_a_file_with_options_over_it(api, tmp_path):
    path = tmp_path / "my.json"
    path.write_text('{"env": {"id": "Acrobot-v1"}, "algorithm": {"name": "ppo", "gamma": 0.5}, "seed": 4}')
    assert cli.main(["train", str(path), "--algorithm.learning-rate", "0.25"]) == 0
    cfg = trained(api)
    assert (cfg.env.id, cfg.seed, cfg.algorithm.gamma, cfg.algorithm.learning_rate) == ("Acrobot-v1", 4, 0.5, 0.25)


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ("trian CartPole-v1", "'trian': did you mean 'train'"),
        ("train CartPole-v9", "'CartPole-v9': did you mean 'CartPole-v1'"),
        ("train Qqqqqqqq", "'Qqqqqqqq': no registered id is similar"),
        ("train", "first, then options; fix: groupwise train CartPole-v1"),
        ("train CartPole-v1 Acrobot-v1", "'Acrobot-v1'"),
        ("train absent.json", "absent.json"),
        ("train CartPole-v1 -q --verbose", "not allowed with argument"),
        ("train evil:Mine-v0", "'evil:Mine-v0' would import 'evil'"),
        ("check-env evil:Mine-v0", "'Mine-v0'"),
        ("train CartPole-v1 --algorithm pppo", "'pppo': did you mean 'ppo'"),
        ("train CartPole-v1 --algorithm", "--algorithm: expected a value"),
        ("train CartPole-v1 --preset dr_grp", "'dr_grp': did you mean 'dr_grpo'"),
        ("train CartPole-v1 --algorithm.credit.scale stdd", "algorithm.credit.scale = 'stdd'"),
        ("train CartPole-v1 --algorithm.group-size 1", "algorithm.group_size = 1"),
        ("train CartPole-v1 --total-steps 1.5", "total_steps = 1.5"),
        ("train CartPole-v1 --env.max-episode-steps x", "env.max_episode_steps = 'x'"),
        ("train CartPole-v1 --seed 3 4", "seed = [3, 4]"),
        ("train CartPole-v1 --plugin absent.py", "--plugin absent.py"),
        ("config CartPole-v1 --env.kwargs {a", "--env.kwargs: '{a' is broken JSON"),
        ("config CartPole-v1 --env.kwargs 3", "env.kwargs = 3"),
        (
            "train CartPole-v1 --model x",
            "--model.path: CartPole-v1 is an environment, and this is an option of language models",
        ),
        (
            "check-env CartPole-v1 --model x",
            "CartPole-v1 is an environment, and this is an option of language models; fix: leave",
        ),
        ("train CartPole-v1 --total-epochs 4", "unknown option --total-epochs; did you mean --total-steps?"),
        ("eval", "run; fix: see groupwise eval --help"),
        ("eval x --episodes 0", "--episodes"),
        ("enjoy x", "'enjoy': did you mean play?"),
        ("play x --stochastic", "did you mean --sampled?"),
        ("play x --load-best", "did you mean --checkpoint?"),
        ("resume x --total-step 3", "--total-step; did you mean --total-steps?"),
        ("eval runs/x --checkpoint bset", "'best'"),
        ("resume runs/x 5", "unexpected '5'"),
        ("resume runs/x " + "x" * 300, "unexpected 'xxx"),  # too long for a file's name
        ("sample runs/x -n", "unknown option"),
        ("sample runs/x -3+4=", "unexpected '-3+4='; fix: put a text that begins with a minus after --"),
        ("train CartPole-v1 --seeds 0,5-3", "--seeds 0,5-3: expected increasing ranges, got 5-3"),
        ("train CartPole-v1 --seeds 3-0", "--seeds 3-0: expected increasing ranges, got 3-0"),
        ("--verison", "did you mean '--version'?"),
        ("config CartPole-v1 --policy.hidden-sizes [64]", "policy.hidden_sizes"),
        ("config CartPole-v1 --policy.normalize-obs 1", "normalize_obs = '1'"),
    ],
)
def test_mistakes_end_in_one_clear_line(api, capsys, argv, name):
    assert cli.main(argv.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("groupwise: error: ")
    assert captured.err.count("\n") == 1
    assert name in captured.err
    assert api == []


def test_debug_shows_the_traceback():
    with pytest.raises(groupwise.errors.UnknownNameError):
        cli.main(["--debug", "train", "CartPole-v9"])


@pytest.mark.parametrize(
    ("error", "note", "code", "printed"),
    [
        (RunFolderError("run folder 'x' is taken"), "", 2, "error: run folder 'x' is taken\n"),
        (RunFolderError("broken"), "go on with: groupwise resume x", 2, "error: broken\ngo on with: groupwise resume x\n"),
        (KeyboardInterrupt("interrupted; go on with: groupwise resume x"), "", 130, "interrupted; go on with: groupwise resume x\n"),
    ],
)  # fmt: skip
def test_the_end_of_a_training_that_failed(api, capsys, monkeypatch, error, note, code, printed):
    def fail(cfg, callbacks):
        if note:
            error.add_note(note)
        raise error

    monkeypatch.setattr(sys.modules["groupwise.run"], "train_from_config", fail)
    assert cli.main(["train", "CartPole-v1"]) == code
    assert capsys.readouterr().err == f"groupwise: {printed}"


def test_eval_prints_one_line_or_json(api, capsys):
    assert cli.main(["eval", "runs/x", "--episodes", "3"]) == 0
    assert capsys.readouterr().out == "return_mean=12.5 ci95=[8.77379, 16.2262] episodes=3\n"  # 4.30265 * 1.5 / sqrt(3)
    asked = {"completions_per_prompt": 1, "deterministic": None, "seed": None, "video": False, "checkpoint": "latest"}
    assert api.pop() == ("evaluate", (Path("runs/x"), 3), asked)
    assert cli.main(["eval", "runs/x", "--json", "--sampled", "--seed", "4", "--video", "--checkpoint=best"]) == 0
    assert capsys.readouterr().out == json.dumps(SCORE.report() | {"video": "runs/x/policy.gif"}) + "\n"
    asked |= {"deterministic": False, "seed": 4, "video": True, "checkpoint": "best"}
    assert api == [("evaluate", (Path("runs/x"), None), asked)]


def test_export_writes_the_policy_of_a_checkpoint(tmp_path, capsys):
    options = {"total_steps": 64, "run_dir": tmp_path / "run", "evaluation": {"interval": 32, "episodes": 2}}
    run = groupwise.train("CartPole-v1", "ppo", num_envs=2, **options)
    capsys.readouterr()
    assert cli.main(["export", f"{run.path}", "--to", "safetensors", "--checkpoint", "best"]) == 0
    assert capsys.readouterr().out == f"written: {run.path}/policy.safetensors\n"
    best = groupwise.Run.load(run.path, checkpoint="best").policy.state_dict()
    assert all(best[name].equal(value) for name, value in load_file(run.path / "policy.safetensors").items())
    assert cli.main(["export", f"{run.path}", "--to", "safetensors"]) == 2
    assert "policy.safetensors' exists; fix: give another path" in capsys.readouterr().err


def test_eval_shows_the_success_of_each_task(api, capsys, monkeypatch):
    tasks = ("push", "open-the-door", "push", "push")
    found = EvaluationResult((1.0,) * 4, (3,) * 4, successes=(True, True, False, True), tasks=tasks)
    monkeypatch.setattr(sys.modules["groupwise.run"], "evaluate", lambda *args, **options: found)
    assert cli.main(["eval", "runs/x"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "open-the-door  success 100 % (95 % interval 21 to 100) of 1 episodes",
        "push           success  67 % (95 % interval 21 to 94) of 3 episodes",
    ]


def test_resume(api):
    for words in ("--total-steps 1e3", "", "--total-epochs 1.5"):
        assert cli.main(["resume", "runs/x", *words.split()]) == 0
    assert all(args == (Path("runs/x"),) for _, args, _ in api)
    assert cli.main(["resume", "runs/x", "--allow-programs"]) == 0
    assert [given.pop("allow_programs") for *_, given in api] == [False, False, False, True]
    assert {given.pop("progress") for *_, given in api} == {None}
    assert [totals for *_, totals in api] == [{"total_steps": 1000}, {}, {"total_epochs": 1.5}, {}]


@pytest.mark.parametrize(
    ("word", "progress", "last"), [("-q", "none", "Run folder: runs/x"), ("-v", "iterations", "eval runs/x")]
)
def test_resume_says_less_or_more(api, capsys, monkeypatch, word, progress, last):
    set_to = []
    monkeypatch.setattr("groupwise.cli.train._set_output", set_to.append)
    assert cli.main(["resume", "runs/x", word]) == 0
    assert [given["progress"] for *_, given in api] == set_to == [progress]
    assert capsys.readouterr().out.rstrip().endswith(last)


def test_config_prints_a_file_that_train_takes(api, capsys, tmp_path):
    argv = ["CartPole-v1", "--algorithm", "ppo", "--algorithm.gamma", "0.5"]
    assert cli.main(["config", *argv]) == 0
    path = tmp_path / "printed.json"
    path.write_text(capsys.readouterr().out)
    assert cli.main(["train", str(path)]) == 0
    assert trained(api) == config.resolve("CartPole-v1", {"name": "ppo", "gamma": 0.5})
    capsys.readouterr()
    assert cli.main(["config", "--schema"]) == 0
    files = json.loads(capsys.readouterr().out)["anyOf"]
    assert [file["$ref"].rpartition("/")[2] for file in files] == ["RunCfg", "TextRunCfg"]


@pytest.mark.parametrize("command", ["", "train", "eval", "resume", "compare", "config", "list"])
def test_every_command_has_help_with_an_example(capsys, command):
    assert cli.main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert f"groupwise {command}".strip() in out
    assert "usage:" in out


def test_help_of_train_shows_the_defaults_of_that_environment(capsys):
    assert cli.main(["train", "CartPole-v1", "--algorithm", "ppo", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--algorithm.learning-rate FLOAT     Learning rate, before its schedule (0.004)" in out
    assert re.search(r"--evaluation\.interval .*\(a tenth of the budget\)\n", out)
    assert re.search(r"--run-dir .*\(a new one under runs/\)\n", out)
    assert out.count("\n") <= 40
    assert cli.main(["train", "CartPole-v1", "--algorithm", "ppo", "--help-all"]) == 0
    out = capsys.readouterr().out
    assert "  --algorithm.schedule adaptive_kl|cosine|exponential|linear|none|step\n" in out
    assert "  --algorithm.schedule.final FLOAT\n" in out
    assert "(default: 0.004)" in out
    assert cli.main([]) == 2
    assert "groupwise train CartPole-v1" in capsys.readouterr().out


def test_plugin_registers_an_algorithm(api, registry, tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.plugins._loaded", [])  # commands printed later would name it
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from groupwise.config.algorithm import PPOCfg, register_algorithm\n"
        "class MineCfg(PPOCfg):\n"
        "    '''Mine.'''\n"
        "    name: str = 'mine'\n"
        "    heat: float = 1.0\n"
        "    '''How hot.'''\n"
        "@register_algorithm(MineCfg)\n"
        "class Mine: ...\n"
    )
    argv = ["train", "CartPole-v1", "--plugin", str(plugin), "--algorithm", "mine", "--algorithm.heat", "2"]
    assert cli.main(argv) == 0
    cfg = trained(api).algorithm
    assert (cfg.name, cfg.heat, cfg.num_steps) == ("mine", 2.0, 64)  # 64: from the preset of its base


QUICK = [
    "--help", "eval --help", "trian", "train CartPole-v9", "eval runs/x --episods 3",
    "train Pendulum-v1 --algorithm ppo --algorithm.learning-rat 1", "compare SEEDS",
]  # fmt: skip


def test_quick_commands_never_import_torch(tmp_path):
    seeds = str(write_seeds(tmp_path / "seeds", (1.0, 2.0)))
    commands = [command.replace("SEEDS", seeds).split() for command in QUICK]
    code = (
        "import sys; from groupwise.cli import main\n"
        f"loaded = [(words, main(words)) for words in {commands} if main(words) > 2 or 'torch' in sys.modules]\n"
        "sys.exit(repr(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "grpo" in done.stdout


def test_the_module_runs_as_the_console_script_does_and_a_reader_that_has_seen_enough_is_no_error(capsys):
    command = f"{sys.executable} -m groupwise config --schema | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"{\n", b"")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"groupwise {groupwise.__version__}\n"
