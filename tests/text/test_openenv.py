"""OpenEnv's servers: seeds, turns and ends over a WebSocket; what a server may do wrong; sessions end."""

import json
import random
import sys
import threading
import time

import pytest

import groupwise as gw
from groupwise.config.run import TextTaskCfg
from groupwise.errors import ConfigError, EnvError, MissingExtraError
from groupwise.text.envs import TextEpisode, check_text_starts
from groupwise.text.games.openenv import OpenEnv
from groupwise.text.task import Start

server = pytest.importorskip("websockets.sync.server")


class Server:
    """A server whose sessions guess a number; ``says`` is what it answers in place of that."""

    def __init__(self):
        self.says, self.received, self.open = None, [], 0
        self._server = server.serve(self._session, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def _session(self, connection):
        self.open += 1
        number = None
        try:
            for text in connection:
                message = json.loads(text)
                self.received.append(message)
                if self.says is not None:
                    self.says(connection)
                    continue
                if message["type"] == "reset":
                    number = random.Random(message["data"]["seed"]).randrange(5)
                    answer = {"observation": {"text": "from 0 to 4"}, "reward": None, "done": False}
                elif not message["data"]["message"].isdigit():
                    error = {"message": "a number, please", "code": "VALIDATION_ERROR"}
                    connection.send(json.dumps({"type": "error", "data": error}))
                    continue
                else:
                    won = int(message["data"]["message"]) == number
                    answer = {"observation": {"text": f"{number}" if won else "no"}, "reward": float(won), "done": won}
                connection.send(json.dumps({"type": "observation", "data": answer}))
        finally:
            self.open -= 1

    def close(self):
        self._server.shutdown()
        self._thread.join()


@pytest.fixture
def serving():
    one = Server()
    yield one
    one.close()


def ended(serving):
    """Whether all sessions end within two seconds."""
    until = time.monotonic() + 2
    while serving.open and time.monotonic() < until:
        time.sleep(0.01)
    return not serving.open


def by_text(serving, **settings):
    return OpenEnv(serving.url, read=lambda seen: seen["text"], **settings)


def test_an_episode_has_the_seed_the_turns_and_the_end(serving):
    env = by_text(serving)
    number = random.Random(7).randrange(5)
    for _ in range(2):
        assert env.reset(seed=7, options={"level": 2}) == ("from 0 to 4", {})
        assert serving.received[-1] == {"type": "reset", "data": {"level": 2, "seed": 7}}
        assert env.step(str(number + 5)) == ("no", 0.0, False, False, {})
        assert env.step("five") == ("error: a number, please", 0.0, False, False, {})  # for the model
        assert env.step(str(number)) == (str(number), 1.0, True, False, {"success": True})
    assert serving.open == 1  # the same session
    env.close()
    env.close()
    assert ended(serving)
    env = OpenEnv(serving.url, action=lambda text: {"message": text[1:]})  # an observation is its JSON
    assert json.loads(env.reset(seed=7)[0]) == {"text": "from 0 to 4"}
    assert env.step(f"#{number}")[1] == 1.0
    env.close()


def test_members_share_a_start_if_the_server_reads_the_seed(serving):
    def play(episode, start, prompt):
        turns = []
        while episode.ending is None and len(turns) < 5:
            turns.append(str(len(turns)))
            episode.step(turns[-1])
        return turns

    starts = [Start(seed) for seed in range(3)]
    report = check_text_starts(lambda: by_text(serving), "auto", starts, play)
    assert (report.mode, report.kept, report.start_varies) == ("seed", (), True)
    assert ended(serving)  # the check closes what it opened


def deep(connection):
    connection.send('{"type": "observation", "data": ' + "[" * 900 + "]" * 900 + "}")


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (lambda c: c.send("no JSON"), "JSONDecodeError"),
        (lambda c: c.send(b"\xff"), "UnicodeDecodeError"),
        (deep, "nested deeper"),
        (lambda c: c.send("[]"), r"the server answered \[\]"),
        (lambda c: c.send('{"type": "observation", "data": {"observation": "text"}}'), "the server answered"),
        (lambda c: c.send('{"type": "observation", "data": {"observation": {}, "reward": "1"}}'), "the reward is '1'"),
        (lambda c: c.send('{"type": "observation", "data": {"observation": {}, "reward": []}}'), "the reward is "),
        (lambda c: c.send('{"type": "error", "data": {"message": "full", "code": "CAPACITY"}}'), "answered .*full"),
        (
            lambda c: c.send('{"type": "error", "data": {"message": 3, "code": "VALIDATION_ERROR"}}'),
            "the server answered",
        ),
        (lambda c: c.send("x" * 3000), "ConnectionClosed"),  # more than max_bytes
        (lambda c: c.close(), "ConnectionClosed"),
        (lambda c: None, "TimeoutError"),
    ],
)
def test_what_a_server_does_wrong_ends_the_session_and_the_next_one_works(says, message, serving):
    env = by_text(serving, timeout=1.0, max_bytes=2000)
    episode = TextEpisode(env)
    episode.reset(Start(3))
    serving.says = says
    with pytest.raises(EnvError, match=rf"(?s)^{serving.url}, step: .*{message}.*; fix: the server$"):
        episode.step("1")
    assert ended(serving)
    serving.says = None
    assert episode.reset(Start(3)) == "from 0 to 4"
    env.close()


def test_an_exchange_has_a_limit_although_bytes_arrive(serving):
    """Fragments of one message, for ever."""

    def drips(connection):
        connection.send("x" for _ in iter(lambda: time.sleep(0.1), 0))

    env = by_text(serving, timeout=0.5)
    serving.says, began = drips, time.monotonic()
    with pytest.raises(EnvError, match=r"TimeoutError|ConnectionClosed"):
        env.reset(seed=1)
    assert time.monotonic() - began < 4
    assert ended(serving)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(EnvError, match=r"^http://127.0.0.1:1, reset: ConnectionRefusedError: .*; fix: the server$"):
        OpenEnv("http://127.0.0.1:1").reset(seed=1)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "file:///etc/passwd", "http://a:b@host:1", "http://host:1/path", "http://host:1\n", ""]
)
def test_another_form_of_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"expected http://HOST:PORT or https://HOST:PORT; fix: its URL"):
        OpenEnv(url)


def test_it_is_given_in_python_alone(monkeypatch):
    from groupwise.text.tool_env import make_text_env

    with pytest.raises(ConfigError, match="unknown text env 'openenv:http://localhost:8000'"):
        make_text_env(TextTaskCfg(env="openenv:http://localhost:8000"))()
    assert gw.TextTask(env=lambda: OpenEnv("http://localhost:8000")).cfg.env == "<given in Python>"
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(MissingExtraError, match=r"'websockets' is not installed; fix: pip install -e '.\[openenv\]'"):
        OpenEnv("http://localhost:8000")
