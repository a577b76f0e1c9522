"""Training loops by hand: the agent, the environment of prompts, and that they are what ``gw.train`` does."""

import math
import shutil

import pytest
import torch
from text_games import Guess
from text_runs import DIGITS, copying, numbers, share_copied
from tiny_models import tiny_model
from tiny_tokenizers import character_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import groupwise as gw
from groupwise import cli
from groupwise.config.policy import ModelCfg
from groupwise.errors import ConfigError, DataError
from groupwise.report.folder import RunFolder
from groupwise.report.health import diagnose
from groupwise.report.page import write_page
from groupwise.text.load import with_adapters

SHORT = {"max_new_tokens": 4}
QUIET = {"logging": {"progress": "none"}}


def digits(**settings):
    rows = numbers()
    return gw.PromptEnv(rows[:60], rows[60:68], reward=share_copied, batch_size=4, **settings)


def agent_of(model, **settings):
    fields = {"group_size": 4, "learning_rate": 1e-3} | settings.pop("algorithm", {})
    return gw.LanguageAgent(str(model), fields, sampling=settings.pop("sampling", SHORT), **settings)


def loop(agent, env, iterations):
    prompts = env.reset()
    for _ in range(iterations):
        completion_ids, masks = agent.get_action(prompts)
        prompts, rewards = env.step(completion_ids)
        agent.learn((completion_ids, masks, rewards))
    return agent


def assert_equal(policy, other):
    ours, theirs = policy.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora": {"r": 2}, "seed": 3, "algorithm": {"kl_coef": 0.05, "num_epochs": 2}},
        {"sampling": SHORT | {"top_k": 3}, "preset": "remax", "mask_truncated_completions": True, "overlong_buffer": 3},
    ],
    ids=["plain", "adapters", "filtered"],
)
def test_a_loop_by_hand_is_gw_train_bit_for_bit(model, settings, tmp_path):
    by_hand = loop(agent_of(model, **settings), digits(seed=settings.get("seed", 0)), iterations=2)
    fields = {"group_size": 4, "learning_rate": 1e-3} | settings.get("algorithm", {})
    rest = {"sampling": SHORT} | {name: value for name, value in settings.items() if name != "algorithm"}
    rest |= QUIET | {"num_prompts": 4, "total_iterations": 2}
    run = gw.train(copying(), fields, model=str(model), run_dir=tmp_path / "run", **rest)
    assert_equal(by_hand.policy, run.policy)
    last = run.metrics()[-1]
    assert by_hand.metrics == {name: last[name] for name in by_hand.metrics}
    assert by_hand.metrics["train/optimizer_steps"] > 0


def test_completions_are_ids_with_masks_and_texts(model):
    agent = agent_of(model)
    completions, masks = agent.get_action(["12", "345"])
    assert len(completions) == len(masks) == 2
    for ids, mask, texts, prompt in zip(completions, masks, completions.texts, ["12", "345"], strict=True):
        assert ids.shape[0] == mask.shape[0] == 4
        assert mask.shape[1] == ids.shape[1] - 1
        for row, (of_row, text) in zip(ids, zip(mask, texts, strict=True), strict=True):
            written = row[1:][of_row].tolist()
            assert row[: len(prompt)].tolist() == [4 + DIGITS.index(digit) for digit in prompt]
            assert 1 <= len(written) <= 4
            assert agent.policy.tokenizer.decode(written, skip_special_tokens=True) == text
            assert not of_row[: len(prompt) - 1].any()
    again, _ = agent.get_action(["12", "345"])
    assert again.texts != completions.texts  # each call has seeds of its own


def test_without_training_one_greedy_completion_of_each_prompt(model):
    agent = agent_of(model)
    greedy, _ = agent.get_action(["123", "456"], training=False)
    assert [ids.shape[0] for ids in greedy] == [1, 1]
    assert [text for (text,) in greedy.texts] == agent.policy.predict(["123", "456"])
    assert agent.iteration == 0
    assert agent.get_action("123", training=False)[0].texts == [greedy.texts[0]]


def test_the_score_is_the_mean_over_all_held_out_prompts_and_training_goes_on_where_it_was(model):
    agent, env = agent_of(model), digits()
    prompts = env.reset()
    with env.eval_mode():
        assert len(env) == 8
        held_out = [row["prompt"] for row in numbers()[60:68]]
        assert env.reset() + env.step([["1"]] * 4)[0] == held_out
    expected = share_copied(held_out, agent.policy.predict(held_out))
    assert agent.test(env) == pytest.approx(sum(expected) / 8)
    assert env.reset() == prompts


def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own():
    env = gw.PromptEnv(["a", "b", "c"], reward=lambda completions: [0.0] * len(completions), batch_size=2)
    assert len(env) == 3
    seen, prompts = [], env.reset()
    for _ in range(6):
        assert env.num_epochs == len(seen) // 3
        seen += prompts
        prompts, rewards = env.step([["x", "y"]] * 2)
        assert rewards.shape == (2, 2)
    assert env.num_epochs == 4
    assert [sorted(seen[i : i + 3]) for i in (0, 3, 6, 9)] == [["a", "b", "c"]] * 4
    assert len({tuple(seen[i : i + 3]) for i in (0, 3, 6, 9)}) > 1
    assert env.reset() == env.reset()  # what was not answered comes again
    assert env.reset(reset_dataloaders=True) == seen[:2]
    assert env.num_epochs == 0


def test_what_nobody_can_score_is_nan_and_teaches_nothing(model):
    def first_only(prompts, completions):
        return [1.0 if number == 0 else None for number in range(len(completions))]

    env = gw.PromptEnv(["123"], ["456"], reward=first_only, batch_size=1)
    agent = agent_of(model)
    before = agent.clone().policy
    completions, masks = agent.get_action(env.reset())
    _, rewards = env.step(completions)
    assert rewards[0, 0] == 1
    assert rewards[0, 1:].isnan().all()
    loss, kl = agent.learn((completions, masks, rewards))
    assert loss == kl == agent.metrics["train/optimizer_steps"] == 0
    assert_equal(agent.policy, before)
    assert agent.test(env) == 1


def test_tokens_that_are_taken_out_of_a_mask_have_no_loss(model):
    agent, rewards = agent_of(model), torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    completions, masks = agent.get_action(["123"])
    assert agent.clone().learn((completions, masks, rewards)) == agent.clone().learn((completions, masks, rewards))
    masked, part, whole = (agent.clone() for _ in range(3))
    masked.learn((completions, [torch.zeros_like(masks[0])], rewards))
    assert_equal(masked.policy, agent.policy)
    part.learn((completions, [masks[0] & (torch.arange(masks[0].shape[1]) < 3)], rewards))
    whole.learn((completions, masks, rewards))
    assert part.metrics["train/grad_norm"] != whole.metrics["train/grad_norm"]
    # the presence penalty does not depend on a mask made by hand
    agent = agent_of(model, sampling={"presence_penalty": 1.0, "max_new_tokens": 8})
    completions, masks = agent.get_action(["123", "45"])
    agent.learn((completions, [mask & (mask.cumsum(dim=1) != 3) for mask in masks], torch.eye(4)[:2]))
    assert agent.metrics["rollout/sampler_kl"] == pytest.approx(0, abs=1e-9)


def test_a_schedule_follows_the_loop(model):
    agent, env = agent_of(model, algorithm={"schedule": {"name": "linear", "warmup": 2}}), digits()
    rates = []
    for step in range(4):
        agent.set_progress(step, 4)
        loop(agent, env, iterations=1)
        rates.append(agent.metrics["train/learning_rate"])
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


@pytest.mark.parametrize("settings", [{}, {"lora": {"r": 2}, "algorithm": {"kl_coef": 0.1}}], ids=["plain", "adapters"])
def test_clones_and_saved_agents_go_on_exactly_and_are_sampled_from_and_exported(model, settings, tmp_path):
    folder, agent = tmp_path / "agent", loop(agent_of(model, index=5, **settings), digits(), iterations=1)
    agent.save(folder)
    loop(agent, digits(), iterations=1).save(folder)  # takes the place of the first
    loaded, twin = gw.LanguageAgent.load(folder), agent.clone(index=7)
    assert (agent.index, twin.index) == (5, 7)
    assert (loaded.index, loaded.iteration, loaded.cfg) == (5, 2, agent.cfg)
    assert gw.sample(folder, "123", deterministic=True) == [agent.policy.predict("123")]
    assert cli.main(["export", str(folder), "--to", "transformers"]) == 0
    assert diagnose(RunFolder(folder)) == []  # no run was killed
    assert "Saved by LanguageAgent.save" in write_page(folder).read_text()
    loop(agent, digits(), iterations=1)
    for other in (loaded, twin):  # they share nothing, and go on alike
        assert_equal(other.clone().policy, gw.LanguageAgent.load(folder).policy)
        assert_equal(loop(other, digits(), iterations=1).policy, agent.policy)
        assert other.metrics == agent.metrics
    with pytest.raises(gw.errors.RunFolderError, match=r"agent.*fix"):
        gw.LanguageAgent.load(tmp_path)
    (folder / "metrics.jsonl").touch()
    with pytest.raises(gw.errors.RunFolderError, match="of a training run, which would be lost; fix: another folder"):
        agent.save(folder)


def test_a_model_of_the_users_is_given_again(model, tmp_path):
    def policy():
        adapted = with_adapters(AutoModelForCausalLM.from_pretrained(model), gw.config.LoRACfg(r=2))
        return gw.CausalLM(adapted, gw.SamplingCfg(**SHORT), tokenizer=AutoTokenizer.from_pretrained(model))

    agent = gw.LanguageAgent(policy(), {"group_size": 4})
    assert agent.cfg.algorithm.learning_rate == 1e-5
    loop(agent, digits(), iterations=1).save(tmp_path / "agent")
    with pytest.raises(gw.errors.ConfigError, match=r"was given a model in Python; fix: .*model=\.\.\."):
        gw.LanguageAgent.load(tmp_path / "agent")
    loaded = gw.LanguageAgent.load(tmp_path / "agent", policy())
    assert_equal(loaded.policy, agent.policy)


def test_an_agent_goes_on_where_a_run_ended(model, tmp_path):
    fields = {"group_size": 4, "learning_rate": 1e-3}
    settings = {"num_prompts": 4, "sampling": SHORT, "model": str(model)} | QUIET
    run = gw.train(copying(), fields, run_dir=tmp_path / "run", total_iterations=2, **settings)
    agent, env = gw.LanguageAgent.load(run.path), digits()
    assert_equal(agent.policy, run.policy)
    env.reset()
    for _ in range(2):
        env.step([["1"]] * 4)
    longer = gw.train(copying(), fields, run_dir=tmp_path / "longer", total_iterations=3, **settings)
    assert_equal(loop(agent, env, iterations=1).policy, longer.policy)


def test_an_agent_of_a_run_on_an_environment_divides_by_the_longest_episode_as_the_run_did(model, tmp_path):
    task = gw.TextTask(env=Guess, data_size=8, max_turns=3)
    constant = gw.GRPOCfg(group_size=2, objective={"aggregation": "constant"})
    settings = {"num_prompts": 2, "sampling": SHORT, "model": str(model)} | QUIET
    run = gw.train(task, constant, run_dir=tmp_path / "run", total_iterations=1, **settings)
    agent = gw.LanguageAgent.load(run.path)
    lengths = [cfg.objective.aggregation.max_length for cfg in (run.algorithm.cfg, agent.algorithm.cfg)]
    assert lengths == [3 * run.cfg.sampling.max_new_tokens] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "ppo"}, r"learns from groups, by grpo; got 'ppo', fix: gw\.train"),
        ({"algorithm": {"collection": {"dynamic_sampling": 0}}}, r"dynamic_sampling needs a collector; fix: gw\.train"),
        ({"algorithm": {"credit": {"reward": "parts"}}}, r"compares several rewards; got one"),
        ({"num_prompts": 3}, r"unknown setting 'num_prompts' of a LanguageAgent"),
        ({"system_promt": "Add."}, r"unknown setting 'system_promt' of a LanguageAgent.*'system_prompt'"),
        ({"system_prompt": "Add.", "sampling": SHORT}, "system_prompt is for conversations, but .* no chat template"),
        ({"lora": {"rank": 2}}, r"unknown key 'rank'; did you mean 'r'\?"),
        ({"sampling": {"top_k": 0}}, r"sampling\.top_k = 0: input should be greater than or equal to 2"),
    ],
)
def test_settings_that_an_agent_cannot_have(model, settings, message):
    with pytest.raises(gw.errors.ConfigError, match=message):
        gw.LanguageAgent(str(model), settings.pop("algorithm", None), **settings)


def test_experiences_that_do_not_fit(model):
    agent, r = agent_of(model), torch.ones(2, 4)
    c, m = agent.get_action(["123", "456"])
    for experiences, message in [
        ((list(c), m, r), "completions are a list; fix: what get_action returned"),
        ((c, m, r[0]), r"rewards of shape \(4,\) .* fix: rewards \[B, G\]"),
        ((c, m[:1], r), r"masks of shapes \[\(4, \d+\)\] for 2 groups of 4 completions"),
        ((c, [m[0][:, :1], m[1]], r), r"masks of shapes \[\(4, 1\), "),
        ((c, m, r * math.inf), r"reward of completion 0 at step \d of the rollout is not finite: inf"),
    ]:
        with pytest.raises(gw.errors.DataError, match=message):
            agent.learn(experiences)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "there is no reward; fix: reward=my_function"),
        ({"reward": len, "data_sise": 3}, "unknown setting 'data_sise' of a PromptEnv.*'data_size'"),
        ({"reward_fn": len}, "unknown setting 'reward_fn' of a PromptEnv.*'reward'"),
        ({"reward": len, "batch_size": 0}, "batch_size = 0: expected a whole number of at least 1"),
    ],
)
def test_settings_that_an_environment_cannot_have(settings, message):
    with pytest.raises(gw.errors.ConfigError, match=message):
        gw.PromptEnv(["a"], **settings)


def test_completions_that_do_not_fit_an_environment():
    env = gw.PromptEnv(["a", "b"], reward=lambda completions: [0.0] * len(completions), batch_size=2)
    with pytest.raises(gw.errors.DataError, match=r"1 groups, of \[1\] completions, for 0 prompts; fix: reset\(\)"):
        env.step([["x"]])
    env.reset()
    with pytest.raises(gw.errors.DataError, match=r"2 groups, of \[1, 2\] completions, for 2 prompts"):
        env.step([["x"], ["x", "y"]])
    with pytest.raises(gw.errors.ConfigError, match="no prompts are held out; fix: PromptEnv"), env.eval_mode():
        pass


def test_a_text_is_no_group():
    env = gw.PromptEnv(["a", "b"], reward=lambda completions: [0.0] * len(completions), batch_size=2)
    env.reset()
    with pytest.raises(
        DataError, match=r"'12' is a text, expected a group; fix: a list of completions for each prompt"
    ):
        env.step(["12", "34"])


def test_an_agent_is_loaded_without_the_run_that_its_model_began_with(model, tmp_path):
    rows = [{"prompt": "12", "completion": "12"}]
    settings = {"num_prompts": 1, "total_iterations": 1, "sampling": SHORT} | QUIET
    gw.train(gw.TextTask(rows), "bc", model=str(model), run_dir=tmp_path / "clone", **settings)
    begun = ModelCfg(path=str(model), init_from=str(tmp_path / "clone"))
    agent = gw.LanguageAgent(begun, {"group_size": 2, "kl_coef": 0.1}, sampling=SHORT)
    agent.save(tmp_path / "agent")
    shutil.rmtree(tmp_path / "clone")
    loaded = gw.LanguageAgent.load(tmp_path / "agent")
    assert_equal(loaded.policy, agent.policy)
    assert_equal(loop(loaded, digits(), iterations=1).policy, loop(agent, digits(), iterations=1).policy)


def test_an_agent_of_a_chat_model_reads_messages():
    policy = gw.CausalLM(tiny_model(), gw.SamplingCfg(**SHORT), tokenizer=character_tokenizer("0123456789", chat=True))
    agent = gw.LanguageAgent(policy, {"group_size": 2}, system_prompt="1")
    message, system = {"role": "user", "content": "2"}, {"role": "system", "content": "1"}
    prompts = []
    for prompt in ([system, message], [message], "2"):
        (ids,), (mask,) = agent.get_action([prompt])
        prompts.append(ids[0, : int(mask[0].long().argmax()) + 1].tolist())
    assert prompts[0] == prompts[1] == prompts[2]


# Episodes of several turns


class Halves(gw.TextEnv):
    """Two turns, of which each earns for the digits that its text repeats from the observation."""

    def reset(self, *, seed=None, options=None):
        self.digit, self.left = str(seed % 10), 2
        return self.digit, {}

    def step(self, text):
        self.left -= 1
        return self.digit, 0.1 + text.count(self.digit) / 3, not self.left, False, {"success": self.digit in text}

    def sample_action(self, rng):
        return str(rng.integers(10))


PLAYED = {"max_turns": 2, "data_size": 40, "eval_size": 6}
TURNS = {"max_new_tokens": 4, "stop": list("0123456789")}


def test_episodes_by_hand_are_those_of_gw_train_bit_for_bit(model, tmp_path):
    agent, env = agent_of(model, sampling=TURNS), gw.PromptEnv(env=Halves, batch_size=4, **PLAYED)
    env.reset()
    turns = 0
    for _ in range(2):
        completions, masks = agent.play(env)
        for ids, mask, group in zip(completions, masks, completions.groups, strict=True):
            turns = max(turns, *(member.turns for member in group))
            assert mask.shape == (4, ids.shape[1] - 1)
            assert mask.sum(dim=1).tolist() == [member.written for member in group]
            assert len({tuple(member.prompt.tokens) for member in group}) == 1
        _, rewards = env.step(completions)
        totals = [[member.episode.total for member in group] for group in completions.groups]
        assert rewards.tolist() == totals
        agent.learn((completions, masks, rewards))
    assert turns == 2
    more = QUIET | {"num_prompts": 4, "total_iterations": 2, "sampling": TURNS, "evaluation": {"prompts": 2}}
    fields = {"group_size": 4, "learning_rate": 1e-3}
    run = gw.train(gw.TextTask(env=Halves, **PLAYED), fields, model=str(model), run_dir=tmp_path / "run", **more)
    assert_equal(agent.policy, run.policy)
    before = env.batch
    assert 0 <= agent.test(env) <= 2
    assert env.batch is before
    env.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "gigpo"},
        {"algorithm": {"credit": {"returns": "turn", "group_key": "group_step"}}},
        {"algorithm": {"collection": {"on_env_error": "drop"}}},
    ],
    ids=["states", "turns", "errors"],
)
def test_settings_of_episodes_are_those_of_gw_train_and_of_no_prompts(model, settings, tmp_path):
    agent, env = agent_of(model, sampling=TURNS, **settings), gw.PromptEnv(env=Halves, batch_size=4, **PLAYED)
    env.reset()
    completions, masks = agent.play(env)
    agent.learn((completions, masks, env.step(completions)[1]))
    more = QUIET | {"num_prompts": 4, "total_iterations": 1, "sampling": TURNS, "evaluation": {"prompts": 2}}
    fields = {"group_size": 4, "learning_rate": 1e-3} | settings.get("algorithm", {})
    more |= {"model": str(model), "run_dir": tmp_path / "run", "preset": settings.get("preset")}
    run = gw.train(gw.TextTask(env=Halves, **PLAYED), fields, **more)
    assert_equal(agent.policy, run.policy)
    with pytest.raises(
        ConfigError,
        match=r"^algorithm\..*(task\.env|has no effect on text).*, which LanguageAgent\.play takes as PromptEnv",
    ):
        agent.get_action(["12"])
    assert len(agent.get_action(["12"], training=False)[0]) == 1
    env.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "gigpo"},
        {"algorithm": {"credit": {"returns": "turn_to_go", "group_key": "group_step"}}},
        {"algorithm": {"objective": {"ratio": "turn"}}},
        {"algorithm": {"collection": {"on_env_error": "retry"}}},
    ],
    ids=["gigpo", "turns", "ratios", "errors"],
)
def test_an_agent_with_settings_of_episodes_is_saved_and_loaded(model, settings, tmp_path):
    agent = agent_of(model, **settings)
    agent.save(tmp_path / "agent")
    loaded = gw.LanguageAgent.load(tmp_path / "agent")
    loaded.save(tmp_path / "agent")
    again = gw.LanguageAgent.load(tmp_path / "agent")
    assert again.cfg == agent.cfg
    assert_equal(again.policy, agent.policy)
    assert_equal(gw.Run.load(tmp_path / "agent").policy, agent.policy)
    assert len(gw.sample(tmp_path / "agent", count=2, env=Guess)) == 2


def test_a_mistake_is_named_whatever_else_only_prompts_can_have(model):
    algorithm = {"gamma": 0.5, "credit": {"returns": "return_to_go"}, "num_steps": 5}
    with pytest.raises(ConfigError, match="num_steps"):
        agent_of(model, algorithm=algorithm)


def test_credit_that_counts_tokens_is_of_no_episodes(model):
    agent = agent_of(model, algorithm={"gamma": 0.5, "credit": {"returns": "return_to_go"}})
    loop(agent, digits(), iterations=1)
    env = gw.PromptEnv(env=Halves, batch_size=2, **PLAYED)
    env.reset()
    with pytest.raises(
        ConfigError, match=r"returns='return_to_go', .* counts tokens, and an environment answers turns"
    ):
        agent.play(env)


def test_a_loss_over_the_longest_episode_needs_its_length(model, tmp_path):
    env, dr_grpo = gw.PromptEnv(env=Halves, batch_size=4, **PLAYED), {"sampling": TURNS, "preset": "dr_grpo"}
    env.reset()
    with pytest.raises(ConfigError, match=r"divides by max_length=4, one turn, .* 2; fix: .*max_length=8"):
        agent_of(model, **dr_grpo).play(env)
    agent = agent_of(model, algorithm={"objective": {"aggregation": {"max_length": 8}}}, **dr_grpo)
    completions, masks = agent.play(env)
    agent.learn((completions, masks, env.step(completions)[1]))
    more = QUIET | dr_grpo | {"num_prompts": 4, "total_iterations": 1, "evaluation": {"prompts": 2}}
    fields = {"group_size": 4, "learning_rate": 1e-3}
    run = gw.train(gw.TextTask(env=Halves, **PLAYED), fields, model=str(model), run_dir=tmp_path / "run", **more)
    assert run.algorithm.cfg.objective == agent.algorithm.cfg.objective
    assert_equal(agent.policy, run.policy)
    env.close()


def test_a_batch_of_episodes_is_played_and_one_of_prompts_is_not(model):
    agent, env = agent_of(model, sampling=TURNS), gw.PromptEnv(env=Halves, batch_size=2, **PLAYED)
    with pytest.raises(DataError, match=r"the completions are of no episodes; fix: agent.play\(env\)"):
        env.step(agent.get_action([prompt or "1" for prompt in env.reset()])[0])
    with pytest.raises(ConfigError, match=r"there are no episodes to play; fix: PromptEnv\(env=...\), or get_action"):
        agent.play(digits())
    with pytest.raises(DataError, match=r"the environment has no batch; fix: env.reset\(\)"):
        agent.play(gw.PromptEnv(env=Halves, **PLAYED))
    with pytest.raises(ConfigError, match=r"env: a LanguageAgent plays episodes of a PromptEnv; fix: PromptEnv\(env="):
        agent_of(model, env=Halves)


def test_episodes_that_are_played_anew_leave_no_environment_behind(model):
    class Counted(Halves):
        alive = 0

        def __init__(self):
            Counted.alive += 1

        def close(self):
            Counted.alive -= 1

    agent, env = agent_of(model, sampling=TURNS), gw.PromptEnv(env=Counted, batch_size=2, **PLAYED)
    env.reset()
    agent.play(env)
    many = Counted.alive
    for _ in range(3):
        agent.play(env)
    assert Counted.alive == many
    env.close()
    assert Counted.alive == 0


def test_an_agent_goes_on_from_a_run_on_an_environment(model, tmp_path):
    more = QUIET | {"num_prompts": 2, "total_iterations": 1, "sampling": TURNS, "evaluation": {"prompts": 2}}
    task, fields = gw.TextTask(env=Halves, **PLAYED), {"group_size": 4, "learning_rate": 1e-3}
    run = gw.train(task, fields, model=str(model), run_dir=tmp_path / "run", **more)
    agent = gw.LanguageAgent.load(run.path)
    assert_equal(agent.policy, run.policy)
    env = gw.PromptEnv(env=Halves, batch_size=2, **PLAYED)
    env.reset()
    completions, masks = agent.play(env)
    agent.learn((completions, masks, env.step(completions)[1]))
    agent.save(tmp_path / "agent")
    assert_equal(gw.LanguageAgent.load(tmp_path / "agent").policy, agent.policy)


def test_a_test_between_playing_and_learning_leaves_the_episodes_alone(model):
    seen = []

    def reward(environments, completions, **columns):
        seen.append([environment.seen for environment in environments])
        return [0.0] * len(completions)

    agent = agent_of(model)
    env = gw.PromptEnv(env=Guess, reward=reward, data_size=8, eval_size=2, batch_size=2, max_turns=2)
    env.reset()
    completions, _ = agent.play(env)
    agent.test(env)
    assert seen.pop()  # of the evaluation
    env.step(completions)
    assert len(seen[0]) == 8
    assert any(seen[0])
