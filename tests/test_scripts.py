"""Scripts of benchmarks, tools and examples import what exists, and start; the workflow calls targets that exist."""

import ast
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from forked import run_script
from quick_python import quick_python
from scripts import ROOT

SCRIPTS = sorted(
    path
    for folder in ("benchmarks", "docs", "examples", "tools")
    for path in ROOT.glob(f"{folder}/**/*.py")
    if "_build" not in path.parts  # the documentation that make docs wrote
)

MODULE = ""
"""Others import it; what it imports itself must be there."""
SMALLEST = {
    "benchmarks/agents.py": "--smallest --arms shared --out {out}",
    "benchmarks/agents_smollm2.py": "--smallest --smollm2 {model} --out {out}",
    "benchmarks/agents_textworld.py": "--smallest --out {out}",
    "benchmarks/async_collection.py": "--smallest --only overlap --out {out}",
    "benchmarks/before_after.py": "--before {root} --only zoo_plain --rounds 1 --scale 0.01 --out {out}",
    "benchmarks/cells.py": MODULE,
    "benchmarks/checkpoint_overhead.py": "--smallest --out {out}",
    "benchmarks/critic_cost.py": "--smallest --out {out}",
    "benchmarks/cube_push.py": "--smallest --out {out}",
    "benchmarks/defaults.py": "tuning --smallest --only FrozenLake --methods grpo sb3 --seeds 1 --out {out}",
    "benchmarks/faults.py": "--train control {folder}/run {{}}",  # a fault is four runs or more, some as root
    "benchmarks/growth.py": "--smallest --only width --out {out}",
    "benchmarks/head.py": "--tokens 8 --vocabulary 64 --width 16 --rounds 1",
    "benchmarks/keep_cache.py": "--smallest --smollm2 {model} --out {out}",
    "benchmarks/learn.py": "--smallest --only CartPole-v1-ppo --out {out}",
    "benchmarks/lstd_explains.py": "--smallest --out {out}",
    "benchmarks/lstd_siblings.py": "--smallest",
    "benchmarks/peers/cleanrl_ppo.py": "--steps 1024",
    "benchmarks/peers/evolution_agilerl.py": "--smallest",
    "benchmarks/peers/evolution_ours.py": "--smallest",
    "benchmarks/peers/evolution_watch.py": MODULE,
    "benchmarks/peers/jax_ppo.py": "--steps 1024",
    "benchmarks/peers/leanrl_ppo.py": MODULE,
    "benchmarks/peers/ours.py": "--settings zoo --steps 512",
    "benchmarks/peers/rsl_rl_ppo.py": MODULE,
    "benchmarks/peers/run.py": "--help",  # each peer is in an environment of its own
    "benchmarks/peers/sb3_ppo.py": "--steps 512",
    "benchmarks/peers/sbx_ppo.py": "--steps 512",
    "benchmarks/peers/settings.py": MODULE,
    "benchmarks/peers/step_clock.py": MODULE,
    "benchmarks/peers/torchrl_ppo.py": "--steps 512",
    "benchmarks/peers/worker.py": MODULE,
    "benchmarks/plan_check.py": "--smallest --out {out}",
    "benchmarks/point_mass.py": "--seeds 1 --total-steps 1",
    "benchmarks/population_memory.py": "{model} --rounds 1",
    "benchmarks/populations.py": "--smallest --only Pendulum --algorithms ppo --methods tournament tpe --seeds 1 --out {out}",
    "benchmarks/populations_agilerl.py": "--report",  # AgileRL is in an environment of its own
    "benchmarks/robot_images.py": "--smallest --side ranks --setting 'one view'",
    "benchmarks/robot_images_autocast.py": "--help",  # an episode on a CPU under autocast takes most of a minute
    "benchmarks/robot_learning.py": "--smallest --only plate-slide-v3 --arms grpo --seeds 1 --jobs 1 --out {out}",
    "benchmarks/robot_pictures.py": "--help",  # its smallest takes a minute
    "benchmarks/robots.py": "--rounds 1 --out {out}",
    "benchmarks/sb3_learn.py": "--smallest --only CartPole --out {out}",
    "benchmarks/served.py": "--smallest --python {served} --model {model} --out {out}",
    "benchmarks/smollm2.py": "{model}",
    "benchmarks/speed_sb3.py": "--smallest --out {out}",
    "benchmarks/study.py": "--smallest --only CartPole-v1 --methods lstd --seeds 1 --jobs 1 --out {out}",
    "benchmarks/text_learn.py": "--smallest --seeds 0 --smollm2 {model} --out {out}",
    "benchmarks/text_reasoning.py": "--smallest --smollm2 {model} --out {out}",
    "benchmarks/text_reasoning_trl.py": "--help",  # TRL is in an environment of its own, and a step takes a minute
    "benchmarks/text_roofline.py": "--smollm2 {model} --precisions float32 --steps 1 --threads 1 --out {out}",
    "benchmarks/text_starts.py": "'words, as in TRL' reasoning-gym:chain_sum --out {out}",
    "benchmarks/throughput.py": "--smallest --out {out}",
    "benchmarks/torch_envs.py": "--smallest --device cpu --threads 1 --out {out}",
    "benchmarks/trl_record.py": "--smallest --out {folder}",
    "benchmarks/trl_speed.py": "--cases tiny --steps 1 --no-memory --out {out}",
    "benchmarks/view_overhead.py": "--smallest --out {out}",
    "benchmarks/vla.py": "--smallest",
    "docs/check_envs.py": "CartPole-v1 --out {folder}",
    "docs/generate.py": "--out {folder}",
    "tools/count_settings.py": "",
    "tools/oldest.py": "",
    "tools/package.py": "--help",
    "tools/step_path.py": "control grpo",
    "tools/tiny_text.py": MODULE,
    "tools/torture.py": "--help",  # its least is 1,000 iterations of training
}
"""Arguments with which each script does the least from its start to its result."""
NEEDED = {
    "benchmarks/agents_textworld.py": "textworld",
    "benchmarks/peers/evolution_agilerl.py": "agilerl",
    "benchmarks/peers/evolution_ours.py": "psutil",
    "benchmarks/peers/jax_ppo.py": "gymnax",
    "benchmarks/peers/rsl_rl_ppo.py": "rsl_rl",
    "benchmarks/peers/sbx_ppo.py": "sbx",
    "benchmarks/peers/torchrl_ppo.py": "torchrl",
    "benchmarks/point_mass.py": "embodichain",
    "benchmarks/trl_record.py": "trl",
    "benchmarks/trl_speed.py": "trl",
}
"""Modules of packages that tests do not install; a script without its module is skipped."""


def names_of_the_library(source: str) -> set[str]:
    """Dotted names that a script takes from groupwise: ``from groupwise.x import y`` in functions, too, and ``gw.y``."""
    found, short = set(), {"groupwise"}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "groupwise":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "groupwise"}
            short |= {alias.asname for alias in node.names if alias.name == "groupwise" and alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in short:
            found.add(f"groupwise.{node.attr}")
    return found


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return bool(module) and hasattr(importlib.import_module(module), last)
    return True


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_name_what_the_library_has(path):
    names = names_of_the_library(path.read_text(encoding="utf-8"))
    assert {name for name in names if not exists(name)} == set()


def test_a_name_that_is_gone_is_found():
    names = names_of_the_library(
        "import groupwise as gw\ndef f():\n    from groupwise.run import train, gone\n    gw.lost()"
    )
    assert {name for name in names if not exists(name)} == {"groupwise.run.gone", "groupwise.lost"}


def test_every_script_is_run():
    found = {path.relative_to(ROOT).as_posix() for path in SCRIPTS}
    others = {name for name in found if name.startswith(("examples/", "tools/gpu"))}  # which have tests of their own
    assert found - others - {"docs/conf.py"} == SMALLEST.keys()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Stands in for SmolLM2, which is a download."""
    from tiny_models import tiny_model
    from tiny_tokenizers import tiny_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("model"), tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def python():
    with quick_python() as path:
        yield path


LONG = "before_after cube_push keep_cache learn plan_check population_memory populations robot_images"
LONG += " robot_learning speed_sb3 text_learn trl_speed view_overhead"
"""Take 10 to 30 seconds, mostly imports of their processes: ``make learn`` runs them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.learn] * (Path(path).stem in LONG.split())) for path in SMALLEST]
)
def test_scripts_run_at_their_smallest(path, tmp_path, model, python):
    """Forked from a process that has imported the library: a new interpreter for each would double what it takes."""
    needed = NEEDED.get(path)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{path} needs {needed}")
    places = {"root": ROOT, "folder": tmp_path, "out": tmp_path / "out.json", "model": model}
    if "{served}" in SMALLEST[path]:
        from vllm_double import python_of_double

        places["served"] = python_of_double(tmp_path, python)
    words = [word.format(**places) for word in shlex.split(SMALLEST[path])]
    run_script(ROOT / path, *words, folder=tmp_path, lenient=True, python=python)
    assert "{out}" not in SMALLEST[path] or places["out"].stat().st_size


def test_the_workflow_calls_targets_of_the_makefile():
    called = re.findall(r"run: make ([\w-]+)", (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert called == ["test", "package"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in called)
