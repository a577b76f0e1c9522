"""The task: what is recorded of it, what it loads, and how it is made again from its settings."""

import json

import pytest

from groupwise.config.algorithm import GRPOCfg
from groupwise.config.base import GIVEN
from groupwise.config.run import RewardCfg, TextRunCfg, TextTaskCfg
from groupwise.errors import ConfigError, DataError
from groupwise.text.task import TextTask
from groupwise.training.build import UserObjects

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]


def right(completions, answer, **_):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def longest(completions, **_):
    return [len(c) for c in completions]


def test_paths_and_names_are_recorded_and_objects_are_said_to_be_given(tmp_path):
    task = TextTask(tmp_path / "a.jsonl", reward=[right, "exact", RewardCfg(name="regex", kwargs={"pattern": "a"})])
    assert task.cfg.data == str(tmp_path / "a.jsonl")
    assert [reward.name for reward in task.cfg.rewards] == [GIVEN, "exact", "regex"]
    assert task.given == {"data": None, "eval_data": None, "reward": [right], "tool": None, "tools": None, "env": None}
    given = TextTask(ROWS, reward=right, eval_data=["x"], success_threshold=0.5)
    assert (given.cfg.data, given.cfg.eval_data, given.cfg.success_threshold) == (GIVEN, GIVEN, 0.5)
    assert given.given == {
        "data": ROWS,
        "eval_data": ["x"],
        "reward": [right],
        "tool": None,
        "tools": None,
        "env": None,
    }
    assert TextTaskCfg(**json.loads(given.cfg.model_dump_json())) == given.cfg


def test_weights_and_time_limits():
    task = TextTask(ROWS, reward=[right, longest], reward_weights=[1.0, 0.1])
    assert [reward.weight for reward in task.cfg.rewards] == [1, 0.1]
    scores = task.rewards().score(["p"], ["22"], [[1]], {"answer": ["22"]})
    assert scores.reward == (pytest.approx(1.2),)
    with pytest.raises(ConfigError, match=r"reward_weights = \[1.0\] for 2 rewards; fix: one for each"):
        TextTask(ROWS, reward=[right, longest], reward_weights=[1.0])
    with pytest.raises(ConfigError, match=r"weight = inf: .*finite"):
        TextTask(ROWS, reward=right, reward_weights=[float("inf")])


def test_data_that_are_read_once_are_kept():
    given = {"data": iter(ROWS), "eval_data": (text for text in ["x"]), "reward": right}
    task = TextTask(**given)
    given = {"data": iter(ROWS), "eval_data": (text for text in ["x"]), "reward": right}
    for made in (task, TextTask.from_cfg(task.cfg, UserObjects.again(given))):
        assert [len(part) for part in made.load()] == [2, 1]
        assert made.load()[1] == made.held_out() == TextTask(ROWS, eval_data=["x"]).held_out()


def test_a_task_is_made_again_from_its_settings():
    task = TextTask(ROWS, reward=[right, "exact", longest], eval_data=["x"])
    again = TextTask.from_cfg(task.cfg, UserObjects(data=ROWS, eval_data=["x"], reward=[right, longest]))
    assert again.load() == task.load()
    given = UserObjects(data=ROWS, eval_data=["x"], reward=[right, "exact", longest])
    for made in (task, again, TextTask.from_cfg(task.cfg, given)):
        assert made.rewards().names == ("right", "exact", "longest")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, "the data were given in Python; fix: give them again as data=..."),
        ({"eval_data": None}, "the eval_data were given in Python; fix: give them again as eval_data=..."),
        ({"reward": None}, r"1 reward\(s\) were given in Python, but now 0"),
        ({"reward": [right, longest]}, r"1 reward\(s\) were given in Python, but now 2"),
    ],
)
def test_objects_that_are_missing_are_named(change, message):
    given = {"data": ROWS, "eval_data": ["x"], "reward": right}
    objects = {name: value for name, value in (given | change).items() if value is not None}
    task = TextTask.from_cfg(TextTask(ROWS, reward=right, eval_data=["x"]).cfg, UserObjects(**objects))
    with pytest.raises(ConfigError, match=message):
        _ = task.rewards(), task.load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": 3}, "reward = 3: expected a function, the name of a registered one"),
        ({"reward": [right, 3]}, "reward = 3: expected"),
        ({"reward": right, "promt_column": "x"}, "'promt_column' of a TextTask; did you mean 'prompt_column'"),
        ({"reward_fn": right}, "unknown setting 'reward_fn' of a TextTask; did you mean 'reward'"),
        ({"rewards": right}, "unknown setting 'rewards' of a TextTask; did you mean 'reward'"),
        ({"reward": right, "eval_overlap": "ignore"}, "eval_overlap = 'ignore': expected one of drop, keep"),
        (
            {"tool": right, "max_tool_calls": 1},
            r"max_tool_calls=1 is of calls by name, and tool=.* reads the text; fix: tools=",
        ),
        ({"tool": right, "max_parse_errors": 1}, "max_parse_errors=1 is of calls by name"),
        ({"tool": right, "on_tool_error": "raise"}, "on_tool_error='raise' is of calls by name"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        TextTask(ROWS, **settings)


@pytest.mark.parametrize("how", ["drop", "retry"])
def test_errors_of_a_tool_that_reads_the_text_are_no_choice(how):
    cfg = GRPOCfg(collection={"on_env_error": how})
    with pytest.raises(
        ConfigError, match=f"on_env_error='{how}' is of environments, and an error of tool=.* ends the run; fix: "
    ):
        TextRunCfg(task=TextTask(ROWS, reward=right, tool=right).cfg, algorithm=cfg)
    TextRunCfg(task=TextTask(ROWS, reward=right, tools=[right]).cfg, algorithm=cfg)


@pytest.mark.filterwarnings("ignore:.*in the evaluation data")
def test_a_task_without_reward_is_refused_unless_its_data_have_one():
    with pytest.raises(ConfigError, match="there is no reward"):
        TextTask(ROWS).rewards()
    name = "reasoning-gym:chain_sum"
    gym = TextTask(name, data_size=80, data_kwargs={"max_terms": 2, "max_digits": 1}, eval_data=name, eval_size=30)
    assert gym.rewards().names == ("reasoning_gym",)
    train, evaluation = gym.load()
    assert len(evaluation) == 30
    assert not {e.prompt for e in train} & {e.prompt for e in evaluation}
    columns = {name: [value] for name, value in train[0].columns.items()}
    gym.rewards().check_columns(columns)
    assert gym.rewards().score([train[0].prompt], [columns["answer"][0]], [[1]], columns).reward == (1,)
    train, evaluation = TextTask(name, data_size=80).load()
    assert (len(train), evaluation) == (80, [])


def test_shared_prompts_are_left_out_of_training_with_a_warning_or_kept():
    task = TextTask(ROWS, reward=right, eval_data=["1+2= ", "9"])
    with pytest.warns(UserWarning, match="1 of 2 training prompts are in the evaluation data: dropped"):
        parts = task.load()
    assert [[example.prompt for example in part] for part in parts] == [["1+1="], ["1+2= ", "9"]]
    assert len(TextTask(ROWS, reward=right, eval_data=["1+2="], eval_overlap="keep").load()[0]) == 2
    with pytest.raises(DataError, match="all training prompts are in the evaluation data"):
        TextTask(ROWS, reward=right, eval_data=ROWS).load()
