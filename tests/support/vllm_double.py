"""The calls of vLLM that training uses, in a small server."""

import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
from server_double import ServerDouble, spans

GENERATE = "/inference/v1/generate"


class VLLMDouble(ServerDouble):
    """vLLM with ``groupwise serve``'s flags, or other ones."""

    generate_path, load_path = GENERATE, "/collective_rpc"
    passing = ((load_path, "drop"), ("/pause", "hang"), ("/pause", "500"), ("/resume", "cut"))
    """Faults of its other calls that a repeated call mends."""

    def __init__(self, model, *, logprobs_mode="processed_logprobs", lora=False, **address):
        self.config = {
            "model_config": {"logprobs_mode": logprobs_mode, "generation_config": "vllm"},
            "lora_config": {"max_lora_rank": 16} if lora else None,
        }
        self._paused, self.holds_requests = False, False
        super().__init__(model, **address)

    def restart(self):
        super().restart()
        self._adapters = None

    def answer(self, path, query, body, fault):
        while self.holds_requests and self._paused and path == GENERATE:  # as vLLM does; else it is an error
            time.sleep(0.01)
        return super().answer(path, query, body, fault)

    def tokens_of_longest(self, found):
        return max(len(choice["token_ids"]) for choice in found["choices"])

    def prompts(self):
        """Of each group that it was asked for, and how many completions."""
        return [(b["token_ids"], b["sampling_params"]["n"]) for path, b in self.calls if path == GENERATE]

    def adapter_loads(self):
        return [path for path, _ in self.calls].count("/v1/load_lora_adapter")

    def server_info(self, body, query, fault):
        return 200, {"vllm_config": self.config}

    def pause(self, body, query, fault):
        assert query == ("mode=keep" if self.in_flight else "mode=wait")
        self._paused = self._held = True
        return 200, {}

    def resume(self, body, query, fault):
        self._paused = self._held = False
        return 200, {}

    def collective_rpc(self, body, query, fault):
        assert self._paused
        assert body["method"] == "reload_weights"
        self._load(Path(body["kwargs"]["weights_path"]))
        return 200, {"results": [None]}

    def v1_load_lora_adapter(self, body, query, fault):
        assert self._paused
        assert body["load_inplace"]
        self._adapters = self._load_adapters(body["lora_path"])
        return 200, None

    def update_weight_version(self, body, query, fault):
        self.version = body["new_version"]
        return 200, {"success": True}

    def reset_prefix_cache(self, body, query, fault):
        assert query == ("reset_running_requests=true" if self.in_flight else "")
        return 200, {"success": fault != "busy"}

    def inference_v1_generate(self, body, query, fault):
        assert self.in_flight or not self._paused
        policy = self._policy
        if "model" in body:
            if self._adapters is None:
                return 404, {"error": f"The model {body['model']!r} does not exist."}
            policy = self._adapters
        want, prompt = body["sampling_params"], body["token_ids"]
        assert want["ignore_eos"]
        names = ("temperature", "repetition_penalty", "presence_penalty", "stop")
        how = {"max_new_tokens": want["max_tokens"], **{name: want[name] for name in names}}
        seeds = want["seed"] + torch.arange(want["n"])[None]
        write = self._write_in_flight if self.in_flight else partial(self._write, policy)
        group = write(prompt, seeds, want["stop_token_ids"], fault, **how)
        choices = [self._choice(number, *written, fault) for number, written in enumerate(group)]
        echo = [*prompt[::-1], 5] if fault == "prompt" else prompt
        return 200, {"choices": choices[: -1 if fault == "short" else None], "prompt_token_ids": echo}

    def _choice(self, number, completion, tokens, versions, fault):
        return {
            "index": number,
            "finish_reason": "abort" if fault == "abort" else "length" if completion.stop == "length" else "stop",
            "token_ids": tokens,
            "logprobs": {
                "content": [{"token_id": t, "logprob": p} for t, p in zip(tokens, completion.log_probs, strict=True)]
            },
            "weight_versions": spans(versions),
        }


def python_of_double(folder):
    """What runs as the Python of an environment with vLLM."""
    path, here = folder / "python", Path(__file__)
    path.write_text(f'#!/bin/sh\nPYTHONPATH={here.parent} exec {sys.executable} {here} "$@"\n')
    path.chmod(0o755)
    return path


def main(args):
    """The double in place of vLLM's command; it dies after its third answer if the model's folder has a file ``dies``, and takes that along, unless it says so."""
    model = Path(args[args.index("--model") + 1])
    host = args[args.index("--host") + 1] if "--host" in args else "127.0.0.1"
    with VLLMDouble(model, host=host, port=int(args[args.index("--port") + 1])) as server:
        server.holds_requests = True
        if "--seconds-per-token" in args:
            server.seconds_per_token = float(args[args.index("--seconds-per-token") + 1])
        server.in_flight = "--in-flight" in args
        while sum(path == GENERATE for path, _ in server.calls) < 3 or not (model / "dies").exists():
            time.sleep(0.01)
        if not (model / "dies").read_text():
            (model / "dies").unlink()
        print("RuntimeError: no memory", flush=True)
        os._exit(3)


if __name__ == "__main__":
    main(sys.argv)
