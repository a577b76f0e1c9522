"""Whole runs on texts: train, resume, evaluate, sample, and errors for bad input."""

import errno
import json
import math
import os
import random
import re
import signal
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from at_events import is_freed, on
from peft import LoraConfig
from text_games import Guess
from text_runs import (
    DIGITS,
    SETTINGS,
    copying,
    logged,
    numbers,
    same_weights,
    save_model,
    share_copied,
    train,
    weights,
    write_settings,
)
from tiny_models import tiny_model
from tiny_tokenizers import character_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import groupwise as gw
from groupwise import cli
from groupwise.cli.train import print_run
from groupwise.config.algorithm import SyncRefModelCfg
from groupwise.errors import RewardError
from groupwise.report.folder import RunFolder, kept_iterations, read_groups
from groupwise.text import build
from groupwise.text.load import with_adapters


@pytest.fixture(scope="module")
def copied(model, tmp_path_factory):
    return train(copying(), model, tmp_path_factory.mktemp("runs") / "copied")


NOTHING_HELD_OUT = gw.TextTask(numbers()[:20], reward=share_copied)
TWO_REWARDS = gw.TextTask(numbers()[:20], reward=[share_copied, lambda completions, **rest: [0.0] * len(completions)])
THREE_WEIGHTS = {"reward": {"name": "parts", "weights": [1.0, 1.0, 1.0]}}
ANSWERS_IN_TRAINING_ALONE = gw.TextTask([{"prompt": "1", "answer": "1"}], reward="exact", eval_data=["123"])


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_torchs_default_dtype_changes_nothing(model, copied, float64, tmp_path):
    run = train(copying(), model, tmp_path / "run")
    assert same_weights(run, copied)
    assert logged(run) == logged(copied)
    assert torch.get_default_dtype() == torch.float64


def test_the_memory_of_a_run_is_free_at_its_end(model, tmp_path):
    assert is_freed(lambda callbacks: train(copying(), model, tmp_path / "run", lora={"r": 2}, callbacks=callbacks))


def test_progress_and_result_speak_of_rewards_and_tokens(model, tmp_path, capsys):
    run = train(copying(), model, tmp_path / "run", logging={"progress": "iterations"})
    shown = capsys.readouterr().err
    assert re.search(r"\d / 100 tokens   reward +\d.*tokens/s", shown)
    assert print_run(run) == 0
    assert re.search(r"greedy reward .* at token [\d,]+\.\n", capsys.readouterr().out)


def test_a_run_leaves_what_it_reached_and_groups_to_look_at(copied):
    assert copied.summary["stopped"] == "total_steps"
    assert copied.summary["task"] == "text"
    assert copied.summary["episodes"] == 8
    last = copied.metrics()[-1]
    assert last["env_steps"] >= 100 == SETTINGS["total_steps"]
    # 4 prompts x 4 completions of at most 4 tokens
    assert last["rollout/env_steps"] <= 64
    assert last["rollout/env_steps"] == pytest.approx(16 * last["rollout/length_mean"])
    assert last["rollout/ended_by_eos"] + last["completions/clipped_ratio"] == 1
    assert last["rollout/sampler_kl"] < 1e-8
    table = pandas.read_parquet(sorted((copied.path / "groups").iterdir())[-1])
    members = table.groupby(["group", "member"])
    assert len(members) == 16
    assert len(table) == last["rollout/env_steps"]
    prompts, texts = members.start.first(), members.token.sum().str.replace("<.*?>", "", regex=True)
    assert (table.start.isna() == (table.step > 0)).all()  # long prompts are kept once
    assert members.reward.sum().tolist() == pytest.approx(share_copied(prompts, texts))
    assert members.step.max().tolist() == (members.size() - 1).tolist()
    assert (members.end.last() == "truncated").mean() == last["completions/clipped_ratio"]
    assert members.advantage.first().groupby("group").sum().tolist() == pytest.approx([0] * 4, abs=1e-5)


class Noted(Guess):
    """Its messages have an entry for the chat template, which JSON has no form for."""

    def step(self, text):
        seen, *rest = super().step(text)
        return [{"role": "user", "content": seen or "0", "turn": np.int64(self.left)}], *rest


def test_entries_of_messages_that_are_not_plain_are_kept_as_text(tmp_path):
    model = save_model(tmp_path / "model", chat=True)
    run = train(gw.TextTask(env=Noted), model, tmp_path / "run", evaluation={"interval": None})
    kept = read_groups(next(iter(kept_iterations(run.path / "groups").values())), "messages")["messages"]
    assert {message["turn"] for one in kept if one for message in json.loads(one) if "turn" in message} <= {
        "0",
        "1",
        "2",
    }
    assert '"turn": "' in "".join(one for one in kept if one)


def test_prompts_that_end_with_the_assistants_message_are_counted(tmp_path, capsys):
    model, question = save_model(tmp_path / "model", chat=True), {"role": "user", "content": "12"}
    for said, note in (("1", "3 prompts end with an assistant's message, which the completion continues"), ("", "")):
        messages = [question, {"role": "assistant", "content": said}] if said else [question]
        task = gw.TextTask([{"prompt": messages}] * 3, reward=lambda completions, **columns: [1.0] * len(completions))
        train(task, model, tmp_path / f"run{said}", logging={"progress": "lines"})
        shown = capsys.readouterr().err
        assert note in shown
        assert note or "assistant" not in shown


def test_an_end_of_turn_that_ends_no_completion_is_told(tmp_path, caplog):
    model, task = save_model(tmp_path / "model", chat=True), copying()
    tokenizer = AutoTokenizer.from_pretrained(model)
    train(task, model, tmp_path / "ends")
    assert "ends a turn" not in caplog.text
    tokenizer.eos_token = "<|im_start|>"
    tokenizer.save_pretrained(model)
    config = json.loads((model / "generation_config.json").read_text()) | {"eos_token_id": tokenizer.eos_token_id}
    (model / "generation_config.json").write_text(json.dumps(config))
    train(task, model, tmp_path / "runs on")
    message = "ends a turn by <|im_end|>, which ends no completion; fix: sampling.stop=['<|im_end|>']"
    assert caplog.text.count(message) == 1
    train(task, model, tmp_path / "stops", sampling={"max_new_tokens": 4, "stop": ["<|im_end|>"]})
    assert caplog.text.count(message) == 1


@pytest.mark.parametrize(
    ("precision", "lora", "warned"),
    [("bfloat16", None, 1), ("bfloat16", {"r": 2}, 0), ("autocast", None, 0), ("float32", None, 0)],
)
def test_weights_that_lose_small_steps_are_told_at_the_start(precision, lora, warned, model, tmp_path, caplog):
    how = {"path": str(model), "precision": precision, "lora": lora}
    gw.train(copying(), {"group_size": 4}, model=how, run_dir=tmp_path / "run", **SETTINGS)
    gw.sample(tmp_path / "run", "123")
    assert caplog.text.count("lost to rounding: at small learning rates hardly any changes; fix: ") == warned


def test_a_run_of_relative_paths_is_found_from_another_folder(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(model)
    write_settings(tmp_path, "model")
    cfg = json.loads(Path("text.json").read_text())
    cfg["task"] |= {"data": "train.jsonl", "eval_data": "test.jsonl"}
    Path("text.json").write_text(json.dumps(cfg))
    gw.train(gw.load_config("text.json", run_dir="run"))
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert gw.resume(tmp_path / "run", 200).summary["env_steps"] >= 200
    assert gw.evaluate(tmp_path / "run").episodes == 6
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["task"]["data"] == f"{tmp_path}/train.jsonl"
    assert saved["model"]["path"] == f"{tmp_path}/model"


def test_a_full_disk_ends_no_run(model, copied, tmp_path, monkeypatch, caplog):
    def full(path, flags, *args, opened=os.open, **options):
        if flags & os.O_CREAT and {"groups", "checkpoints"} & {*Path(path).parts}:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", full)
    run = train(copying(), model, tmp_path / "run")
    assert logged(run) == logged(copied)
    for name in ("the checkpoint of step", "checkpoints/best", ".parquet"):
        assert any(message.startswith("NOT SAVED") and name in message for message in caplog.messages)
    assert [path for path in run.path.rglob("*") if path.is_file() and path.parent != run.path] == []


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "adapters"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(algorithm, model, tmp_path):
    cfg = {"grpo": gw.GRPOCfg(group_size=4, learning_rate=1e-3, kl_coef=0.1), "ppo": gw.PPOCfg(learning_rate=1e-3)}
    cfg["adapters"] = cfg["grpo"].model_copy(update={"sync_ref_model": SyncRefModelCfg(steps=2), "learning_rate": 1e-2})
    settings = {"num_prompts": 16 if algorithm == "ppo" else 4, "checkpoint_interval": 1}
    settings |= {"lora": {"r": 2}} if algorithm == "adapters" else {}
    whole = train(copying(), model, tmp_path / "whole", cfg[algorithm], total_steps=200, **settings)
    part = train(copying(), model, tmp_path / "part", cfg[algorithm], total_steps=80, **settings)
    assert part.summary["iterations"] < whole.summary["iterations"]
    with pytest.raises(gw.errors.ConfigError, match=r"was given data and eval_data and reward in Python"):
        gw.resume(part.path)
    again = gw.resume(part.path, 200, **copying().given)
    assert same_weights(again, whole)
    assert logged(again, "eval/", "iteration") == logged(whole, "eval/", "iteration")


def test_an_interrupt_drops_a_rollout_which_a_resumed_run_collects_again(model, tmp_path):
    numbers = iter(range(10**6))

    def drawn(completions, **columns):
        if next(numbers) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return [random.random() for _ in completions]

    task = copying(reward=drawn)
    with pytest.raises(KeyboardInterrupt, match="interrupted; saved after step"):
        train(task, model, tmp_path / "part")
    assert [row["iteration"] for row in RunFolder(tmp_path / "part").read_metrics()] == [1]
    again, whole = gw.resume(tmp_path / "part", **task.given), train(task, model, tmp_path / "whole")
    assert same_weights(again, whole)
    assert logged(again) == logged(whole)


@pytest.mark.parametrize("ends", [RewardError("the judge is down"), None], ids=["rewards", "observation"])
def test_faults_that_are_no_fault_of_the_policy_cost_no_iteration(ends, model, tmp_path):
    class Grows(Guess):
        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed)
            return observation * (100 if trained else 1), info

    trained = []
    tell = on("iteration_end", lambda trainer, *_: trained.append(trainer.iteration))
    if ends is None:
        task, how = gw.TextTask(env=Grows, data_size=20, max_turns=2), "first observation of an episode has 100 tokens"
    else:
        task = copying(reward=lambda completions, **columns: [ends if trained else 1.0 for _ in completions])
        how = "no completion of the held-out prompts could be scored"
    with pytest.raises(gw.errors.GroupwiseError, match=how) as caught:
        train(task, model, tmp_path / "run", callbacks=[tell], evaluation={"interval": 1, "prompts": 2})
    assert "saved after step" in "\n".join(caught.value.__notes__)


def test_a_run_is_loaded_sampled_and_exported_without_its_data_and_rewards(model, tmp_path, monkeypatch):
    run = train(copying(), model, tmp_path / "run", {"group_size": 4, "kl_coef": 0.1})
    assert run.algorithm.reference is not None
    monkeypatch.setattr(gw.CausalLM, "make_reference", lambda policy: pytest.fail("a second model"))
    loaded = gw.Run.load(run.path)
    assert loaded.cfg.algorithm.kl_coef == 0.1
    assert gw.sample(loaded, "123") == gw.sample(run, "123") == gw.sample(run.path, "123")
    assert cli.main(["export", str(run.path), "--to", "transformers", "--out", f"{tmp_path}/out"]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(weights(run)[f"model.{name}"].equal(value) for name, value in exported.items())
    rows = numbers()[60:68]
    assert gw.evaluate(run.path, eval_data=rows, reward=share_copied) == gw.evaluate(run)
    with pytest.raises(gw.errors.ConfigError, match="eval_data were given in Python; fix: give them again"):
        gw.evaluate(loaded)
    with pytest.raises(gw.errors.ConfigError, match=r"1 reward.* given in Python, but now 0; fix: give them again"):
        gw.evaluate(run.path, eval_data=rows)


def test_prompts_are_sampled_alone_or_together(copied):
    together = gw.sample(copied, ["123", "456"], 2)
    assert [len(of_prompt) for of_prompt in together] == [2, 2]
    assert together[0] == gw.sample(copied, "123", 2)
    with pytest.raises(gw.errors.ConfigError, match=r"prompts are for conversations, but .* has no chat template"):
        gw.sample(copied, [{"role": "user", "content": "123"}])
    with pytest.raises(gw.errors.DataError, match=r"1 of 2 prompts have more than 60 tokens"):
        gw.sample(copied, ["123", "1" * 70])


def test_evaluation_tells_mean_and_pass_rates_with_intervals(copied):
    greedy = gw.evaluate(copied)
    assert (greedy.episodes, greedy.completions_per_prompt) == (8, 1)
    assert greedy.return_mean == pytest.approx(copied.summary["return_mean"])
    sampled = gw.evaluate(copied, completions_per_prompt=4)
    rates = [sampled.pass_at(k) for k in (1, 2, 4)]
    assert all(low <= mean <= high for mean, low, high in rates)
    assert rates[0][0] <= rates[1][0] <= rates[2][0]
    assert gw.evaluate(copied, completions_per_prompt=4, seed=5).rewards != sampled.rewards
    assert gw.evaluate(copied, 3).episodes == 3


def test_the_commands(model, tmp_path, capsys):
    def run_cli(*words, code=0):
        assert cli.main(list(words)) == code
        out, err = capsys.readouterr()
        return err if code else out

    run = f"{tmp_path}/run"
    printed = run_cli("train", write_settings(tmp_path, model), "--run-dir", run, "--sampling.temperature", "0.7")
    assert f"Next:  groupwise eval {run}" in printed
    assert run_cli("eval", run).startswith("return_mean=0 ci95=[0, 0] pass@1=0 ci95=[0, 0.39")
    found = json.loads(run_cli("eval", run, "--completions-per-prompt", "2", "--json"))
    assert (found["episodes"], found["completions_per_prompt"]) == (6, 2)
    assert found["pass_at_2"]["ci95"][0] == 0
    first = run_cli("sample", run, "123", "--count", "2")
    assert len(first.split("-" * 20)) == 2
    assert run_cli("sample", run, "123", "456", "--count", "2").startswith(first + "=" * 20 + "\n")
    error = run_cli("sample", run, "--messages", '[{"role": "user"}]', code=2)
    assert "prompt 0: message = {'role': 'user'}: expected the texts role and content" in error
    assert "--messages: '123 +' is broken JSON" in run_cli("sample", run, "--messages", "123 +", code=2)
    run_cli("resume", run, "--total-steps", "150")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["sampling"]["temperature"] == 0.7
    assert f"written: {run}/transformers" in run_cli("export", run, "--to", "transformers")


def test_adapters_train_alone_and_begin_as_the_seed_says_and_their_reference_is_the_base(model, tmp_path):
    cfg, runs = gw.GRPOCfg(group_size=4, kl_coef=0.05, learning_rate=1e-2), []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)  # who calls may have drawn numbers before
        runs.append(train(copying(), model, tmp_path / str(number), cfg, lora={"r": 2}, seed=seed))
    first = [run.metrics()[0] for run in runs]
    norms = [entry["train/grad_norm"] for entry in first]
    assert norms[0] == norms[1] != norms[2]
    assert all("lora" in name for name in weights(runs[0]))
    assert first[0]["train/kl"] == pytest.approx(0, abs=1e-6)
    assert runs[0].metrics()[-1]["train/kl"] > 0


def test_a_given_model_is_given_again_and_its_adapters_have_their_own_rate(model, tmp_path):
    def policy():
        made = with_adapters(AutoModelForCausalLM.from_pretrained(model), gw.config.LoRACfg(r=2))
        return gw.CausalLM(made, gw.SamplingCfg(max_new_tokens=4), tokenizer=AutoTokenizer.from_pretrained(model))

    settings = {"num_prompts": 4, "logging": {"progress": "none"}, "total_steps": 40}
    run = gw.train(copying(), policy=policy(), run_dir=tmp_path / "run", **settings)
    assert run.cfg.algorithm.learning_rate == 1e-5
    with pytest.raises(gw.errors.ConfigError, match=r"was given policy in Python; fix: .*policy=\.\.\."):
        gw.sample(run.path, "123")
    assert gw.sample(run.path, "123", policy=policy()) == gw.sample(run, "123")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: gw.evaluate(run, checkpoint="best"), "checkpoint: only for a run's folder; fix: give"),
        (lambda run: gw.evaluate(run, reward=share_copied), "reward: only for a run's folder"),
        (lambda run: gw.evaluate(run, n_eval_episodes=3), "unknown argument 'n_eval_episodes'"),
        (lambda run: gw.evaluate(run, video=True), "video is of environments; .*fix: groupwise sample"),
        (lambda run: gw.sample(run, "12", checkpoint="best"), "checkpoint: only for a run's folder"),
        (lambda run: gw.evaluate(run.path, rewards=share_copied), "unknown argument 'rewards'"),
        (lambda run: gw.resume(run.path, totalsteps=3), "unknown argument 'totalsteps'"),
        (
            lambda run: gw.evaluate(run.path, tools=[len]),
            r"tools: .* would not use it; fix: leave it out, or begin a new",
        ),
        (lambda run: gw.sample(run.path, "12", env=object), r"env: .* would not use it"),
        (lambda run: gw.sample(run.cfg, "12", tool=len), r"tool: .* would not use it"),
    ],
)
def test_what_would_be_ignored_is_refused(copied, call, message):
    with pytest.raises(gw.errors.ConfigError, match=message):
        call(copied)


def test_an_object_that_settings_took_the_place_of_is_not_given_again(copied, tmp_path):
    rows, given, end = numbers()[60:63], copying().given, copied.summary["env_steps"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = {"eval_data": str(tmp_path / "rows.jsonl")}
    fork = gw.fork(copied.path, tmp_path / "fork", total_steps=end + 20, task=task)
    for use in (gw.resume, gw.evaluate):
        with pytest.raises(
            gw.errors.ConfigError, match=r"^eval_data: the run was trained .* would not use it; fix: leave"
        ):
            use(fork, **given)
    assert gw.resume(fork, **given | {"eval_data": None}).summary["episodes"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": {"max_new_tokens": 64}}, "max_new_tokens=64 leaves no room for a prompt: .* 64 tokens; fix"),
        ({"sampling": {"max_new_tokens": 62}}, "prompts have more than 2 tokens .*a smaller max_new"),
        ({"algorithm": gw.GRPOCfg(kl_estimator="exact")}, "kl_estimator='exact' .*CausalLM.*fix: 'k3'"),
        ({"policy": gw.PolicyCfg(hidden_sizes=(3,))}, "policy = PolicyCfg.*: expected a gw.CausalLM; fix: model="),
        ({"reward": share_copied}, r"^reward: of language models, .* are a task; fix: gw\.train\("),
        ({"lora": True}, "lora = True: expected settings by name"),
        ({"algorithm": gw.GRPOCfg(num_steps=9)}, "num_steps=9 has no effect on text; fix: leave it out"),
        ({"algorithm": gw.GRPOCfg(credit={"reward": "parts"})}, "compares several rewards; got one, fix"),
        ({"algorithm": gw.GRPOCfg(credit=THREE_WEIGHTS), "task": TWO_REWARDS}, "are for 2 rewards; fix: one for each"),
        ({"overlong_buffer": 5}, "overlong_buffer=5 > max_new_tokens=4; fix: a smaller one"),
        ({"model": "nowhere/at-all"}, "nowhere/at-all"),
        ({"stop": {"threshold": 0.5}, "task": NOTHING_HELD_OUT}, "stop.threshold=0.5 needs held-out prompts"),
        ({"task": ANSWERS_IN_TRAINING_ALONE}, "'exact' needs the column 'answer'; the eval_data have none"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(change, message, model, tmp_path):
    with pytest.raises((gw.errors.ConfigError, gw.errors.DataError), match=message):
        train(**{"task": copying(), "model": model, "run_dir": tmp_path / "run"} | change)
    assert not (tmp_path / "run").exists()


def test_completions_of_the_evaluation_that_have_no_room_are_named(model, tmp_path):
    with pytest.raises(gw.errors.ConfigError, match=r"^evaluation\.sampling\.max_new_tokens=64 leaves no room"):
        train(copying(), model, tmp_path / "run", evaluation={"sampling": {"max_new_tokens": 64}})


def look_up(word: str) -> str:
    """Look up.

    Args:
        word: A word.
    """
    return word


class Lookup:
    def reset(self, **row):
        return "?"

    def look_up(self, word: str) -> str:
        """Look up.

        Args:
            word: A word.
        """
        return word


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"env": "CartPole-v1", "model": "path", "reward_funcs": print, "train_dataset": []}, "data, reward=my_reward"),
        ({"env": copying(), "rewards": print, "tools": [print]}, "data, reward=my_reward, tools=[my_tool]"),
        ({"env": copying(), "reward_fn": 1, "eval_dataset": []}, "data, reward=my_reward"),
        ({"env": "CartPole-v1", "lora": {"r": 4}}, "data, reward=my_reward"),
        ({"env": [], "tools": []}, "data, reward=my_reward, tools=[my_tool]"),
        ({"env": copying(), "environment_factory": print}, "data, reward=my_reward, env=MyEnv"),
    ],
)
def test_arguments_of_trl_are_answered_by_the_call_to_write(given, words, tmp_path):
    model = save_model(tmp_path / "model", positions=512)  # the description of tools is long
    with pytest.raises(gw.errors.ConfigError) as caught:
        gw.train(**given)
    line = str(caught.value).partition("fix: ")[2].partition(";")[0]
    assert line == f"gw.train(gw.TextTask({words}), model='path-or-hub-id')"
    names = {"gw": gw, "data": numbers()[:8], "my_reward": share_copied}
    names |= {"my_tool": look_up, "MyEnv": Lookup, "SETTINGS": SETTINGS | {"run_dir": tmp_path / "run"}}
    call = line.replace("'path-or-hub-id')", f"{str(model)!r}, **SETTINGS)")
    assert eval(call, names).summary["env_steps"] > 0


@pytest.mark.parametrize("name", ["lora", "peft_config"])
def test_a_config_of_peft_is_answered_by_the_settings_to_write(name, model, tmp_path):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"], use_dora=True)
    with pytest.raises(gw.errors.ConfigError, match=r"lora is a LoraConfig of peft, .*; fix: ") as caught:
        train(copying(), model, tmp_path / "run", **{name: config})
    found = eval(str(caught.value).partition("lora=")[2])
    assert found == {"r": 4, "targets": ["q_proj", "v_proj"], "alpha": 8, "dora": True}
    assert train(copying(), model, tmp_path / "run", lora=found).cfg.model.lora.alpha == 8


def test_a_reward_that_knows_nothing_or_fails_stops_the_run(model, tmp_path):
    def silent(prompts, **rest):
        return [None] * len(prompts)

    def broken(prompts, completions, **rest):
        raise KeyError("solution")

    with pytest.raises(RewardError, match=r"no completion of 3 iterations in a row could .* rewards silent"):
        train(gw.TextTask(numbers(), reward=silent), model, tmp_path / "silent", total_steps=1000)
    with pytest.raises(gw.errors.RewardError, match=r"reward 'broken' raised KeyError: 'solution'; fix") as caught:
        train(gw.TextTask(numbers(), reward=broken), model, tmp_path / "broken")
    assert "on_env_error" not in caught.value.__notes__[-1]  # a setting of environments


def test_a_sampler_that_is_another_policy_stops_the_run(model, tmp_path, monkeypatch):
    honest = build.complete

    def other(policy, *args, **options):
        groups = honest(policy, *args, **options)
        return [[c._replace(log_probs=[p + 0.6 for p in c.log_probs]) for c in group] for group in groups]

    monkeypatch.setattr(build, "complete", other)
    with pytest.raises(gw.errors.SamplerMismatchError, match=r"sampler and trainer differ: KL 0\.149 .*more than 0.1"):
        train(copying(), model, tmp_path / "run")


def test_a_reward_that_is_not_finite_is_dropped_if_the_algorithm_says_so(model, tmp_path):
    def reward(prompts, completions, **_):
        return [math.inf if number % 3 == 0 else len(text) / 4 for number, text in enumerate(completions)]

    cfg = gw.GRPOCfg(group_size=4, on_nonfinite="drop")
    metrics = train(copying(reward), model, tmp_path / "run", cfg).metrics()
    assert [entry["rollout/unscorable"] for entry in metrics] == [6] * 2
    assert all(math.isfinite(value) for entry in metrics for value in entry.values())


def test_lone_surrogates_are_replaced_with_one_warning(model, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1\\ud8002"}\n{"prompt": "\\ud83d\\ude00"}\n')
    task = gw.TextTask(tmp_path / "data.jsonl", reward=share_copied, tool=lambda text: None)
    with pytest.warns(UserWarning, match="lone surrogates: U.FFFD takes their place") as caught:
        run = train(task, model, tmp_path / "run")
    assert sum("surrogates" in str(warning.message) for warning in caught) == 1
    assert run.summary["stopped"] == "total_steps"
    with pytest.warns(UserWarning, match="lone surrogates"):
        assert len(gw.sample(run, "1\ud800")) == 1


def test_a_model_may_have_more_rows_than_its_tokenizer_has_tokens(tmp_path):
    """As Qwen pads. Rows without a token are empty pieces of kept groups."""
    tiny_model().save_pretrained(tmp_path / "model")
    character_tokenizer(DIGITS).save_pretrained(tmp_path / "model")
    run = train(copying(), tmp_path / "model", tmp_path / "run", sampling={"max_new_tokens": 8})
    kept = read_groups(next(iter(kept_iterations(run.path / "groups").values())), "token")["token"]
    assert "" in kept
    assert set(kept) & set(DIGITS)


def test_what_follows_from_other_settings_follows_from_those_of_a_fork(model, tmp_path):
    rows = [row | {"answer": row["prompt"]} for row in numbers()[:68]]
    task = gw.TextTask(rows[:60], reward=["exact", share_copied], reward_weights=[1.0, 2.0], eval_data=rows[60:])
    algorithm = gw.GRPOCfg(group_size=4, credit={"reward": "parts"}, objective={"aggregation": "constant"})
    run = train(task, model, tmp_path / "run", algorithm, sampling={"max_new_tokens": 3})
    cfg = run.algorithm.cfg
    assert (cfg.objective.aggregation.max_length, cfg.credit.reward.weights) == (3, (1.0, 2.0))
    saved = json.loads((run.path / "config.json").read_text())["algorithm"]
    assert (saved["objective"]["aggregation"]["max_length"], saved["credit"]["reward"]["weights"]) == (None, [])
    assert run.cfg == gw.Run.load(run.path).cfg
    assert len(gw.sample(run.cfg, "12")) == 1  # also where only a build knows the longest completion
    rewards = [{"name": "exact", "weight": 1.0}, {"name": "<given in Python>", "weight": 5.0}]
    more, end = {"sampling": {"max_new_tokens": 6}, "task": {"rewards": rewards}}, run.summary["env_steps"]
    path = gw.fork(run.path, tmp_path / "fork", total_steps=end + 20, **more)
    given = {"reward": share_copied, "data": task.given["data"], "eval_data": task.given["eval_data"]}
    forked = gw.resume(path, total_steps=end + 50, **given)
    cfg = forked.algorithm.cfg
    assert (cfg.objective.aggregation.max_length, cfg.credit.reward.weights) == (6, (1.0, 5.0))
    again = json.loads((forked.path / "config.json").read_text())
    assert again["algorithm"]["objective"]["aggregation"]["max_length"] is None
    assert again["total_steps"] == end + 50


def test_an_evaluation_takes_the_prompts_that_there_are_and_makes_episodes_by_seeds(model, tmp_path):
    run = train(gw.TextTask(numbers()[:20], reward=share_copied, eval_data=numbers()[20:23]), model, tmp_path / "run")
    assert [gw.evaluate(run, count).episodes for count in (2, 4)] == [2, 3]
    run = train(gw.TextTask(env=Guess, data_size=8, eval_size=2, max_turns=2), model, tmp_path / "seeds")
    assert gw.evaluate(run, 5).episodes == 5


@pytest.mark.parametrize("prompts", [{"role": "user", "content": "1"}, 5, None])
def test_what_is_no_prompt_is_refused(copied, prompts):
    with pytest.raises(
        gw.errors.DataError, match=r"expected a text, a list of messages, or a list of these; fix: \[message\]"
    ):
        copied.policy.predict(prompts)


def test_a_model_given_with_adapters_needs_a_path(tmp_path):
    for given in (tiny_model(), 3):
        with pytest.raises(gw.errors.ConfigError, match=r"model.*fix: "):
            gw.train(copying(), model=given, lora={"r": 2}, run_dir=tmp_path / "run")
    with pytest.raises(gw.errors.ConfigError, match=r"many right answers.*; fix: a reward of your own"):
        gw.TextTask("reasoning-gym:n_queens").rewards()
