"""vLLM's server (0.32): token ids in, token ids and log-probabilities out.

``--logprobs-mode processed_logprobs`` gives the log-probabilities of the distribution that was sampled, with temperature
and penalties. Every sampling field is sent, so that no default of the model's folder holds.
"""

from pathlib import Path
from typing import Any

from groupwise.errors import ServerError
from groupwise.serving.base import Answer, GroupRequest, LostWeightsError, Server, Stop, check_answer
from groupwise.serving.http import HttpClient, RefusedError

ADAPTER = "groupwise"
"""Name under which adapters are served."""
FLAGS = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-scale-out")
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
FIX = f"fix: start it by groupwise serve, or with {' '.join(f'{k}={v}' for k, v in ENVIRONMENT.items())} and {' '.join(FLAGS)}"


class VLLMServer(Server):
    """One server.

    Args:
        adapters: whether weights are adapters; the server needs ``--enable-lora`` then.
    """

    def __init__(self, client: HttpClient, *, adapters: bool) -> None:
        super().__init__(client.url)
        self._client, self._adapters = client, adapters

    def check(self) -> None:
        """Refuse a server that states other log-probabilities than those of the distribution that it samples from."""
        try:
            config = self._client.get("/server_info?config_format=json")["vllm_config"]
        except RefusedError:
            raise ServerError(f"{self.url} has no calls that change its weights; {FIX}") from None
        model = config["model_config"]
        for name, needed in {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}.items():
            if model.get(name) != needed:
                raise ServerError(f"{self.url} has {name}={model.get(name)!r}, expected {needed!r}; {FIX}")
        if self._adapters and not config.get("lora_config"):
            raise ServerError(f"{self.url} serves no adapters; fix: --enable-lora --max-lora-rank <rank>")

    def generate(self, request: GroupRequest) -> list[Answer]:
        """As many completions as asked for, in the order of the server's choices."""
        body: dict[str, Any] = {"token_ids": list(request.prompt), "sampling_params": sampling_params(request)}
        body |= {"return_token_ids": True, "stream": False} | ({"model": ADAPTER} if self._adapters else {})
        try:
            said = self._client.post("/inference/v1/generate", body)
        except RefusedError as error:
            if error.status == 404 and self._adapters:
                raise LostWeightsError(f"{self.url} has no adapter {ADAPTER!r}") from None
            raise
        try:
            answers = self._read(said, request)
        except (KeyError, TypeError, IndexError) as error:
            raise ServerError(f"{self.url} answered in another format ({error!r}); fix: vLLM 0.32 or later") from None
        if wrong := {answer.version for answer in answers} - {request.version}:
            raise LostWeightsError(f"{self.url} answered by weights {wrong.pop()!r}, expected {request.version!r}")
        return [check_answer(answer, request, self.url) for answer in answers]

    def pause(self) -> None:
        """Finish the requests that run, and begin none."""
        self._client.post("/pause?mode=wait")

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
        """Forget what was cached of prompts."""
        if not self._client.post("/reset_prefix_cache")["success"]:
            raise ServerError(f"{self.url} keeps cached prompts of the old weights; fix: no other requests on it")

    def resume(self) -> None:
        """Begin requests again."""
        self._client.post("/resume")

    def close(self) -> None:
        """End the calls that run, and all later ones, by a ``ServerError``."""
        self._client.close()

    def _read(self, said: Any, request: GroupRequest) -> list[Answer]:
        if said["prompt_token_ids"] != list(request.prompt):
            raise ServerError(f"{self.url} read another prompt than it was sent; fix: serve the model that is trained")
        choices = sorted(said["choices"], key=lambda choice: choice["index"])
        if len(choices) != request.size:
            raise ServerError(f"{self.url} gave {len(choices)} completions, asked for {request.size}")
        return [_answer(choice, request, self.url) for choice in choices]


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


def _answer(choice: dict[str, Any], request: GroupRequest, url: str) -> Answer:
    tokens, content = choice["token_ids"], choice["logprobs"]["content"]
    versions = {span["version"] for span in choice["weight_versions"]}
    if [entry["token_id"] for entry in content] != tokens:
        raise ServerError(f"{url} gave log-probabilities of other tokens than those of the completion")
    if choice["finish_reason"] not in ("stop", "length"):
        raise ServerError(f"{url} ended a completion by {choice['finish_reason']!r}; fix: let no one abort requests")
    stop: Stop = "eos" if tokens and tokens[-1] in request.eos_ids else choice["finish_reason"]
    return Answer(tokens, [entry["logprob"] for entry in content], stop, "+".join(sorted(versions)))
