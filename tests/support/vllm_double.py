"""The calls of vLLM that training uses, in a small server with faults. It samples from a real tiny model."""

import json
import os
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from groupwise.config.policy import ModelCfg, SamplingCfg
from groupwise.speed.decoding import FastDecoder
from groupwise.text.generation import Completion, complete
from groupwise.text.load import load_causal_lm
from groupwise.text.policy import CausalLM

GENERATE = "/inference/v1/generate"

_LOADING = threading.RLock()
_from_pretrained = PreTrainedModel.from_pretrained.__func__


def _one_at_a_time(kind, *args, **options):
    """transformers replaces functions of its own while it loads a model. Servers and runs in threads would leave the wrong ones."""
    with _LOADING:
        return _from_pretrained(kind, *args, **options)


PreTrainedModel.from_pretrained = classmethod(_one_at_a_time)


class VLLMDouble:
    """Serves a model's folder from a thread, as vLLM with ``groupwise serve``'s flags. A call of ``/a/b`` is the method ``a_b``.

    ``faults[path]`` has a fault for each of the next calls of a path; ``calls`` lists paths and bodies.
    A group takes ``seconds_per_token`` of its longest completion, whatever else is written meanwhile. With ``in_flight`` it is
    written token by token, each by the weights of that moment.
    """

    generate_path, load_path = GENERATE, "/collective_rpc"
    passing = ((load_path, "drop"), ("/pause", "hang"), ("/pause", "500"), ("/resume", "cut"))
    """Faults of its other calls that a repeated call mends."""

    def __init__(self, model, *, lora=False, port=0, host="127.0.0.1"):
        self.config = config_of(lora)
        self.calls, self.faults, self.closing = [], defaultdict(list), threading.Event()
        self.seconds_per_token, self.seconds_of_a_hang = 0.0, 5.0
        self.in_flight = self.holds_requests = self._paused = False
        self._model, self._lock = model, threading.Lock()
        self.restart()
        self._http = ThreadingHTTPServer((host, port), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://{host}:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()

    def restart(self):
        """As a server that was started again: the first weights, and no adapters."""
        self._policy, self._adapters = self._load_adapters(self._model), None
        self._policy.decoder = FastDecoder()
        self.version = "default"

    def fault(self, path):
        return self.faults[path].pop(0) if self.faults[path] else None

    def answer(self, path, query, body, fault):
        """Status and JSON."""
        self.calls.append((path, body))
        if fault == "500":
            return 500, {"error": "EngineDeadError: out of memory"}
        if path == "/health":  # also while it does something else
            return 200, {}
        while True:
            with self._lock:
                if not (self.holds_requests and self._paused and path == GENERATE):  # as vLLM does; else it is an error
                    if fault == "restart":
                        self.restart()
                    return getattr(self, path.strip("/").replace("/", "_"), lambda *call: (404, {}))(body, query, fault)
            time.sleep(0.01)

    def prompts(self):
        """Of each group that it was asked for, and how many completions."""
        return [(b["token_ids"], b["sampling_params"]["n"]) for path, b in self.calls if path == GENERATE]

    def adapter_loads(self):
        return [path for path, _ in self.calls].count("/v1/load_lora_adapter")

    def server_info(self, body, query, fault):
        return 200, {"vllm_config": self.config}

    def pause(self, body, query, fault):
        assert query == ("mode=keep" if self.in_flight else "mode=wait")
        self._paused = True
        return 200, {}

    def resume(self, body, query, fault):
        self._paused = False
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
        assert -2 <= want["presence_penalty"] <= 2
        names = ("temperature", "repetition_penalty", "presence_penalty", "stop")
        how = {
            "max_new_tokens": want["max_tokens"],
            "min_new_tokens": want["min_tokens"],
            **{name: want[name] for name in names},
        }
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

    def _load(self, folder):
        assert folder.is_absolute()
        model = AutoModelForCausalLM.from_pretrained(folder)
        self._policy = CausalLM(model, tokenizer=self._policy.tokenizer)
        self._policy.decoder = FastDecoder()

    def _load_adapters(self, folder):
        return load_causal_lm(ModelCfg(path=str(folder)), SamplingCfg(max_new_tokens=1))

    def _write(self, policy, prompt, seeds, eos_ids, fault, *, temperature, **sampling):
        """Completions, their tokens and the versions of the weights, wrong ones with some faults."""
        policy.eos_ids = tuple(eos_ids)
        how = SamplingCfg(temperature=temperature or 1.0, **sampling)
        (group,) = complete(policy, [prompt], seeds, how, deterministic=temperature == 0)
        if fault == "nan":  # as JSON has it
            group = [c._replace(log_probs=[None] * len(c.tokens)) for c in group]
        version = "another" if fault == "version" else self.version
        return [(c, self._changed(c.tokens, fault), [version] * len(c.tokens)) for c in group]

    def _write_in_flight(self, prompt, seeds, eos_ids, fault, *, max_new_tokens, **how):
        """As ``_write``, token by token; others may call meanwhile."""
        empty = Completion([], [], "length")
        group, versions = [empty] * seeds.shape[1], [[] for _ in seeds[0]]
        for place in range(max_new_tokens):
            self._let_others_call()
            for number, so_far in enumerate(group):
                if so_far.stop == "length":
                    text, seed = [*prompt, *so_far.tokens], seeds[:, number : number + 1] + 1000 * place
                    ((new, _, versions_of_new),) = self._write(
                        self._policy, text, seed, eos_ids, fault, max_new_tokens=1, **how
                    )
                    group[number] = Completion(so_far.tokens + new.tokens, so_far.log_probs + new.log_probs, new.stop)
                    versions[number] += versions_of_new
        return [(c, c.tokens, by) for c, by in zip(group, versions, strict=True)]

    def _let_others_call(self):
        seconds = self.seconds_per_token
        while True:
            self._lock.release()
            self.closing.wait(seconds)
            self._lock.acquire()
            if not self._paused or self.closing.is_set():
                return
            seconds = 0.002

    def _changed(self, tokens, fault):
        if fault == "strange":
            return [token + 10**6 for token in tokens]
        if fault == "shifted":  # other tokens of the model, but none that ends
            return [token if token in self._policy.eos_ids else 4 + (token - 3) % 11 for token in tokens]
        return tokens


def config_of(lora=False):
    return {
        "model_config": {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"},
        "lora_config": {"max_lora_rank": 16} if lora else None,
    }


def spans(versions):
    """Where the versions of a completion begin and end."""
    starts = [place for place, version in enumerate(versions) if place == 0 or versions[place - 1] != version]
    ends = [*starts[1:], len(versions)]
    return [{"version": versions[start], "start": start, "end": end} for start, end in zip(starts, ends, strict=True)]


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
            if parts.path == GENERATE and status == 200 and not double.in_flight:
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


def python_of_double(folder, python=sys.executable):
    """What runs as the Python of an environment with vLLM."""
    path, here = folder / "python", Path(__file__)
    path.write_text(f'#!/bin/sh\nPYTHONPATH={here.parent}:{here.parents[2]}/src exec {python} {here} "$@"\n')
    path.chmod(0o755)
    return path


def python_of_files(folder):
    """The same, at once, of a server that says that it is there, and what it is."""
    path = folder / "python"
    (folder / "health").write_text("{}")
    (folder / "server_info").write_text(json.dumps({"vllm_config": config_of()}))
    path.write_text(f"""#!{sys.executable}
import os, sys
from http.server import SimpleHTTPRequestHandler, test
SimpleHTTPRequestHandler.extensions_map = {{"": "application/json"}}
os.chdir({str(folder)!r})
test(SimpleHTTPRequestHandler, port=int(sys.argv[sys.argv.index("--port") + 1]), bind="127.0.0.1")
""")
    path.chmod(0o755)
    return path


def main(args):
    """The double in place of vLLM's command; it dies after its third answer if the model's folder has a file ``dies``."""
    model = Path(args[args.index("--model") + 1])
    host = args[args.index("--host") + 1] if "--host" in args else "127.0.0.1"
    with VLLMDouble(model, host=host, port=int(args[args.index("--port") + 1])) as server:
        server.holds_requests = True
        if "--seconds-per-token" in args:
            server.seconds_per_token = float(args[args.index("--seconds-per-token") + 1])
        server.in_flight = "--in-flight" in args
        while sum(path == GENERATE for path, _ in server.calls) < 3 or not (model / "dies").exists():
            time.sleep(0.01)
        print("RuntimeError: no memory", flush=True)
        os._exit(3)


if __name__ == "__main__":
    main(sys.argv)
