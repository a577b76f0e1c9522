"""Whole runs of a model that has a tool: trained, resumed, evaluated, sampled."""

import json

import pandas
import pytest
from text_runs import Count, logged, numbers, same_weights, share_copied, train, write_settings

import groupwise as gw
from groupwise import cli
from groupwise.report.folder import RunFolder
from groupwise.text import tools

ENDS = Count.stop
TURNS = {"max_turns": 3, "tool_answer": " {} "}


def counting(reward=share_copied, tool=None):
    rows = numbers()
    return gw.TextTask(rows[:40], reward=reward, eval_data=rows[60:64], tool=tool or Count(), **TURNS)


@pytest.fixture(scope="module")
def counted(model, tmp_path_factory):
    return train(counting(), model, tmp_path_factory.mktemp("runs") / "counted", checkpoint_interval=1)


def replayed(text):
    """Turns of a text: each but the last ends a call, and the right answer stands behind it."""
    turns = []
    while True:
        end = next((i for i, c in enumerate(text) if c in ENDS), len(text) - 1) + 1
        turns.append(text[:end])
        if len(turns) == TURNS["max_turns"] or not text[:end].endswith(ENDS):
            assert len(text) == end
            return turns
        answer = f" {end} "
        assert text[end:].startswith(answer)
        text = text[end:].removeprefix(answer)


PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 1.0}


@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_k": 3}, {"temperature": 0.7}, PENALTIES, {"min_new_tokens": 2}],
    ids=lambda s: next(iter(s), "plain"),
)
def test_sampler_and_trainer_agree_over_turns(sampling, model, tmp_path):
    settings = {"sampling": {"max_new_tokens": 4} | sampling, "total_steps": 60}
    run = train(counting(), model, tmp_path / "run", **settings)
    for entry in run.metrics():
        assert entry["rollout/sampler_kl"] < 1e-8
        assert 1 < entry["rollout/turns_mean"] < 3
    assert run.metrics()[-1]["train/grad_norm"] > 0
    if not sampling:  # a plain function is asked where the sampling stops
        settings["sampling"]["stop"] = ENDS
        same = train(counting(tool=Count().__call__), model, tmp_path / "same", **settings)
        assert logged(same, "eval/") == logged(run, "eval/")


def test_a_run_leaves_its_tool_in_the_settings_and_groups_with_answers_to_look_at(counted):
    recorded = json.loads((counted.path / "config.json").read_text())
    assert (recorded["task"]["tool"], recorded["task"]["max_turns"]) == ("<given in Python>", 3)
    table = pandas.read_parquet(sorted((counted.path / "groups").iterdir())[-1])
    written, answered = table[table.loss_mask], table[~table.loss_mask]
    assert answered.ratio.isna().all()
    assert written.ratio.notna().all()
    members = table.groupby(["group", "member"])
    texts = members.token.sum().str.replace("<.*?>", "", regex=True)
    turns = texts.map(lambda text: len(replayed(text)))
    assert set(turns) == {1, 2, 3}
    assert (written.groupby(["group", "member"]).size() <= 4 * turns).all()


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(model, tmp_path):
    cfg = gw.GRPOCfg(group_size=4, learning_rate=1e-3, kl_coef=0.1)
    whole = train(counting(), model, tmp_path / "whole", cfg, total_steps=250, checkpoint_interval=1)
    part = train(counting(), model, tmp_path / "part", cfg, total_steps=90, checkpoint_interval=1)
    assert part.summary["iterations"] < whole.summary["iterations"]
    given = counting().given
    with pytest.raises(gw.errors.ConfigError, match=r"was given tool in Python; fix: .*gw.resume\(.*, tool=\.\.\.\)"):
        gw.resume(part.path, 250, **given | {"tool": None})
    again = gw.resume(part.path, 250, **given)
    assert same_weights(again, whole)
    assert logged(again, "eval/") == logged(whole, "eval/")


@pytest.mark.parametrize("preset", ["agilerl_turn", "agilerl_turn_ratio", "dr_grpo", "ppo"])
def test_turns_are_open_to_ratios_and_credit_which_need_a_tool(preset, model, tmp_path):
    cfg = gw.GRPOCfg(group_size=4, learning_rate=1e-3)
    settings = {"algorithm": gw.PPOCfg()} if preset == "ppo" else {"algorithm": cfg, "preset": preset}
    run = train(counting(), model, tmp_path / "run", **settings)
    assert all(entry["rollout/sampler_kl"] < 1e-8 and entry["rollout/turns_mean"] > 1 for entry in run.metrics())
    assert max(entry["train/grad_norm"] for entry in run.metrics()) > 0
    if preset == "dr_grpo":  # the longest completion is three turns of four tokens
        assert run.algorithm.cfg.objective.aggregation.max_length == 12
    if preset.startswith("agilerl"):
        setting = {"agilerl_turn": "credit.returns", "agilerl_turn_ratio": "objective.ratio"}[preset]
        with pytest.raises(
            gw.errors.ConfigError, match=f"{setting}='turn' needs turns, and a completion is one without a tool"
        ):
            train(gw.TextTask(numbers(), reward=share_copied), model, tmp_path / "none", "grpo", preset=preset)
        assert not (tmp_path / "none").exists()


def test_evaluation_plays_the_same_turns(counted):
    seen, asked = {}, []

    def copied(prompts, completions, **columns):
        seen.update(zip(prompts, completions, strict=True))
        return share_copied(prompts, completions)

    class Asked(Count):
        def __call__(self, text):
            asked.append(text)
            return super().__call__(text)

    found = gw.evaluate(counted.path, **counting().given | {"reward": copied, "tool": Asked()})
    assert len(seen) == 4
    turns = {prompt: replayed(text) for prompt, text in seen.items()}
    # a text that was cut is not asked about
    calls = [turn for parts in turns.values() for turn in parts if turn.endswith(ENDS)]
    assert sorted(text for text in asked if text.endswith(ENDS)) == sorted(calls)
    assert calls
    assert found.rewards == tuple((reward,) for reward in share_copied(seen, seen.values()))
    for length, parts in zip(found.lengths, turns.values(), strict=True):
        assert sum(map(len, parts)) <= length <= 4 * len(parts)
    # a sample of the same prompt is the same text
    prompt, text = next(iter(seen.items()))
    assert gw.sample(counted, prompt, deterministic=True) == [text]
    assert gw.sample(counted.path, prompt, deterministic=True, tool=Count()) == [text]
    with pytest.raises(gw.errors.ConfigError, match="the tool was given in Python; fix: give it again as tool="):
        gw.sample(counted.path, prompt)


def test_a_registered_tool_works_from_the_command_line(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tools, "TOOLS", dict(tools.TOOLS))
    gw.register_tool("count")(Count)
    settings = write_settings(tmp_path, model, tool="count", **TURNS)
    run = f"{tmp_path}/run"
    assert cli.main(["train", settings, "--run-dir", run, "--task.max-turns", "2"]) == 0
    assert RunFolder(tmp_path / "run").read_config()["task"]["max_turns"] == 2
    assert cli.main(["eval", run]) == 0
    assert cli.main(["resume", run, "--total-steps", "200"]) == 0
    assert cli.main(["sample", run, "123", "--count", "2"]) == 0
    assert cli.main(["train", settings, "--run-dir", f"{run}2", "--task.tool", "counter"]) == 2
    assert "unknown tool 'counter': did you mean 'count'" in capsys.readouterr().err


def test_a_tool_that_fails_ends_the_run_and_says_what_it_was_given(model, tmp_path):
    def broken(text):
        raise KeyError("unit")

    sampling = {"max_new_tokens": 4, "stop": ENDS}
    with pytest.raises(gw.errors.ToolError, match=r"the tool raised KeyError: 'unit'\s+its input: '\d*[567]'\s+fix:"):
        train(counting(tool=broken), model, tmp_path / "run", sampling=sampling)
