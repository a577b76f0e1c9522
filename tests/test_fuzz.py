"""Random input for everything that parses what others made: one clear error or a result, never another exception.

``make torture`` runs it for ten minutes with ever new seeds.
"""

import copy
import hashlib
import json
import math
import shutil
from contextlib import suppress
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_runs import copying, save_model
from tiny_tokenizers import character_tokenizer

import groupwise as gw
from groupwise.cli.options import Parser, parse_options
from groupwise.config import resolve, to_json
from groupwise.config.run import RewardCfg, TextTaskCfg
from groupwise.errors import CheckpointError, ConfigError, GroupwiseError, RunFolderError
from groupwise.report.folder import RunFolder
from groupwise.text.rewards import RewardSet, make_reward
from groupwise.text.task import Example, PromptEncoder
from groupwise.text.tools import Calculator
from groupwise.training.checkpoint import load_checkpoint

words = st.text(max_size=8)
plain = st.none() | st.booleans() | st.integers() | st.floats() | words | st.sampled_from(["auto", 0, 1, -1, 1e400])
json_values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.just("name"), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def changed_trees(draw, tree):
    """The JSON with up to three of its values replaced, dropped or added."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        places = list(places_of(tree))
        if not places:
            break
        inside, key = draw(st.sampled_from(places))
        if draw(st.booleans()):
            inside[key] = draw(json_values)
        elif isinstance(inside, dict) and draw(st.booleans()):
            inside[draw(words)] = inside.pop(key)
        else:
            del inside[key]
    return tree


def places_of(tree):
    """Containers and keys of all values in a JSON tree."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places_of(tree[key])


@st.composite
def changed_bytes(draw, data):
    """The bytes with some cut out, replaced or repeated, or the end missing."""
    first = draw(st.integers(0, len(data)))
    last = draw(st.integers(first, min(len(data), first + 64)) | st.just(len(data)))
    return data[:first] + draw(st.binary(max_size=16) | st.just(data[first:last] * 2)) + data[last:]


@cache
def settings_of(env):
    if env == "text":
        task = {"data": "train.jsonl", "rewards": [{"name": "exact"}], "tool": {"name": "calculator"}}
        return {"task": task, "model": {"path": "m", "lora": {"r": 4}}, "algorithm": {"group_size": 8, "kl_coef": 0.1}}
    return json.loads(to_json(resolve(env)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("kind", ["CartPole-v1", "Pendulum-v1", "text"])
@given(data=st.data())
def test_settings(kind, folder, data):
    file = folder / "settings.json"
    if data.draw(st.booleans()):
        file.write_text(json.dumps(data.draw(changed_trees(settings_of(kind)))))
    else:
        file.write_bytes(data.draw(changed_bytes(json.dumps(settings_of(kind)).encode())))
    only(ConfigError, lambda: gw.load_config(file))


given_words = st.text(max_size=12) | st.sampled_from(["--algorithm", "ppo", "--env.kwargs", "{}", "--seed", "1e3"])


@given(argv=st.lists(given_words, max_size=5))
def test_options(argv):
    only(ConfigError, lambda: parse_options(["CartPole-v1", *argv], Parser()))


def control(path, **algorithm):
    gw.train(
        "CartPole-v1", {"num_steps": 8, "num_epochs": 1, "minibatch_size": 16, **algorithm}, num_envs=2, total_steps=16,
        evaluation={"episodes": 1}, speed="off", keep_checkpoints=1, logging={"progress": "none"}, run_dir=path,
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def trained(folder):
    return control(folder / "run", name="ppo")


@given(data=st.data())
def test_checkpoints(trained, data):
    """Damaged on the way, or changed by a stranger, who also makes the digests fit."""
    latest = trained.parent / "damaged"
    shutil.rmtree(latest, ignore_errors=True)
    shutil.copytree(trained / "checkpoints" / "latest", latest)
    files = sorted(path for path in latest.iterdir() if path.is_file())
    changed = data.draw(st.sampled_from(files))
    content = changed.read_bytes()
    if changed.suffix == ".json" and data.draw(st.booleans()):
        changed.write_text(json.dumps(data.draw(changed_trees(json.loads(content)))))
    else:
        changed.write_bytes(data.draw(changed_bytes(content)))
    signed = changed.name != "manifest.json" and data.draw(st.booleans())
    if signed:
        manifest = json.loads((latest / "manifest.json").read_text())
        manifest["sha256"][changed.name] = hashlib.sha256(changed.read_bytes()).hexdigest()
        (latest / "manifest.json").write_text(json.dumps(manifest))
    found = only(CheckpointError, lambda: load_checkpoint(latest))
    if changed.name != "manifest.json" and not signed and changed.read_bytes() != content:
        assert found is None, "damage was not noticed"


class StopsAtOnce(gw.Callback):
    """A resumed run ends as soon as its state is loaded."""

    def on_training_start(self, trainer):
        raise KeyboardInterrupt


@pytest.fixture(scope="module", params=["ppo", "grpo", "text"])
def saved_run(request, folder):
    """A run folder, and what has to be given to resume it."""
    path = folder / request.param
    if request.param != "text":
        return control(
            path, name=request.param, **({"group_size": 2, "kl_coef": 0.1} if request.param == "grpo" else {})
        ), {}
    task = copying()
    options = {"model": str(save_model(folder / "model")), "sampling": {"max_new_tokens": 4}}
    options |= {"run_dir": path, "speed": "off", "keep_checkpoints": 1, "logging": {"progress": "none"}}
    gw.train(task, gw.GRPOCfg(group_size=2, kl_coef=0.1), num_prompts=2, total_steps=10, **options)
    return path, {name: value for name, value in task.given.items() if value is not None}


@settings(max_examples=settings().max_examples // 5)  # each resumes a run
@given(data=st.data())
def test_states(saved_run, data):
    """Changed by a stranger who makes the digests fit: refused when it is resumed, or taken."""
    path, given_objects = saved_run
    copied = path.with_name("changed")
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(path, copied)
    latest = copied / "checkpoints" / "latest"
    state, manifest = (json.loads((latest / name).read_text()) for name in ("state.json", "manifest.json"))
    (latest / "state.json").write_text(json.dumps(data.draw(changed_trees(state))))
    manifest["sha256"]["state.json"] = hashlib.sha256((latest / "state.json").read_bytes()).hexdigest()
    (latest / "manifest.json").write_text(json.dumps(manifest))
    with suppress(KeyboardInterrupt):
        only(GroupwiseError, lambda: gw.resume(copied, callbacks=[StopsAtOnce()], **given_objects))


@given(data=st.data())
def test_metrics(trained, data):
    copied = trained.parent / "metrics"
    copied.mkdir(exist_ok=True)
    (copied / "metrics.jsonl").write_bytes(data.draw(changed_bytes((trained / "metrics.jsonl").read_bytes())))
    only(RunFolderError, RunFolder(copied).read_metrics)


answers = st.text(max_size=40) | st.text("0123456789.,/-+*()eE<>answer \\boxed{}^%$ ", max_size=60)


@pytest.mark.parametrize(
    ("name", "settings"), [("exact", {}), ("numeric", {"tolerance": 0.1}), ("regex", {"pattern": r"<b>(.*)</b>"})]
)
@given(texts=st.lists(answers, min_size=1, max_size=8), gold=answers)
def test_graders(name, settings, texts, gold):
    """Scores of any completion are 0 or 1."""
    rewards = RewardSet([make_reward(RewardCfg(name=name, kwargs=settings))])
    count = len(texts)
    found = only(GroupwiseError, lambda: rewards.score(["?"] * count, texts, [[1]] * count, {"answer": [gold] * count}))
    if found is not None:
        assert all(math.isnan(score) or score in (0.0, 1.0) for score in found.reward)


@given(expression=st.text("0123456789.+-*/()% ejx_\t", max_size=60) | st.text(max_size=40))
def test_the_calculator(expression):
    answer = Calculator()(f"<calc>{expression}</calc>")
    assert answer is None or (isinstance(answer, str) and len(answer) < 500)


ENCODER = PromptEncoder(character_tokenizer("0123456789+-"), TextTaskCfg())


@given(prompt=st.text(max_size=60))
def test_prompts(prompt):
    tokens = only(GroupwiseError, lambda: ENCODER.encode(Example(prompt, {})))
    assert tokens is None or all(isinstance(token, int) for token in tokens)


def only(error, call):
    """What the call returns; None if it raised that error."""
    try:
        return call()
    except error:
        return None
