"""Servers that restart, at the same address or at another one."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from served_groups import SAMPLING, TASK, assert_alike, native, served
from tiny_models import moved
from vllm_double import VLLMDouble

import groupwise as gw
from groupwise import serving as http
from groupwise.config.policy import SamplingCfg
from groupwise.serving import HttpClient, VLLMServer
from groupwise.text import build as connect
from groupwise.text import served as serving
from groupwise.text.load import load_causal_lm
from groupwise.text.served import ServedGenerator


class Moving:
    """A server that is started again at another address, when it is told to."""

    def __init__(self, model):
        self.model, self.stack = model, contextlib.ExitStack()
        self.double = self.stack.enter_context(VLLMDouble(model))

    def url(self):
        return self.double.url

    def move(self):
        before, self.double = self.double, self.stack.enter_context(VLLMDouble(self.model))
        self.double._paused = False
        before.__exit__()
        return "drop"

    def move_at(self, path):
        """In mid-call."""
        first, fault, lock = self.double, self.double.fault, threading.Lock()

        def move_once(called):  # requests come at the same time
            with lock:
                if called != path:
                    return fault(called)
                return self.move() if self.double is first else "drop"

        first.fault = move_once


@pytest.fixture
def moving(model):
    server = Moving(model)
    with server.stack:
        yield server


def generator_of(moving, tmp_path):
    policy = moved(load_causal_lm(gw.ModelCfg(path=str(moving.model)), SamplingCfg(max_new_tokens=4)))
    client = HttpClient(moving.url(), timeout=20.0, retries=2, locate=moving.url)
    return ServedGenerator([VLLMServer(client, adapters=False)], policy, tmp_path / "weights")


def assert_native(generate):
    assert_alike(generate(**TASK, sampling=SAMPLING["plain"]), native(generate.policy, SAMPLING["plain"]))


MOVES = [VLLMDouble.generate_path, VLLMDouble.load_path]
MOVES += ["/pause", "/update_weight_version", "/reset_prefix_cache", "/resume"]


@pytest.mark.parametrize("path", MOVES)
def test_a_server_that_is_started_again_elsewhere_gets_its_weights_again(moving, tmp_path, path):
    generate = generator_of(moving, tmp_path)
    before = moving.url()
    moving.move_at(path)
    generate.update(0)
    assert_native(generate)
    assert generate.servers[0].url == moving.url() != before


def test_a_server_that_takes_long_to_start_again_is_waited_for(moving, tmp_path):
    generate = generator_of(moving, tmp_path)
    generate.update(0)
    moving.double.__exit__()
    timer = threading.Timer(2.0, moving.move)  # all tries of a call take 0.03 s
    timer.start()
    assert_native(generate)
    moving.double.__exit__()
    generate.servers[0]._client.timeout = 0.2
    with pytest.raises(gw.errors.ServerError, match=r"http://.* was lost, and not started again in 0\.4 s"):
        generate(**TASK, sampling=SAMPLING["plain"])


def test_a_server_that_is_lost_while_its_weights_get_their_name_gets_them_again(model, double, tmp_path):
    generate, fault, named = served(model, tmp_path, double), double.fault, []

    def restart_once(path):
        if path == "/update_weight_version" and not named:
            named.append(path)
            double.restart()
            return "drop"
        return fault(path)

    double.fault = restart_once
    generate.update(0)
    assert named
    assert_native(generate)


def test_a_run_that_begins_after_a_restart_finds_the_new_address(moving, tmp_path):
    (place,) = http.create(tmp_path, 1)
    before = moving.url()
    place.say(url=before)
    moving.move()
    timer = threading.Timer(0.3, place.say, kwargs={"url": moving.url()})
    timer.start()
    client = connect._client_of(place, {"timeout": 20.0, "retries": 2})
    timer.join()
    assert client.url == moving.url() != before
    VLLMServer(client, adapters=False).check()


def test_without_retries_no_restart_is_waited_for_and_calls_of_other_threads_do_not_repeat_an_update():
    client = HttpClient("http://127.0.0.1:9", timeout=5.0, retries=0, locate=lambda: pytest.fail("no call follows"))

    def fail():
        with pytest.raises(gw.errors.ServerError, match="no answer in 1 tries"):
            client.call("/health")
        return client.failures

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(fail).result() == 1
    assert client.failures == 0


def test_an_interrupt_does_not_wait_for_servers_that_load_weights(model, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "_HEALTH_INTERVAL", 60.0)
    monkeypatch.setattr(serving, "_SECONDS_TO_LOAD", 0.3)
    with VLLMDouble(model) as double:
        double.seconds_of_a_hang = 60.0
        generate = served(model, tmp_path, double)
        double.faults[double.load_path] = ["hang"]
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(generate.update, 0)
            while double.faults[double.load_path]:
                time.sleep(0.01)
            begun = time.monotonic()
            generate.close()
            with pytest.raises(gw.errors.ServerError, match="the client was closed"):
                loading.result()
        assert time.monotonic() - begun < 10
    assert list((tmp_path / "weights").iterdir()) == []
