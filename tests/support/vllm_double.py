"""A small HTTP server with the calls of vLLM that training uses, and with faults. It samples from a real tiny model."""

import json
import os
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM

from groupwise.config.policy import ModelCfg, SamplingCfg
from groupwise.speed.decoding_step import FastDecoder
from groupwise.text.generation import complete
from groupwise.text.load import load_causal_lm
from groupwise.text.policy import CausalLM

GENERATE = "/inference/v1/generate"


class VLLMDouble:
    """Serves a model's folder from a thread.

    ``faults[path]`` has a fault for each of the next calls of a path; ``calls`` lists paths and bodies.
    A group takes ``seconds_per_token`` of its longest completion, whatever else is written meanwhile.
    """

    def __init__(self, model, *, port=0, logprobs_mode="processed_logprobs", lora=False):
        self.calls, self.faults, self.closing = [], defaultdict(list), threading.Event()
        self.seconds_per_token, self.seconds_of_a_hang = 0.0, 5.0
        self.config = {
            "model_config": {"logprobs_mode": logprobs_mode, "generation_config": "vllm"},
            "lora_config": {"max_lora_rank": 16} if lora else None,
        }
        self._model, self._lock, self._paused = model, threading.Lock(), False
        self.restart()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()

    def restart(self):
        """As a server that was started again: the first weights, and no adapters."""
        self._policy = load_causal_lm(ModelCfg(path=str(self._model)), SamplingCfg(max_new_tokens=1))
        self._policy.decoder = FastDecoder()
        self.version, self._adapters = "default", None

    def fault(self, path):
        return self.faults[path].pop(0) if self.faults[path] else None

    def answer(self, path, query, body, fault):
        """Status and JSON."""
        with self._lock:
            self.calls.append((path, body))
            if fault == "restart":
                self.restart()
            if fault == "500":
                return 500, {"error": "EngineDeadError: out of memory"}
            if path in ("/health", "/pause", "/resume"):
                self._paused = path == "/pause" or (path != "/resume" and self._paused)
                assert path != "/pause" or query == "mode=wait"
                return 200, {}
            return getattr(self, path.strip("/").replace("/", "_"), lambda body, fault: (404, {}))(body, fault)

    def server_info(self, body, fault):
        return 200, {"vllm_config": self.config}

    def collective_rpc(self, body, fault):
        assert self._paused
        assert body["method"] == "reload_weights"
        folder = Path(body["kwargs"]["weights_path"])
        assert folder.is_absolute()
        self._policy = CausalLM(AutoModelForCausalLM.from_pretrained(folder), tokenizer=self._policy.tokenizer)
        self._policy.decoder = FastDecoder()
        return 200, {"results": [None]}

    def v1_load_lora_adapter(self, body, fault):
        assert self._paused
        assert body["load_inplace"]
        self._adapters = load_causal_lm(ModelCfg(path=body["lora_path"]), SamplingCfg(max_new_tokens=1))
        return 200, None

    def update_weight_version(self, body, fault):
        self.version = body["new_version"]
        return 200, {"success": True}

    def reset_prefix_cache(self, body, fault):
        return 200, {"success": fault != "busy"}

    def inference_v1_generate(self, body, fault):
        assert not self._paused
        policy = self._policy
        if "model" in body:
            if self._adapters is None:
                return 404, {"error": f"The model {body['model']!r} does not exist."}
            policy = self._adapters
        want, prompt = body["sampling_params"], body["token_ids"]
        assert want["ignore_eos"]
        policy.eos_ids = tuple(want["stop_token_ids"])
        names = ("repetition_penalty", "presence_penalty", "stop")
        sampling = SamplingCfg(
            max_new_tokens=want["max_tokens"], temperature=want["temperature"] or 1.0, **{n: want[n] for n in names}
        )
        seeds = want["seed"] + torch.arange(want["n"])[None]
        (group,) = complete(policy, [prompt], seeds, sampling, deterministic=want["temperature"] == 0)
        choices = [self._choice(number, c, fault) for number, c in enumerate(group)]
        echo = [*prompt[::-1], 5] if fault == "prompt" else prompt
        return 200, {"choices": choices[: -1 if fault == "short" else None], "prompt_token_ids": echo}

    def _choice(self, number, completion, fault):
        tokens = completion.tokens
        if fault == "strange":
            tokens = [token + 10**6 for token in tokens]
        if fault == "shifted":  # other tokens of the model, but none that ends
            tokens = [token if token in self._policy.eos_ids else 4 + (token - 3) % 11 for token in tokens]
        version = "another" if fault == "version" else self.version
        return {
            "index": number,
            "finish_reason": "abort" if fault == "abort" else "length" if completion.stop == "length" else "stop",
            "token_ids": tokens,
            "logprobs": {
                "content": [{"token_id": t, "logprob": p} for t, p in zip(tokens, completion.log_probs, strict=True)]
            },
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
        }


def main(args):
    """The double in place of vLLM's command; it dies after its third answer if the model's folder has a file ``dies``, and takes that along, unless it says so."""
    model = Path(args[args.index("--model") + 1])
    with VLLMDouble(model, port=int(args[args.index("--port") + 1])) as server:
        if "--seconds-per-token" in args:
            server.seconds_per_token = float(args[args.index("--seconds-per-token") + 1])
        while sum(path == GENERATE for path, _ in server.calls) < 3 or not (model / "dies").exists():
            time.sleep(0.01)
        if not (model / "dies").read_text():
            (model / "dies").unlink()
        print("RuntimeError: no memory", flush=True)
        os._exit(3)


def _handler(double):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._answer(None)

        def do_POST(self):
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body):
            parts = urlsplit(self.path)
            fault = double.fault(parts.path)
            self.close_connection = True
            if fault == "slow":
                time.sleep(0.5)
            if fault == "hang":  # its engine is gone, and its front does not say so to those that wait
                double.faults["/health"] = ["500"]
                double.closing.wait(double.seconds_of_a_hang)
                return
            if fault == "drop":
                return
            status, found = double.answer(parts.path, parts.query, body, fault)
            if parts.path == GENERATE and status == 200:
                longest = max(len(choice["token_ids"]) for choice in found["choices"])
                double.closing.wait(double.seconds_per_token * longest)
            data = b"" if found is None else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json" if data else "text/plain")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)

        def log_message(self, *args):
            pass

        def handle(self):
            with suppress(ConnectionError):  # the client has given up
                super().handle()

    return Handler


if __name__ == "__main__":
    main(sys.argv)
