"""SGLang's server (0.5.23): token ids in, token ids and log-probabilities out.

Its log-probabilities are those of the distribution that was sampled, after the temperature, unless its environment has
``SGLANG_RETURN_ORIGINAL_LOGPROB``, which ``check`` finds out by two temperatures. Every sampling field is sent.
"""

from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError, ServerError
from groupwise.serving.base import GroupRequest, LostWeightsError, Reply, Server, of_each_token
from groupwise.serving.http import HttpClient, RefusedError

ADAPTER = "groupwise-"
"""Adapters are served under this name and their version."""
_HOT = 2.0
_REFUSED = {
    "speculative_algorithm": "it takes draft tokens by a rule of its own",
    "preferred_sampling_params": "they change what is sampled",
    "enable_watermark": "its log-probabilities leave the watermark out",
}
"""Settings of the server with which it may sample from another distribution than the one it states."""


class SGLangServer(Server):
    """One server. For adapters it needs ``--enable-lora``.

    Weights are read in one call, which waits for the requests that run, holds back the others and empties the cache. So
    ``pause`` has nothing to do, unless requests go on under new weights, and ``flush`` never has.
    """

    needs = "SGLang 0.5.23"

    def __init__(self, client: HttpClient, **options: bool) -> None:
        super().__init__(client, **options)
        client.health = "/model_info"  # /health generates a token, and so waits while weights are read

    def inspect(self) -> None:
        """Refuse a server that states other log-probabilities than those of the distribution that it samples from."""
        info = self._client.get("/server_info")
        for name, why in _REFUSED.items():
            if info.get(name):
                raise ServerError(
                    f"{self.url} has {name}={info[name]!r}, expected none, as {why}; fix: start it without --{name.replace('_', '-')}"
                )
        if self._adapters and not info.get("enable_lora"):
            raise ServerError(
                f"{self.url} serves no adapters; fix: --enable-lora --max-lora-rank <rank> --lora-target-modules all"
            )
        self.resume()  # a server that someone left paused would not answer
        cold, hot = self._spreads(1.0, _HOT)
        if hot > 0.75 * cold:
            raise ServerError(
                f"{self.url} gives log-probabilities before the temperature, expected those after it; fix: start it without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    def ask(self, request: GroupRequest) -> list[Reply]:
        """What the server says of each prompt of a batch. Each has a seed, as completions by ``n`` would have the same."""
        params = [sampling_params(request, number) for number in range(request.size)]
        body: dict[str, Any] = {"input_ids": [list(request.prompt)] * request.size, "sampling_params": params}
        body |= {"return_logprob": True, "return_prompt_token_ids": True, "stream": False}
        body |= {"lora_path": ADAPTER + request.version} if self._adapters else {}
        try:
            said = self._client.post("/generate", body)
        except RefusedError:
            if self._adapters and not self._has_adapters(request.version):
                raise LostWeightsError(f"{self.url} has no adapter {ADAPTER + request.version!r}") from None
            raise
        return [_reply(entry, request, self.url, in_flight_updates=self._in_flight_updates) for entry in said]

    def pause(self) -> None:
        """Hold back the requests that run; else nothing, as ``load_weights`` finishes them, and begins none."""
        if self._in_flight_updates:
            self._client.post("/pause_generation", {"mode": "retract"})

    def load_weights(self, folder: Path, version: str) -> None:
        """Read the safetensors of a folder, and forget what was cached of prompts."""
        if not self._adapters:
            body = {"model_path": str(folder), "load_format": "auto", "weight_version": version, "flush_cache": True}
            self._client.post("/update_weights_from_disk", body)
            return
        for name in self._models() - {ADAPTER + version}:
            if name.startswith(ADAPTER):
                self._change("unload", name)
        if not self._has_adapters(version):
            self._change("load", ADAPTER + version, lora_path=str(folder))
        self._client.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def flush(self) -> None:
        """Nothing: ``load_weights`` has emptied the cache, and what adapters cached is known by their name."""

    def resume(self) -> None:
        """Begin requests again, and go on with those that were held back."""
        self._client.post("/continue_generation")

    def _spreads(self, *temperatures: float) -> list[float]:
        """By how much the log-probabilities of the five likeliest tokens differ, after one token."""
        fixed = {"max_new_tokens": 1, "ignore_eos": True}
        body = {"input_ids": [[0]] * len(temperatures), "return_logprob": True, "top_logprobs_num": 5}
        body |= {"sampling_params": [fixed | {"temperature": temperature} for temperature in temperatures]}
        said = self._client.post("/generate", body)
        tops = [[value for value, *_ in entry["meta_info"]["output_top_logprobs"][0]] for entry in said]
        return [max(top) - min(top) for top in tops]

    def _models(self) -> set[str]:
        return {model["id"] for model in self._client.get("/v1/models")["data"]}

    def _has_adapters(self, version: str) -> bool:
        return ADAPTER + version in self._models()

    def _change(self, verb: str, name: str, **more: str) -> None:
        try:
            self._client.post(f"/{verb}_lora_adapter", {"lora_name": name} | more)
        except RefusedError:  # so is a repeated call whose first answer was lost
            if (name in self._models()) != (verb == "load"):
                raise


def sampling_params(request: GroupRequest, number: int) -> dict[str, Any]:
    """Every field that changes what is sampled. The server heeds the seed with ``--enable-deterministic-inference``."""
    sampling = request.sampling
    if sampling.has_penalties:
        raise ConfigError(
            f"sampling.repetition_penalty={sampling.repetition_penalty:g} and presence_penalty={sampling.presence_penalty:g} on "
            "SGLang, expected 1 and 0: it leaves out the prompt and the latest token, training does not; fix: leave them "
            "out, or serve with vLLM"
        )
    return {
        "n": 1,
        "sampling_seed": request.seed + number,
        "temperature": 0.0 if request.greedy else sampling.temperature,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": 0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(request.eos_ids),
        "ignore_eos": False,  # it would ignore the ids above, too
        "no_stop_trim": True,  # the token that ends a completion is part of it
        "skip_special_tokens": False,  # stop strings are looked for in the whole text
        "spaces_between_special_tokens": False,
    }


def _reply(entry: dict[str, Any], request: GroupRequest, url: str, *, in_flight_updates: bool) -> Reply:
    told = entry["meta_info"]
    reason = dict(told["finish_reason"])
    if isinstance(end := reason.get("matched"), int) and end not in request.eos_ids:
        raise ServerError(
            f"{url} ended a completion by token {end}, and training does only by {list(request.eos_ids)}; fix: the same "
            "eos_token_id in the config.json and generation_config.json that the server reads"
        )
    scored = [(place[1], place[0]) for place in told["output_token_logprobs"]]
    whole = {"version": told["weight_version"], "start": 0, "end": len(entry["output_ids"])}
    # one version for all tokens is no answer where they may have several
    spans = told["weight_versions"] if in_flight_updates else told.get("weight_versions") or [whole]
    versions = of_each_token(spans)
    return Reply(entry["prompt_token_ids"], entry["output_ids"], scored, reason["type"], versions)
