"""Rollouts of texts by hand: a generator that writes a script, one character a token."""

import pytest
import torch
from text_updates import updated
from tiny_models import moved, tiny_model
from tiny_tokenizers import character_tokenizer

from groupwise.algorithms.grpo import GRPO
from groupwise.config.algorithm import GRPOCfg
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import RewardCfg, TextRunCfg, TextTaskCfg
from groupwise.errors import DataError, RewardError
from groupwise.text.collector import (
    Dialogue,
    TextBuffer,
    TextCollector,
    TextRow,
    overlong_penalty,
    pass_at_k,
    repeated_ngrams,
    text_rollout,
)
from groupwise.text.generation import Completion
from groupwise.text.policy import CausalLM
from groupwise.text.rewards import RewardSet, make_reward
from groupwise.text.task import Example, PromptEncoder

END = 3
TOKENIZER = character_tokenizer("0123456789")
ENCODER = PromptEncoder(TOKENIZER, TextTaskCfg(chat="never"))


class Scripted:
    """Writes the texts of ``script``, prompt by prompt; a point ends a text."""

    def __init__(self, script):
        self.script, self.asked = script, []

    def __call__(self, prompts, seeds, sampling, deterministic=False, pasts=None):
        self.asked.append([TOKENIZER.decode(prompt) for prompt in prompts])
        return [
            [self._completion("greedy" if deterministic else member, prompt) for member in range(seeds.shape[1])]
            for prompt in prompts
        ]

    def _completion(self, member, prompt):
        texts = self.script[TOKENIZER.decode(prompt)]
        text = texts[-1] if member == "greedy" else texts[member]
        tokens = TOKENIZER(text.rstrip("."))["input_ids"] + [END] * text.endswith(".")
        return Completion(tokens, [-1.0] * len(tokens), "eos" if text.endswith(".") else "length")


def value(prompts, completions, **rest):
    """The number that is written; 9 is unscorable."""
    return [None if text == "9" else float(text or 0) for text in completions]


def length(prompts, completions, **rest):
    return [float(len(text)) for text in completions]


def collector(script, *, functions=(value,), group_size=2, credit=None, collection=None, actor_only=True, **settings):
    policy = CausalLM(tiny_model(vocab_size=len(TOKENIZER)), SamplingCfg(max_new_tokens=5), actor_only=actor_only)
    examples = ENCODER.select([Example(prompt, {}) for prompt in script])
    rewards = RewardSet([make_reward(RewardCfg(name="<given in Python>"), f) for f in functions])
    grpo = GRPOCfg(group_size=group_size, credit=credit or {}, collection=collection or {})
    cfg = TextRunCfg(**{"num_prompts": len(script), "algorithm": grpo, "sampling": policy.sampling} | settings)
    return TextCollector(policy, Scripted(script), examples, Dialogue(ENCODER), rewards, cfg)


def collect(of):
    buffer = TextBuffer()
    rollout = of.collect(0, buffer.start_rollout())
    buffer.add(rollout)
    assert buffer.start_rollout().shape == (0, 0)  # nothing is allocated
    return rollout


def rows_of(rollout, of):
    """Reward, and whether anything of the row counts, by prompt and member."""
    rows = {}
    for number, member in enumerate(of.members):
        text = TOKENIZER.decode(member.prompt.tokens)
        found = (rollout["reward"][number].sum().item(), bool(rollout["loss_mask"][number].any()))
        rows.setdefault(text, []).append(found)
    return rows


def test_a_rollout_by_hand():
    of = collector({"12": ["3.", "4"]})
    rollout = collect(of)
    # tokens 1 2 | 3 end and 1 2 | 4, of which the prompt's were not chosen
    one, two, three, four = TOKENIZER("1234")["input_ids"]
    no = [0, 0, 0, 0]
    for name, rows in {
        "obs": [[one, two, three, END], [one, two, four, 0]],
        "action": [[two, three, END, 0], [two, four, 0, 0]],
        "valid": [[1, 1, 1, 0], [1, 1, 0, 0]],
        "loss_mask": [[0, 1, 1, 0], [0, 1, 0, 0]],
        "sample_log_prob": [[0, -1, -1, 0], [0, -1, 0, 0]],
        "reward": [[0, 0, 3, 0], [0, 4, 0, 0]],
        "terminated": [[0, 0, 1, 0], no],
        "truncated": [no, [0, 1, 0, 0]],
        "group_id": [[0, 0, 0, -1], [0, 0, -1, -1]],
        "episode_id": [[0, 0, 0, -1], [1, 1, -1, -1]],
        "step": [[0, 1, 2, 0], [0, 1, 0, 0]],
    }.items():
        assert rollout[name].tolist() == rows, name
    metrics = of.metrics()
    assert metrics["rollout/return_mean"] == 3.5
    assert metrics["rollout/env_steps"] == 3
    assert metrics["completions/clipped_ratio"] == metrics["rollout/ended_by_eos"] == 0.5
    assert metrics["rollout/reward_std"] == 0.5


def test_passes_of_a_whole_group_are_those_of_groups_with_all_rewards():
    """So a metric has one name, however many completions could be scored: 9 could not."""
    half, none = ["1", "0", "0", "1"], ["9", "0", "0", "1"]
    for script, passes in (
        ({"12": half, "34": ["0", "0", "0", "0"]}, {"1": 0.25, "4": 0.5}),
        ({"12": half, "34": none}, {"1": (1 / 2 + 1 / 3) / 2, "4": 1.0}),
        ({"12": none}, {"1": 1 / 3}),
    ):
        of = collector(script, group_size=4)
        collect(of)
        found = {name: value for name, value in of.metrics().items() if "pass_at" in name}
        assert found == {f"rollout/pass_at_{k}": pytest.approx(value) for k, value in passes.items()}


@pytest.mark.parametrize("ending", ["", "."])
def test_nothing_follows_a_completion_however_it_ended(ending):
    """A critic that bootstraps from a state after the last reward would raise its own values, without bound."""
    of = collector({"12": [f"34{ending}", f"5{ending}"]}, actor_only=False)
    moved(of.policy.value_head)  # it begins with zeros
    rollout = collect(of)
    last, value = rollout["terminated"] | rollout["truncated"], rollout["value"]
    assert last.sum(dim=1).tolist() == [1, 1]
    assert value[rollout["valid"]].abs().min() > 0
    assert rollout["next_value"][last].tolist() == [0, 0]
    before = rollout["valid"] & ~last
    assert torch.equal(rollout["next_value"][before], value.roll(-1, dims=1)[before])


def test_rewards_of_single_tokens_stand_where_the_tokens_are():
    rows = [TextRow([7, 8], [4, 5, 3], [-1.0] * 3, (0.5, -1.0, 2.0), True, 0)]
    rows.append(TextRow([9], [6, 6], [-1.0] * 2, [0.25, 0.0], False, 1))
    assert text_rollout(rows)["reward"].tolist() == [[0, 0.5, -1.0, 2.0, 0], [0.25, 0, 0, 0, 0]]


@pytest.mark.parametrize(("prompt", "tokens", "log_probs"), [([], [1], [0.0]), ([1], [], []), ([1], [1, 2], [0.0])])
def test_rows_that_cannot_be(prompt, tokens, log_probs):
    with pytest.raises(DataError, match=r"row 0 has \d prompt tokens, \d completion tokens and \d log_probs; fix"):
        text_rollout([TextRow(prompt, tokens, log_probs, 1.0, True, 0)])


def test_members_that_nobody_can_score_are_none():
    of = collector({"1": ["9.", "4."], "2": ["9.", "9."]})
    assert rows_of(collect(of), of) == {"1": [(0, False), (4, True)], "2": [(0, False)] * 2}
    assert of.metrics()["rollout/unscorable"] == 3
    of = collector({"1": ["9.", "9."]})
    collect(of)
    collect(of)
    with pytest.raises(RewardError, match="no completion of 3 iterations in a row could be scored"):
        collect(of)


@pytest.mark.parametrize(("dynamic_sampling", "asked", "skipped"), [(None, 3, 0), (0.0, 3, 2), (1 / 3, 4, 3)])
def test_groups_that_teach_nothing_are_kept_left_out_or_replaced_within_the_budget(
    dynamic_sampling, asked, skipped, monkeypatch
):
    script = {"1": ["4.", "5."], "2": ["4.", "4."], "3": ["9.", "4."], "4": ["7.", "7."]}
    of = collector(script, num_prompts=3, collection={"dynamic_sampling": dynamic_sampling})
    monkeypatch.setattr("groupwise.text.collector.in_order", lambda prompts, place, seed: prompts[place % 4])
    rollout = collect(of)
    assert sum(map(len, of.generate.asked)) == asked == of.position
    filtered = dynamic_sampling is not None
    counts = {prompt: any(c for _, c in rows) for prompt, rows in rows_of(rollout, of).items()}
    assert counts == {"1": True, "2": not filtered, "3": not filtered} | ({"4": False} if asked == 4 else {})
    assert of.metrics()["rollout/filtered_groups"] == skipped
    assert of.last_steps == 4 * asked


def test_resampling_ends_as_soon_as_there_are_enough(monkeypatch):
    script = {"1": ["4.", "4."], "2": ["4.", "5."], "3": ["1.", "2."]}
    of = collector(script, num_prompts=1, collection={"dynamic_sampling": 9})
    monkeypatch.setattr("groupwise.text.collector.in_order", lambda prompts, place, seed: prompts[place])
    collect(of)
    assert of.generate.asked == [["1"], ["2"]]
    assert of.position == 2


@pytest.mark.parametrize(("texts", "warned"), [(["9.", "9."], True), (["9.", "4."], False)])
def test_a_first_rollout_that_mostly_has_no_reward_is_told(texts, warned, caplog):
    of = collector({"1": texts, "2": ["9.", "5."]})
    for _ in range(2):
        collect(of)
    said = [record.getMessage() for record in caplog.records if "have no reward" in record.getMessage()]
    assert said == ["3 of 4 completions have no reward and are not trained on: every reward was None, not finite or failed; fix: "
                    f"the rewards {', '.join(of.rewards.names)}, or the columns that they read"] * warned  # fmt: skip


def test_rewards_summed_in_another_order_are_equal():
    def added_up(completions, **rest):  # they differ in the last place of a float64
        return [0.1 + 0.2 + 0.3 if text == "4" else 0.3 + 0.2 + 0.1 for text in completions]

    of = collector({"1": ["4.", "5."]}, functions=[added_up], collection={"dynamic_sampling": 0})
    rollout = collect(of)
    assert of.members[0].reward != of.members[1].reward
    assert of.metrics()["rollout/filtered_groups"] == 1
    assert not rollout["loss_mask"].any()


def test_overlong_completions_are_punished_linearly():
    of = collector({"1": ["4.", "44."], "2": ["4444.", "44444"]}, overlong_buffer=4)
    # at most 5 tokens, of which the last 4 cost 1/4 each: lengths 2, 3, 5, 5, the end included
    rewards = [reward for rows in rows_of(collect(of), of).values() for reward, _ in rows]
    assert sorted(rewards) == [4 - 0.25, 44 - 0.5, 4444 - 1, 44444 - 1]
    assert of.metrics()["rollout/return_mean"] == pytest.approx((4 + 44 + 4444 + 44444) / 4)
    # DAPO's: 20480 tokens, of which the last 4096 are punished
    lengths = torch.tensor([16384, 16385, 18432, 20480, 30000])
    assert overlong_penalty(lengths, 20480, 4096).tolist() == [0, 1 / 4096, 0.5, 1, 1]


def test_a_cut_completion_without_loss_is_still_compared_with():
    of = collector({"1": ["4.", "5", "6."]}, group_size=3, mask_truncated_completions=True)
    rollout = collect(of)
    _, metrics = updated(of.policy, rollout, group_size=3, objective={"old_log_prob": "recomputed"})
    assert rollout["trained"].any(dim=1).tolist() == [True, False, True]
    assert rollout["loss_mask"].any(dim=1).all()
    # advantages -1, 0 and 1 over the deviation 1 + 1e-4: that of the cut row is not lost on its members
    assert metrics["train/policy_loss"] == pytest.approx(0, abs=1e-6)
    assert metrics["train/grad_norm"] > 0


@pytest.mark.parametrize("placement", ["reward", "advantage"])
def test_a_kl_in_the_credit_is_also_that_of_tokens_without_loss(placement):
    advantages = []
    for left_out in ([], [[0, 0], [1, 0], [1, 1]]):  # the first token of one row, and all of another
        of = collector({"1": ["44.", "55", "6."]}, group_size=3)
        rollout = collect(of)
        rollout["trained"] = rollout["valid"].clone()
        for place in left_out:
            rollout["trained"][tuple(place)] = False
        credit = {"kl_placement": placement, "scale": "none"}
        algorithm = GRPO(GRPOCfg(group_size=3, kl_coef=0.5, kl_estimator="k1", credit=credit), of.policy)
        moved(of.policy)
        algorithm.update(rollout)
        advantages.append(algorithm.advantage)
    torch.testing.assert_close(*advantages)
    assert advantages[0].frac().count_nonzero() > 3  # those of the rewards 44, 55 and 6 alone are whole


def test_the_greedy_completion_is_measured_against_and_not_trained_on():
    of = collector({"1": ["4.", "5.", "7."]}, credit={"baseline": {"name": "greedy"}, "scale": "none"})
    rollout = collect(of)
    assert rollout["greedy"].any(dim=1).tolist() == [False, False, True]
    assert rollout["loss_mask"].any(dim=1).tolist() == [True, True, False]
    assert of.metrics()["rollout/return_mean"] == 4.5
    assert of.last_steps == 6


def test_parts_of_the_reward_are_kept_unweighted():
    of = collector({"1": ["44.", "9."]}, functions=(value, length))
    rollout = collect(of)
    assert rollout["reward_parts"].sum(dim=1).tolist() == [[44, 2], [0, 1]]
    assert rollout["reward"].sum(dim=1).tolist() == [46, 1]  # what one function cannot say, the other does
    assert (of.metrics()["reward/value_mean"], of.metrics()["reward/length_mean"]) == (44, 1.5)


def test_every_epoch_has_every_prompt_once_and_goes_on_from_the_position():
    script = {str(i): ["4.", "5."] for i in range(5)}
    whole, part = (collector(script, num_prompts=2) for _ in range(2))
    for _ in range(5):
        collect(whole)
    asked = [prompt for prompts in whole.generate.asked for prompt in prompts]
    assert sorted(asked[:5]) == sorted(asked[5:]) == sorted(script)
    assert asked[:5] != asked[5:]
    part.load_state_dict(whole.state_dict() | {"position": 4})
    part.iteration = 2
    collect(part)
    assert part.generate.asked == [asked[4:6]]
    ranks = [collector(script | {"5": ["4.", "5."]}, num_prompts=3) for _ in range(2)]
    for rank, of in enumerate(ranks):  # processes take different prompts
        of.rank, of.world_size = rank, 2
        collect(of)
    assert sorted(ranks[0].generate.asked[0] + ranks[1].generate.asked[0]) == [*script, "5"]


def test_data_that_grew_since_the_save_are_told_and_taken(caplog):
    saved = collector({"1": ["4.", "5."]}, num_prompts=1)
    collect(saved)
    same, grown = collector({"1": ["4.", "5."]}), collector({"1": ["4.", "5."], "2": ["4.", "5."]})
    same.load_state_dict(saved.state_dict())
    assert not caplog.messages
    grown.load_state_dict(saved.state_dict())
    assert caplog.messages[0].startswith("the data now have 2 usable rows, and had 1 when the run was saved")
    collect(grown)


def test_a_rollout_that_fails_is_collected_again_from_the_same_prompts():
    script = {str(i): ["4.", "5."] for i in range(5)}
    of, asked = collector(script, num_prompts=2), []

    def failing(prompts, **rest):
        asked.append(list(dict.fromkeys(prompts)))
        if len(asked) == 2:
            raise KeyError("once")
        return [float(i % 2) for i in range(len(prompts))]

    of.rewards = RewardSet([make_reward(RewardCfg(name="<given in Python>"), failing)])
    collect(of)
    before = of.state_dict()
    with pytest.raises(RewardError):
        collect(of)
    assert of.state_dict() == before
    collect(of)
    assert asked[-1] == of.generate.asked[1] == of.generate.asked[2]


def test_repeated_ngrams_and_pass_at_k_by_hand():
    assert repeated_ngrams([1, 2, 3, 4, 5, 6]) == 0
    assert repeated_ngrams([1, 1, 1, 1, 1, 1]) == pytest.approx(2 / 3)  # 3 n-grams, all the same
    assert repeated_ngrams([1, 2, 3, 4]) == 0
    assert repeated_ngrams([1, 1, 1, 1, 1]) == 0.5  # 2 n-grams, the same
    assert repeated_ngrams([1, 2, 1, 2, 1], n=2) == 0.5  # 12 21 12 21
    # of 4 completions 1 is right: one of 1 drawn 1/4, of 2 drawn 1 - 3/6, of 4 surely
    assert [pass_at_k([0.0, 1.0, 0.0, 0.9], 1.0, k) for k in (1, 2, 4)] == [0.25, 0.5, 1]
    assert pass_at_k([0.0] * 5, 1.0, 5) == 0
    assert pass_at_k([0.5, 0.0, 0.6, 0.0, 0.7], 0.5, 3) == 1
    assert pass_at_k([0.7 + 0.2 + 0.1, 1 - 1e-6], 1.0, 1) == 0.5  # the first sum is 1 - 1e-16
