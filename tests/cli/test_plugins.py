import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import shapes
from safetensors.torch import load_file

import groupwise as gw
from groupwise import cli, plugins
from groupwise.algorithms.losses import register_correction
from groupwise.embodied.experts import register_expert
from groupwise.errors import ConfigError, EnvError
from groupwise.report.folder import RunFolder

PLUGIN = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

gymnasium.register("OfAPlugin-v0", CartPoleEnv, max_episode_steps=20)
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_loaded", [])


def test_a_plugin_may_be_a_module_by_its_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "registers_one").mkdir()  # a package in the current folder, as in a project of its own
    (tmp_path / "registers_one" / "__init__.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert cli.main(["config", "OfAPlugin-v0", "--plugin", "registers_one"]) == 0
    finally:
        gymnasium.registry.pop("OfAPlugin-v0", None)
        sys.modules.pop("registers_one", None)
    assert cli.main(["config", "CartPole-v1", "--plugin", "nobody_has_this"]) == 2
    assert (
        "--plugin nobody_has_this: expected an existing Python file or an installed module; fix: its path with .py"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["../my_plugin", ".", "", "..", "my-plugin", "a..b"])
def test_what_is_no_name_of_a_module_is_refused(name):
    with pytest.raises(ConfigError, match="expected an existing Python file or an installed module; fix: its path"):
        plugins.load([Path(name)])


def test_a_module_whose_own_imports_fail_says_so(tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import nobody_has_this")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nobody_has_this"):
        cli.main(["config", "CartPole-v1", "--plugin", "needs_another"])


POLICY = """
import groupwise as gw
from torch import nn


class WideCfg(gw.PolicyCfg):
    width: int = 16


@gw.register_policy("wide", WideCfg)
class Wide(gw.ActorCritic):
    def __init__(self, observation_space, action_space, cfg, *, actor_only, gamma):
        actor = nn.Sequential(nn.Linear(4, cfg.width), nn.ReLU(), nn.Linear(cfg.width, 2))
        super().__init__(observation_space, action_space, cfg, actor_only=actor_only, gamma=gamma, actor=actor)
"""


def test_a_policy_of_a_plugin_is_chosen_by_name_and_every_command_finds_it_again(registry, tmp_path, capsys):
    plugin, run = tmp_path / "my_policy.py", str(tmp_path / "run")
    plugin.write_text(POLICY)

    def command(*words):
        return cli.main([*map(str, words), "--plugin", str(plugin)])

    small = ("--total-steps", 32, "--env.num-envs", 4, "--algorithm.num-steps", 8, "--evaluation.episodes", 2)
    chosen = ("--policy", "wide", "--policy.width", 8)
    assert command("train", "CartPole-v1", "--algorithm", "ppo", *chosen, *small, "--run-dir", run) == 0
    assert command("resume", run, "--total-steps", 64) == 0
    assert command("eval", run, "--episodes", 2) == 0
    assert command("export", run, "--to", "safetensors") == 0
    kept = load_file(tmp_path / "run" / "policy.safetensors")
    assert (8, 4) in {tuple(tensor.shape) for tensor in kept.values()}
    start = ("--policy.init-from", run)
    assert command("train", "CartPole-v1", "--algorithm", "ppo", *start, *small, "--run-dir", tmp_path / "next") == 0
    assert f"Weights: {len(kept)} tensors from {run}" in capsys.readouterr().err
    assert gw.load_config(tmp_path / "next" / "config.json").policy.width == 8


NAMELESS = [getattr(gw, name) for name in dir(gw) if name.startswith("register_")]


@pytest.mark.parametrize("decorator", [*NAMELESS, register_correction, register_expert])
def test_a_decorator_without_brackets_is_refused(decorator, monkeypatch):
    monkeypatch.setattr(shapes, "CHECKED_CALLS", 0)
    given = "MyCfg" if decorator is gw.register_algorithm else "'my_name'"
    name = decorator.__name__
    with pytest.raises(ConfigError, match=re.escape(f"@{name} was given {gw.ActorCritic!r}, expected ")) as refused:
        decorator(gw.ActorCritic)
    assert str(refused.value).endswith(f"; fix: @{name}({given})")


@pytest.mark.slow
def test_the_printed_commands_work_as_they_stand_and_an_error_names_what_lacks(capsys):
    Path("my env.py").write_text(PLUGIN)
    settings = "--total-steps 32 --env.num-envs 4 --algorithm.num-steps 8 --evaluation.episodes 2 --run-dir r"
    words = [*f"train OfAPlugin-v0 --algorithm ppo {settings}".split(), "--plugin", "my env.py"]
    trained = subprocess.run([sys.executable, "-m", "groupwise", *words], capture_output=True, text=True, check=False)
    assert trained.returncode == 0, trained.stderr
    following = trained.stdout.splitlines()[-1]
    given = f"--plugin {shlex.quote(str(Path('my env.py').absolute()))}"
    assert following == f"Next:  groupwise eval r {given}"
    assert cli.main(["resume", "r"]) == 2
    message = capsys.readouterr().err
    assert "unknown environment 'OfAPlugin-v0'" in message
    assert f"r was trained with {given}; fix: add {given} (in" in message
    try:
        assert cli.main([*shlex.split(following.removeprefix("Next:  groupwise ")), "--episodes", "2"]) == 0
    finally:
        gymnasium.registry.pop("OfAPlugin-v0", None)


def test_a_printed_command_names_the_script_where_a_shell_would_not_find_it(tmp_path, monkeypatch):
    script = tmp_path / "bin/groupwise"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    assert plugins.command("eval", "run") == "groupwise eval run"  # a checkout that is not installed
    script.parent.mkdir()
    script.touch()
    monkeypatch.chdir(tmp_path)
    assert plugins.command("eval", "run") == "bin/groupwise eval run"
    monkeypatch.chdir(script.parent)
    assert plugins.command("eval", "run") == f"{script} eval run"


def test_what_was_loaded_is_what_the_last_command_named_and_a_run_folder_records_it(monkeypatch):
    Path("a.py").write_text("")
    Path("b.py").write_text("")
    here = Path.cwd()
    plugins.load([Path("a.py"), Path("b.py")])
    assert plugins.options(plugins.loaded()) == f" --plugin {here}/a.py --plugin {here}/b.py"  # from any folder
    config = RunFolder.create({}, Path("run")).config
    recorded = json.loads(config.read_text())["provenance"]["plugins"]
    assert recorded == [f"{here}/a.py", f"{here}/b.py"]
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    plugins.load([Path("../a.py"), Path("../b.py")])
    with pytest.raises(EnvError, match=r"^odd$"), plugins.blaming_absence(Path("r"), recorded):
        raise EnvError("odd")
    plugins.load([])
    assert plugins.options(plugins.loaded()) == ""


def test_absent_plugins_are_blamed_and_given_ones_are_not():
    plugins._loaded.append("a.py")
    blamed = pytest.raises(ConfigError, match=r"^odd; r was trained with --plugin b\.py; fix: ")
    with blamed as caught, plugins.blaming_absence(Path("r"), ["a.py", "b.py"]):
        raise EnvError("odd")
    assert "a.py" not in str(caught.value)
    with pytest.raises(EnvError, match=r"^odd$"), plugins.blaming_absence(Path("r"), ["a.py"]):
        raise EnvError("odd")


QUITS = """
import sys
import gymnasium

class Quits(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, where, code):
        self.where, self.code, self.count = where, code, 0
        self.quit("init")

    def quit(self, where):
        if self.where == where:
            sys.exit(self.code)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.quit("reset")
        return self.observation_space.sample(), {}

    def step(self, action):
        self.count += 1
        self.quit("step" if self.count > 40 else "")
        return self.observation_space.sample(), 1.0, self.count % 10 == 0, False, {}

gymnasium.register("Quits-v0", Quits)
"""


@pytest.mark.parametrize(
    ("where", "code", "said", "exit_code"),
    [
        ("init", "no licence", "no licence", 2),
        ("reset", "no licence", "no licence", 2),
        ("step", "no licence", "no licence", 2),
        ("step", None, "the program was ended with code None", 2),
        ("step", 0, "the program was ended with code 0", 2),
        ("step", 7, "the program was ended with code 7", 7),
    ],
)
def test_what_an_environment_says_when_it_ends_the_program_is_printed(where, code, said, exit_code, tmp_path, capsys):
    plugin = tmp_path / "quits.py"
    plugin.write_text(QUITS)
    run, kwargs = tmp_path / "run", json.dumps({"where": where, "code": code})
    words = ["train", "Quits-v0", "--algorithm", "ppo", "--plugin", str(plugin), "--env.kwargs", kwargs]
    try:
        assert cli.main([*words, "--total-steps", "999", "--run-dir", str(run)]) == exit_code
    finally:
        del gymnasium.registry["Quits-v0"]
    error = capsys.readouterr().err
    assert f"groupwise: error: {said} (sys.exit in {plugin}, line " in error
    if where == "step":
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["stopped"], summary["error"]) == (
            "failed",
            f"SystemExit: {code}" if code is not None else "SystemExit:",
        )
        assert "then begin again with: groupwise resume" in error
