"""Episodes of texts as conversations: what a run keeps of them, and what its page shows."""

import json
import shutil

import pyarrow
import pyarrow.parquet
import pytest
from text_games import Guess
from text_runs import Count, copying, save_model, train

import groupwise as gw
from groupwise.errors import RunFolderError
from groupwise.report.folder import RunFolder, kept_iterations, schema
from groupwise.report.health import diagnose
from groupwise.report.page import MAX_TEXT, load_groups, write_page

HOSTILE = "</script><img src=x onerror=alert(1)>"


class Look(gw.Callback):
    """Keeps the members of the last rollout."""

    def on_iteration_end(self, trainer, rollout, metrics):
        self.members = trainer.collector.members


def play(task, model, folder):
    look, sampling = Look(), {"max_new_tokens": 2, "stop": tuple("01234567")}
    settings = {"sampling": sampling, "total_steps": 300, "callbacks": [look]}
    return train(task, model, folder, gw.GRPOCfg(group_size=8), **settings), look.members


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("lm") / "model", positions=128)


@pytest.fixture(scope="module", params=[False, True], ids=["texts", "chat"])
def played(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("talks")
    model = save_model(folder / "model", chat=request.param, positions=128)
    return play(gw.TextTask(env=Guess, max_turns=3, eval_size=2), model, folder / "run")


def last(run):
    """The page's groups of the last iteration, by number."""
    groups = load_groups(run.path / "groups")
    return {group["group"]: group for group in groups if group["iteration"] == groups[0]["iteration"]}


def rewritten(run, folder, change):
    """A copy of the run with one kept file, whose rows ``change`` has changed."""
    shutil.copytree(run.path, folder)
    *others, path = kept_iterations(folder / "groups").values()
    for other in others:
        other.unlink()
    rows = pyarrow.parquet.read_table(path).to_pylist()
    change(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema()), path)
    return folder


def test_each_turn_has_its_answer_reward_and_advantage(played):
    run, members = played
    groups, ends, token_texts = last(run), set(), run.policy.tokenizer.decode
    assert len(groups) == 4
    for number, group in groups.items():
        own = [member for member in members if member.group == number]
        assert (group["talks"], group["apart"], len(group["members"])) == (True, False, len(own))
        for shown, member in zip(group["members"], own, strict=True):
            episode = member.episode
            assert (shown["end"], shown["won"]) == (episode.ending, episode.success)
            assert [turn["reward"] for turn in shown["turns"]] == pytest.approx(
                [*episode.rewards, *[0.0] * (member.turns - len(episode.rewards))], abs=1e-4
            )
            told = [answer for turn in shown["turns"] for answer in turn["answers"]]
            # also the answer to the last turn, which the model did not read
            assert told == [{"role": "user", "text": text} for text in episode.observations]
            places = [place for place, turn in enumerate(member.turn) if turn >= 0]
            assert [*shown["at"]] == places  # observations are no cells
            for turn, part in enumerate(shown["turns"]):
                tokens = [token for token, wrote in zip(member.tokens, member.turn, strict=True) if wrote == turn]
                assert "".join(shown["token"][part["from"] : part["to"]]) == token_texts(tokens)
                assert part["advantage"] == pytest.approx(shown["advantage"][0])  # that of the outcome
            ends.add(episode.ending)
    assert {"terminated", "truncated", "max_tokens"} <= ends


def test_the_page_shows_conversations_of_the_first_and_the_last_iteration(played):
    text = write_page(played[0].path).read_text()
    assert text.count(": best, middle and worst episode</h3>") == 2
    assert "Iteration 1: best, middle and worst" in text  # before anything was learned
    won = [sum(member["won"] is True for member in last(played[0])[number]["members"]) for number in last(played[0])]
    assert any(f"<p>{count} of 8 members won</p>" in text for count in won)
    assert '<p class="said">' in text
    assert '<p class="told">' in text


def test_the_answers_of_a_tool_are_shown(model, tmp_path):
    run, members = play(copying(tool=Count(), max_turns=3), model, tmp_path / "run")
    groups = last(run)
    shown = [
        answer for group in groups.values() for m in group["members"] for t in m["turns"] for answer in t["answers"]
    ]
    told = [message["content"] for member in members for message in member.messages if message["role"] == "tool"]
    unread = [member.episode.answer for member in members if member.messages[-1]["role"] == "assistant"]
    told += [message["content"] for answer in unread for message in answer if message["content"]]
    assert sorted(answer["text"] for answer in shown) == sorted(told) != []
    assert {answer["role"] for answer in shown} == {"tool"}
    assert {m["won"] for group in groups.values() for m in group["members"]} == {None}


def first_rows(rows, group=0):
    """The first row of each member of a group, which has its messages."""
    return [row for row in rows if row["group"] == group and row["messages"] is not None]


def say(row, *answers):
    row["messages"] = json.dumps([m for answer in answers for m in ({"role": "assistant", "content": "1"}, *answer)])


def test_members_that_wrote_the_same_and_got_different_answers_are_marked(played, tmp_path):
    low, high = ([{"role": "user", "content": text}] for text in ("low", "high"))
    # the last one's second turn has no answer: it was cut, or took too long
    told = {"1": (low, low), "2": (low, high), "3": (low, low), "4": (high, low), "5": (low, [])}

    def change(rows):
        some, rows[:] = rows[0] | {"reward": 0.0, "reward_parts": None}, []
        for member, answers in told.items():
            own = [some | {"member": int(member), "turn": turn, "token": "1", "step": turn} for turn in (0, 1)]
            own[0]["token"] = "2" if member == "4" else "1"
            own[1]["messages"] = None
            say(own[0], *answers)
            rows += own

    [group] = load_groups(rewritten(played[0], tmp_path / "run", change) / "groups")
    marks = [[turn["apart"] for turn in member["turns"]] for member in group["members"]]
    # the first turns of three were answered alike, the second ones not; the fourth wrote something else
    assert marks == [[False, True], [False, True], [False, True], [False, False], [False, False]]
    assert group["apart"]


def test_other_rewards_for_the_same_turns_are_marked_unless_they_are_of_reward_functions(played, tmp_path):
    for parts in (None, [0.0, 0.5]):

        def change(rows, parts=parts):
            rows[:] = [row for row in rows if row["group"] == 0]
            firsts = first_rows(rows)
            rows[:] = firsts
            for number, row in enumerate(firsts):
                row.update(token="1", turn=0, reward=float(number), stop_reason="terminated", reward_parts=parts)
                say(row, [{"role": "user", "content": "low"}])

        [group] = load_groups(rewritten(played[0], tmp_path / f"run{bool(parts)}", change) / "groups")
        assert group["apart"] == (parts is None)


def test_conversations_of_strangers_stay_texts_and_long_ones_are_cut(played, tmp_path):
    long = "a" * MAX_TEXT + "b" * MAX_TEXT

    def change(rows):
        for row in rows:
            row.update(token=HOSTILE, start=HOSTILE, stop_reason=HOSTILE)
            if row["messages"] is not None:
                messages = json.loads(row["messages"])
                for message in messages:
                    message["content"] = HOSTILE if message["role"] == "assistant" else HOSTILE + long
                    message["name"] = HOSTILE
                messages[0]["tool_calls"] = [{"type": "function", "function": {"name": HOSTILE, "arguments": {"a": 1}}}]
                row["messages"] = json.dumps(messages)

    folder = rewritten(played[0], tmp_path / "run", change)
    text = write_page(folder).read_text()
    assert "<img" not in text
    assert "a" * (MAX_TEXT // 2 + 1) not in text
    [group, *_] = load_groups(folder / "groups")
    [answer, *_] = [answer for turn in group["members"][0]["turns"] for answer in turn["answers"]]
    assert answer["text"].startswith(HOSTILE + "aaa")
    assert f"\n[... {len(HOSTILE) + MAX_TEXT:,} characters ...]\n" in answer["text"]
    assert answer["text"].endswith("b" * (MAX_TEXT // 2))
    assert json.loads(group["members"][0]["turns"][0]["calls"][0]) == {"name": HOSTILE, "arguments": {"a": 1}}


@pytest.mark.parametrize("messages", ["[", "[]", '[{"role": "user"}]', '[{"role": 1}]', "[1]", '{"role": "assistant"}'])
def test_messages_that_no_run_writes_are_one_error(played, tmp_path, messages):
    def change(rows):
        first_rows(rows)[0]["messages"] = messages

    with pytest.raises(RunFolderError, match="cannot be shown: its files hold values of a wrong kind"):
        write_page(rewritten(played[0], tmp_path / "run", change))


def test_members_with_starts_of_their_own_show_them(model, tmp_path):
    class Shown(Guess):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return f"{seed % 1000}", {}

    run, members = play(gw.TextTask(env=Shown, start_mode="none", eval_size=2), model, tmp_path / "run")
    for number, group in last(run).items():
        prompts = [member.prompt.example.prompt for member in members if member.group == number]
        assert group["start"] == prompts[0]
        assert [member["start"] or group["start"] for member in group["members"]] == prompts
        assert len(set(prompts)) > 1


@pytest.mark.parametrize("count", [1, 2])
def test_reward_functions_beside_an_environment_are_examined_with_its_reward(model, tmp_path, count):
    def short(completions, **columns):
        return [-float(len(completion)) for completion in completions]

    def fives(completions, **columns):
        return [float("5" in str(completion)) for completion in completions]

    run, _ = play(gw.TextTask(env=Guess, reward=[short, fives][:count], eval_size=2), model, tmp_path / "run")
    [sizes] = [finding for finding in diagnose(RunFolder(run.path)) if finding.title == "Sizes of rewards"]
    named = sizes.text.removeprefix("Ranges of the weighted rewards: ").split(", ")
    assert [words.split()[0] for words in named] == ["environment", "short", "fives"][: count + 1]
    assert "Sizes of rewards" in write_page(run.path).read_text()
