"""What SGLang alone does; ``test_served`` has what all servers do."""

from contextlib import ExitStack

import pytest
from server_double import ServerDouble
from sglang_double import GENERATE, SGLangDouble
from vllm_double import VLLMDouble

import groupwise as gw
from groupwise.config.policy import SamplingCfg
from groupwise.serving import http
from groupwise.serving.base import GroupRequest, LostWeightsError
from groupwise.serving.find import find_server
from groupwise.serving.http import HttpClient
from groupwise.serving.sglang import SGLangServer
from groupwise.serving.vllm import VLLMServer


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_WAIT", 0.01)


def found(double, *, adapters=False, retries=2):
    return find_server(HttpClient(double.url, timeout=20.0, retries=retries), adapters=adapters)


def request(version="default", **sampling):
    return GroupRequest([5, 6], 3, 1, SamplingCfg(max_new_tokens=4, **sampling), (0,), 15, version)


class Foreign(ServerDouble):
    """Another server, that may have a ``/server_info``."""

    info = None

    def server_info(self, body, query, fault):
        return (404, {}) if self.info is None else (200, self.info)


def test_the_server_is_told_by_what_it_says(model):
    with ExitStack() as stack:
        kinds = (VLLMDouble, SGLangDouble, Foreign)
        vllm, sglang, foreign = (stack.enter_context(kind(model)) for kind in kinds)
        assert isinstance(found(vllm), VLLMServer)
        assert isinstance(found(sglang), SGLangServer)
        with pytest.raises(
            gw.errors.ServerError, match=r"has no /server_info, as vLLM without .*; fix: start it by groupwise serve"
        ):
            found(foreign)
        for info in ({"version": "1"}, [], "hello"):
            foreign.info = info
            with pytest.raises(gw.errors.ServerError, match=r"is neither vLLM nor SGLang.*; fix: generation\.urls of"):
                found(foreign)


REFUSED = {
    "draft tokens": (
        {"speculative_algorithm": "EAGLE"},
        "speculative_algorithm='EAGLE', expected none.*start it without --",
    ),
    "defaults": (
        {"preferred_sampling_params": {"top_k": 5}},
        "preferred_sampling_params=.* without --preferred-sampling-",
    ),
    "watermark": ({"enable_watermark": True}, "enable_watermark=True, expected none, as its log-probabilities leave"),
    "raw": (
        {"original": True},
        "before the temperature, expected .*; fix: start it without SGLANG_RETURN_ORIGINAL_LOGPROB",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_server_whose_log_probs_are_not_of_what_it_samples_is_refused(model, why):
    settings, said = REFUSED[why]
    with SGLangDouble(model, **settings) as double, pytest.raises(gw.errors.ServerError, match=said):
        found(double).check()


def test_a_server_without_adapters_is_refused(model):
    with (
        SGLangDouble(model) as double,
        pytest.raises(gw.errors.ServerError, match="serves no adapters; fix: --enable-lora"),
    ):
        found(double, adapters=True).check()


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty"])
def test_penalties_that_differ_from_those_of_training_are_refused(model, penalty):
    with (
        SGLangDouble(model) as double,
        pytest.raises(gw.errors.ConfigError, match=rf"{penalty}=1\.5 .*; fix: leave them out"),
    ):
        found(double).generate(request(**{penalty: 1.5}))


def test_a_completion_that_ends_where_training_does_not_is_refused(model):
    with SGLangDouble(model) as double:
        server = found(double)
        server.check()
        ends = request(stop=tuple("0123456789"))
        assert any(answer.stop != "length" for answer in server.generate(ends))
        double.faults[GENERATE] = ["end"]
        with pytest.raises(
            gw.errors.ServerError, match=r"by token 7, and training does only by \[0\]; fix: the same eos_token_id"
        ):
            server.generate(ends)


def test_answers_in_another_format_say_so(model):
    with SGLangDouble(model) as double:
        server = found(double)
        server.check()
        double.generate = lambda *call: (200, [{"meta_info": {"finish_reason": None}}])
        with pytest.raises(gw.errors.ServerError, match=r"in another format .*; fix: SGLang 0\.5\.23 or later"):
            server.generate(request())
        double.generate = lambda *call: (400, {"error": {"message": "too long"}})
        with pytest.raises(gw.errors.ServerError, match=r"was refused: status 400: .*too long"):
            server.generate(request())


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("server_info", ["internal_states"]),
        ("generate", [{"text": "5"}]),
        ("generate", [{"meta_info": {"output_top_logprobs": [[]]}}]),
    ],
)
def test_a_check_that_is_answered_in_another_format_says_so(model, call, answer):
    with SGLangDouble(model) as double:
        server = found(double)
        setattr(double, call, lambda *call: (200, answer))
        with pytest.raises(gw.errors.ServerError, match=r"in another format .*; fix: SGLang 0\.5\.23 or later"):
            server.check()


def test_a_list_of_models_in_another_format_says_so(model):
    with SGLangDouble(model, lora=True) as double:
        server = found(double, adapters=True)
        double.v1_models = lambda *call: (200, {"models": []})
        with pytest.raises(gw.errors.ServerError, match=r"in another format \(KeyError\('data'\)\); fix: SGLang"):
            server.update(model, "a")


@pytest.mark.parametrize("fault", ["cut", "drop", "500"])
@pytest.mark.parametrize("verb", ["load", "unload"])
def test_adapters_change_once_if_an_answer_is_lost(model, verb, fault):
    with SGLangDouble(model, lora=True) as double:
        server = found(double, adapters=True)
        server.check()
        server.update(model, "a")
        double.faults[f"/{verb}_lora_adapter"] = [fault]
        server.update(model, "b")
        assert double.faults[f"/{verb}_lora_adapter"] == []
        assert server._models() == {str(model), "groupwise-b"}
        assert {version for answer in server.generate(request("b")) for version in answer.versions} == {"b"}
        with pytest.raises(LostWeightsError, match="has no adapter 'groupwise-c'"):
            server.generate(request("c"))
        double.load_lora_adapter = lambda *call: (400, {"error_message": "rank 64 is incompatible"})
        with pytest.raises(gw.errors.ServerError, match="rank 64 is incompatible"):
            server.update(model, "c")


@pytest.mark.parametrize("kind", [VLLMDouble, SGLangDouble])
def test_weights_that_take_long_are_waited_for(model, kind, monkeypatch):
    monkeypatch.setattr(http, "_HEALTH_INTERVAL", 0.3)
    with kind(model) as double:
        server = found(double, retries=0)
        server.check()
        double.faults[double.load_path] = ["slow"]
        server.update(model, "a")
        assert double.version == "a"
