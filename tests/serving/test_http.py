"""Calls of a server that cannot be reached."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from groupwise import serving as http
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
