"""Python in a sandbox, and a server's tools: what stays over an episode, what members share, what the model reads of errors."""

import copy
import os
import time
import tracemalloc

import pytest
from forked import run_script
from text_runs import save_model, train

import groupwise as gw
from groupwise.config.run import TextTaskCfg
from groupwise.errors import EnvError
from groupwise.text.calls import Call
from groupwise.text.envs import TextEnvs
from groupwise.text.task import Start
from groupwise.text.tool_env import make_text_env
from groupwise.text.toolsets import MCPServer, PythonTool

ROW = {"prompt": "?"}


def envs_of(tool, **settings):
    cfg = TextTaskCfg(data="x.jsonl", tools=("<given in Python>",), **settings)
    return TextEnvs(make_text_env(cfg, None, [tool]), "seed")


def call(name, **arguments):
    return str(Call(name, arguments))


def python(code):
    return call("python", code=code)


@pytest.fixture
def run_python():
    envs = envs_of(PythonTool(seconds=0.3, memory_mib=16.0))
    yield lambda *codes, seed=0: play(envs, [python(code) for code in codes], seed)
    envs.close()


def play(envs, turns, seed=0):
    [episode], _ = envs.open(Start(seed, ROW), 1)
    for turn in turns:
        envs.play(episode, turn)
    envs.release(episode)
    return episode.observations


def test_variables_stay_over_an_episode_and_no_longer(run_python):
    assert run_python("x = 41", "print('a')\nx + 1") == ["", "a\n42"]
    assert "not defined" in run_python("x")[0]


def test_random_numbers_and_the_clock_follow_from_the_seed(run_python):
    code = "import random, datetime, time\nrandom.random(), datetime.datetime.now(), time.time()"
    first, other = run_python(code, "import random\nrandom.random()"), run_python(code)
    assert first[0] == other[0]
    assert first[1] not in first[0]  # the stream goes on
    assert first != run_python(code, "import random\nrandom.random()", seed=1)


def test_a_copied_episode_goes_on_alike_and_by_itself():
    envs = envs_of(PythonTool())
    [episode], _ = envs.open(Start(0, ROW), 1)
    envs.play(episode, python("import random\nx = random.random()"))
    other = copy.deepcopy(episode)
    for one in (episode, other):
        envs.play(one, python("y = random.random()\nx, y"))
    assert episode.observations == other.observations
    envs.play(other, python("x = 7"))
    envs.play(episode, python("x"))
    assert episode.observations[-1] != "7"
    envs.close()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("def (", "Expected"),
        ("while True: pass", "time limit exceeded"),
        ("x = [0] * 10**9", "MemoryError"),
        ("[1] * 10**6", "MemoryError: the worker exceeded its memory limit"),
        ("open('/etc/passwd').read()", "Permission"),
        ("import socket", "socket"),
        ("import subprocess", "subprocess"),
        ("__import__('os')", "__import__"),
    ],
)
def test_what_fails_is_told_and_the_episode_goes_on(run_python, code, told):
    began = time.monotonic()
    first, last = run_python(code, "6 * 7")
    assert told in first
    assert last == "42"
    assert time.monotonic() - began < 10


def test_wrong_arguments_are_parse_errors(run_python):
    envs = envs_of(PythonTool())
    assert "wrong arguments of python: code: Missing required argument" in play(envs, [call("python")])[0]
    assert "there is no tool 'bash'; there are python" in play(envs, [call("bash")])[0]
    envs.close()


def test_a_long_output_is_cut(run_python):
    assert 0 < len(run_python("print('a' * 10**6)")[0]) < 200_000


def test_what_is_printed_without_end_is_not_kept(run_python):
    tracemalloc.start()
    try:
        [text] = run_python("s = 'a' * 10**6\nwhile True:\n    print(s)")
        assert tracemalloc.get_traced_memory()[1] < 5 * 2**20
    finally:
        tracemalloc.stop()
    assert text == "a" * 100_000 + " [cut]"


SERVER = """
import os, random
from mcp.server.mcpserver import MCPServer

server, rng = MCPServer("dice"), random.Random()

@server.tool()
def start(seed: int) -> str:
    "Begin."
    rng.seed(seed)
    return "ok"

@server.tool()
def roll(sides: int) -> str:
    "Roll a die."
    return str(rng.randint(1, sides))

@server.tool()
def again(name: str, call: str) -> str:
    "Say it again."
    return name + call

@server.tool()
def fail() -> str:
    "Fail."
    raise ValueError("no")

@server.tool()
def pid() -> str:
    "Number of the process."
    return str(os.getpid())

@server.tool()
def end() -> str:
    "End the server."
    os._exit(3)

server.run()
"""


@pytest.fixture
def server(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    return MCPServer("python", str(tmp_path / "server.py"), start="start", seconds=100.0)


def test_members_have_servers_of_their_own_that_begin_alike(server):
    envs = envs_of(server)
    episodes, _ = envs.open(Start(3, ROW), 2)
    assert [tool["function"]["name"] for tool in episodes[0].tools] == ["roll", "again", "fail", "pid", "end"]
    for _ in range(3):
        for episode in episodes:
            envs.play(episode, call("roll", sides=1000))
    assert episodes[0].observations == episodes[1].observations
    assert len(set(episodes[0].observations)) > 1
    pids = []
    for episode in episodes:
        envs.play(episode, call("pid"))
        pids.append(int(episode.observations[-1]))
    assert len(set(pids)) == 2
    envs.play(episodes[0], str(Call("again", {"name": "a", "call": "b"})))
    assert episodes[0].observations[-1] == "ab"
    envs.play(episodes[0], call("roll", sides="x") + call("fail") + call("start", seed=1))
    wrong, failed, hidden = episodes[0].observations[-1].split("\nerror: ", 2)
    assert "valid integer" in wrong
    assert failed.startswith("Error executing tool fail")
    assert hidden.startswith("there is no tool 'start'")
    envs.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            wait_for_end(pid)


def wait_for_end(pid):
    for _ in range(100):
        os.kill(pid, 0)
        time.sleep(0.05)


def test_a_server_that_ends_or_does_not_start_is_an_error_of_the_environment(server, tmp_path):
    envs = envs_of(server)
    [episode], _ = envs.open(Start(0, ROW), 1)
    with pytest.raises(EnvError, match=r"MCP server did not answer end"):
        envs.play(episode, call("end"))
    envs.close()
    with pytest.raises(EnvError, match=r"the MCP server .*missing.* does not start: .*fix: run it by itself"):
        envs_of(MCPServer(str(tmp_path / "missing"), seconds=5.0)).open(Start(0, ROW), 1)


def test_a_start_that_fails_is_an_error_of_the_environment(server, tmp_path):
    envs = envs_of(MCPServer("python", str(tmp_path / "server.py"), start="strat", seconds=100.0))
    with pytest.raises(EnvError, match=r"the MCP server's start: error: Unknown tool.*; fix: start="):
        envs.open(Start(0, ROW), 1)
    envs.close()


STRICT = """
from mcp import MCPError, types
from mcp.server.mcpserver import MCPServer

server = MCPServer("strict")

@server.tool()
def add(a: int) -> str:
    "Add."
    if a == 1:
        raise MCPError(types.INVALID_PARAMS, "Invalid params: a is 1")
    if a == 2:
        raise MCPError(types.REQUEST_TIMEOUT, "timed out")
    return str(a)

server.run()
"""


def test_a_call_that_the_server_refuses_is_told_and_one_without_an_answer_ends_the_episode(tmp_path):
    (tmp_path / "strict.py").write_text(STRICT)
    envs = envs_of(MCPServer("python", str(tmp_path / "strict.py"), seconds=100.0))
    [episode], _ = envs.open(Start(0, ROW), 1)
    envs.play(episode, call("add", a=1) + call("add", a=3))
    assert episode.observations == ["error: Invalid params: a is 1\n3"]
    envs.play(episode, call("add", a=2))
    assert episode.ending == "timeout"
    envs.close()


def test_a_server_that_never_answers_is_ended(tmp_path):
    (tmp_path / "mute.py").write_text(
        "import os, pathlib, time\npathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\ntime.sleep(600)"
    )
    envs = envs_of(MCPServer("python", str(tmp_path / "mute.py"), seconds=2.0))
    with pytest.raises(EnvError, match=r"does not start: it did not answer in 2 seconds"):
        envs.open(Start(0, ROW), 1)
    envs.close()
    with pytest.raises(ProcessLookupError):
        wait_for_end(int((tmp_path / "pid").read_text()))


def test_a_run_with_python_and_a_server(server, tmp_path):
    model = save_model(tmp_path / "model", chat=True, positions=4096)
    rows = [{"prompt": f"{n}"} for n in range(4)]
    task = gw.TextTask(
        rows, tools=[PythonTool(), server], reward=lambda completions, **_: [float(len(c)) for c in completions]
    )
    run = train(task, model, tmp_path / "run", gw.GRPOCfg(group_size=2), sampling={"max_new_tokens": 3}, num_prompts=1,
                total_steps=None, total_iterations=1)  # fmt: skip
    assert run.metrics()[-1]["rollout/stop_no_call"] + run.metrics()[-1]["rollout/stop_max_tokens"] == 1
    assert "tools" in run.given.as_arguments()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_a_forked_process_says_that_it_cannot_use_the_workers_of_its_parent():
    run_script(FORKED_PYTHON, lenient=True)


FORKED_PYTHON = """
import os, signal
from groupwise.errors import EnvError
from groupwise.text.toolsets import PythonTool

def add():
    tool = PythonTool()
    tool.begin(0)
    return tool.tools()[0].call(code="1 + 1")

assert add() == "2"
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert add() == "2"
else:
    signal.alarm(20)
    try:
        add()
    except EnvError as error:
        os._exit("fix: start such processes with" not in str(error))
    os._exit(2)
"""
