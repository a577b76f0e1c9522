"""vLLM's server (0.32): token ids in, token ids and log-probabilities out.

``--logprobs-mode processed_logprobs`` gives the log-probabilities of the distribution that was sampled, with temperature
and penalties. Every sampling field is sent, so that no default of the model's folder holds.
"""

from pathlib import Path
from typing import Any

from groupwise.errors import ServerError
from groupwise.serving.base import GroupRequest, LostWeightsError, Reply, Server, of_each_token
from groupwise.serving.http import RefusedError

ADAPTER = "groupwise"
"""Name under which adapters are served."""
FLAGS = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-scale-out")
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
FIX = f"fix: start it by groupwise serve, or with {' '.join(f'{k}={v}' for k, v in ENVIRONMENT.items())} and {' '.join(FLAGS)}"


class VLLMServer(Server):
    """One server. For adapters it needs ``--enable-lora``."""

    needs = "vLLM 0.32"

    def inspect(self) -> None:
        """Refuse a server that states other log-probabilities than those of the distribution that it samples from."""
        try:
            config = self._client.get("/server_info?config_format=json")["vllm_config"]
        except RefusedError:
            raise ServerError(f"{self.url} has no /server_info; {FIX}") from None
        model = config["model_config"]
        for name, needed in {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}.items():
            if model.get(name) != needed:
                raise ServerError(f"{self.url} has {name}={model.get(name)!r}, expected {needed!r}; {FIX}")
        if self._adapters and not config.get("lora_config"):
            raise ServerError(f"{self.url} serves no adapters; fix: --enable-lora --max-lora-rank <rank>")

    def ask(self, request: GroupRequest) -> list[Reply]:
        """The server's choices, in their order."""
        body: dict[str, Any] = {"token_ids": list(request.prompt), "sampling_params": sampling_params(request)}
        body |= {"return_token_ids": True, "stream": False} | ({"model": ADAPTER} if self._adapters else {})
        try:
            said = self._client.post("/inference/v1/generate", body)
        except RefusedError as error:
            if error.status == 404 and self._adapters:
                raise LostWeightsError(f"{self.url} has no adapter {ADAPTER!r}") from None
            raise
        choices = sorted(said["choices"], key=lambda choice: choice["index"])
        return [_reply(said["prompt_token_ids"], choice) for choice in choices]

    def pause(self) -> None:
        """Finish the requests that run, or hold them back, and begin none."""
        self._client.post(f"/pause?mode={'keep' if self._in_flight_updates else 'wait'}")

    def load_weights(self, folder: Path, version: str) -> None:
        """Read the safetensors of a folder."""
        if self._adapters:
            body = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
            self._client.post("/v1/load_lora_adapter", body)
        else:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self._client.post("/collective_rpc", body)
        self._client.post("/update_weight_version", {"new_version": version})

    def flush(self) -> None:
        """Forget what was cached of prompts, and of requests that are held back: it is computed by the new weights."""
        running = "?reset_running_requests=true" if self._in_flight_updates else ""
        if not self._client.post(f"/reset_prefix_cache{running}")["success"]:
            raise ServerError(f"{self.url} keeps cached prompts of the old weights; fix: no other requests on it")

    def resume(self) -> None:
        """Begin requests again, and go on with those that were held back."""
        self._client.post("/resume")


def sampling_params(request: GroupRequest) -> dict[str, Any]:
    """Every field that changes what is sampled. Completions of the group have the seeds from ``seed`` on."""
    sampling = request.sampling
    return {
        "n": request.size,
        "seed": request.seed,
        "temperature": 0.0 if request.greedy else sampling.temperature,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": 0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(request.eos_ids),
        "ignore_eos": True,  # the ids above are all that end a completion
        "skip_special_tokens": False,  # stop strings are looked for in the whole text
        "spaces_between_special_tokens": False,
        "logprobs": 0,  # of the sampled token alone
    }


def _reply(prompt: list[int], choice: dict[str, Any]) -> Reply:
    scored = [(entry["token_id"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
    return Reply(prompt, choice["token_ids"], scored, choice["finish_reason"], of_each_token(choice["weight_versions"]))
