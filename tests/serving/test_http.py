"""Calls of a server that cannot be reached."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest

from groupwise import serving as http
from groupwise.config.policy import SamplingCfg
from groupwise.errors import ServerError


def test_a_server_that_accepts_no_connection_is_given_up_long_before_the_time_limit_of_a_call(monkeypatch):
    monkeypatch.setattr(http, "SECONDS_TO_CONNECT", 0.2)
    with ExitStack() as stack:
        stopped = stack.enter_context(socket.socket())
        stopped.bind(("127.0.0.1", 0))
        stopped.listen(0)
        for _ in range(4):  # its queue is full, and the system drops what else comes
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(stopped.getsockname())
        client = http.HttpClient(f"http://127.0.0.1:{stopped.getsockname()[1]}", timeout=100.0, retries=0)
        begun = time.monotonic()
        with pytest.raises(ServerError, match=r"no answer in 1 tries: no connection in 0\.2 s; fix: "):
            client.call("/health")
        assert time.monotonic() - begun < 10
        assert not http.is_healthy(client.url)


def test_the_limit_of_a_connection_is_not_that_of_an_answer(monkeypatch):
    monkeypatch.setattr(http, "SECONDS_TO_CONNECT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = http.HttpClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.6, retries=0)
        begun = time.monotonic()
        with pytest.raises(ServerError, match=r"it took longer than 0\.6 s"):
            client.call("/health")
        assert time.monotonic() - begun > 0.5


def test_an_answer_has_a_limit_of_size(monkeypatch):
    monkeypatch.setattr(http, "MAX_ANSWER", 2**20)

    def answer(size):
        with server.accept()[0] as connection:
            connection.recv(2**16)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * size)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        client = http.HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=30.0, retries=0)
        pool.submit(answer, 2**20)
        client.call("/health")
        pool.submit(answer, 2**20 + 1)
        with pytest.raises(ServerError, match="an answer of more than 1,048,576 bytes"):
            client.call("/health")


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
DRIPPED = {
    "status": b"HTTP/1.1 200 " + b"O" * 60_000,
    "headers": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 90,
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
    "body": HEAD + b"Content-Length: 60000\r\n\r\n" + b" " * 60_000,
    "chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 60_000,
    "trailers": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 10_000,
}


@pytest.mark.parametrize("answer", DRIPPED.values(), ids=DRIPPED)
def test_the_limit_of_time_is_of_the_whole_exchange(answer):
    """A byte each 0.05 s, so that no single read takes long."""

    def drip():
        with server.accept()[0] as connection, suppress(OSError):
            connection.recv(2**16)
            for place in range(len(answer)):
                connection.send(answer[place : place + 1])
                time.sleep(0.0 if place < len(HEAD) else 0.05)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        pool.submit(drip)
        client = http.HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=0.6, retries=0)
        begun = time.monotonic()
        with pytest.raises(ServerError, match=r"it took longer than 0\.6 s"):
            client.call("/health")
        assert 0.5 < time.monotonic() - begun < 3


def test_an_answer_may_be_larger_by_the_tokens_that_were_asked_for(monkeypatch):
    monkeypatch.setattr(http, "MAX_ANSWER", 100)
    monkeypatch.setattr(http, "MAX_TOKEN", 10)

    def answer(text):
        with server.accept()[0] as connection:
            connection.recv(2**16)
            connection.sendall(HEAD + b"\r\n" + text)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        client = http.HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=30.0, retries=0)
        pool.submit(answer, b" " * 149 + b"7")
        assert client.call("/generate", tokens=5) == 7
        pool.submit(answer, b" " * 150 + b"7")
        with pytest.raises(ServerError, match="an answer of more than 150 bytes"):
            client.call("/generate", tokens=5)
        pool.submit(answer, b"[" * 50)
        with pytest.raises(ServerError, match="answered no JSON"):
            client.call("/generate")
        monkeypatch.setattr(http, "MAX_ANSWER", 10**6)
        pool.submit(answer, b"[" * 10**5 + b"]" * 10**5)
        with pytest.raises(ServerError, match="answered no JSON"):
            client.call("/generate")


def test_a_span_of_weights_longer_than_the_completion_is_refused_at_once():
    content = [{"token_id": 5, "logprob": -0.5}]
    spans = [{"version": "run-0", "start": 0, "end": 10**12}]
    choice = {"index": 0, "token_ids": [5], "finish_reason": "length", "logprobs": {"content": content}}
    reply = {"prompt_token_ids": [4], "choices": [choice | {"weight_versions": spans}]}
    client = SimpleNamespace(url="http://double", call=lambda path, body, **how: reply)
    request = http.GroupRequest([4], 1, 0, SamplingCfg(max_new_tokens=1), (3,), 10, "run-0")
    with pytest.raises(ServerError, match="gave 1 tokens, and the versions of the weights of 2"):
        http.VLLMServer(client, adapters=False).generate(request)
