"""Every fenced block of the README and the docs, and tables of calls: Python runs, commands parse."""

import itertools
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import gymnasium
import pytest
from small_populations import InThisProcess
from text_runs import save_model

import groupwise as gw
from groupwise import cli, config, plugins
from groupwise import run as commands
from groupwise.algorithms import advantages as credit
from groupwise.algorithms.base import BaseAlgorithm
from groupwise.envs.names import import_package
from groupwise.text import builtin_rewards, rewards
from groupwise.training import build as env_evaluator

ROOT = Path(__file__).parents[2]
for env_id in ("FetchPush-v4", "MetaWorld/push-v3", "BabyAI-GoToRedBall-v0"):
    import_package(env_id)  # before a test resets what is registered
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/internals/**/*.md"))]


class Block(NamedTuple):
    page: Path
    line: int
    """Of the block's first line of content, from 1."""
    text: str


def _blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            found.append(Block(page, text.count("\n", 0, match.start(1)) + 1, match[1]))
    return found


def _calls(page: Path) -> list[str]:
    """The last column of tables with the heading "shown by"."""
    tables = re.findall(r"^\|.* shown by \|\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [call for rows in tables for call in re.findall(r"`([^`]+)` \|$", rows, re.MULTILINE)]


CALLS = {page: _calls(page) for page in PAGES}
PYTHON = _blocks("python")
FILES = {name[1]: block.text for block in PYTHON if (name := re.match(r"# (\w+\.py)\n", block.text))}
"""Blocks whose first line names a file are that file in the commands."""
COMMANDS = {
    line.removeprefix("$ "): block.page.relative_to(ROOT)
    for block in _blocks("console")
    for line in block.text.splitlines()
    if line.startswith("$ ")
} | {call: page.relative_to(ROOT) for page, calls in CALLS.items() for call in calls if call.startswith("groupwise ")}
"""Each once, with a page that has it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("docs") / "my_model", positions=1024)


@pytest.fixture(autouse=True)
def _own_directory_and_registries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None, model: Path):
    monkeypatch.chdir(tmp_path)
    # most of the time of so short a run
    monkeypatch.setattr(env_evaluator, "film", lambda *args, **options: None)
    play = env_evaluator.evaluate_policy
    few = lambda *args, episodes, **options: play(  # noqa: E731
        *args, episodes=min(episodes, 2), **options | {"max_steps": 50}
    )
    monkeypatch.setattr(env_evaluator, "evaluate_policy", few)
    every = BaseAlgorithm._minibatches
    monkeypatch.setattr(BaseAlgorithm, "_minibatches", lambda *args: itertools.islice(every(*args), 8))
    monkeypatch.setattr("groupwise.evolution.population.start_pool", InThisProcess)  # where members are as short
    assert builtin_rewards  # registered before the copy, else later tests would miss them
    monkeypatch.setattr(rewards, "REWARDS", dict(rewards.REWARDS))
    (tmp_path / "my_model").symlink_to(model)
    registries = [gymnasium.registry, credit.CREDIT_RULES, plugins.TEXT_ENVS]
    before = [dict(known) for known in registries]
    yield
    for known, names in zip(registries, before, strict=True):
        known.clear()
        known.update(names)


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}), ids=lambda page: page.stem)
def test_python_blocks_of_a_page_run_in_order(page: Path):
    namespace = {"__name__": f"page_{page.stem}"}
    for block in PYTHON:
        if block.page == page:
            code = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's line
            exec(compile(code, str(page), "exec"), namespace)
    for call in CALLS[page]:
        if not call.startswith("groupwise "):
            eval(call, namespace)


def test_there_are_blocks_to_test():
    assert {"README", "quickstart", "algorithms"} <= {block.page.stem for block in PYTHON}
    assert len(COMMANDS) > 20
    assert len(CALLS[ROOT / "docs" / "coming_from.md"]) > 30


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> gw.Run:
    return gw.train(
        "CartPole-v1", gw.PPOCfg(num_steps=16, num_epochs=1), total_steps=64, evaluation={"episodes": 2},
        run_dir=tmp_path_factory.mktemp("docs") / "run",
    )  # fmt: skip


@pytest.mark.parametrize(("command", "page"), COMMANDS.items(), ids=lambda value: str(value)[:60])
def test_command_is_right(command: str, page: Path, run: gw.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "my_run.json").write_text(config.to_json(run.cfg), encoding="utf-8")
    (tmp_path / "runs").mkdir()
    for name in ("my_run", "grpo", "ppo", "clone", "vla-clone"):
        (tmp_path / "runs" / name).symlink_to(run.path)
    monkeypatch.setattr(commands, "resume", lambda path, **totals: gw.Run.load(run.path))

    words = shlex.split(re.split(r" [|>] ", command)[0], comments=True)
    for word in words:
        assert not re.match(r"(examples|benchmarks)/", word) or (ROOT / word).is_file()
    match words[0]:
        case "groupwise":
            assert cli.main(_shortened(words[1:])) == 0
        case "torchrun":
            assert cli.main(_shortened(words[words.index("groupwise") + 1 :])) == 0
        case "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case other:
            assert other in ("python", "pip", "git", "cd", "for", "export", ".")


def _shortened(words: list[str]) -> list[str]:
    """``config`` in place of ``train`` and slow checks: it takes the same options. One demonstration."""
    if words[0] == "demos":
        return [*words, "--episodes", "1"]
    if (words[0] != "train" and words[1:2] != ["MetaWorld/multi"]) or "--help" in words:
        return words
    for option in ("--seeds", "--profile"):
        if option in words:
            at = words.index(option)
            words = words[:at] + words[at + 2 :]
    return ["config", *words[1:]]
