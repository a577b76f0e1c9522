"""A small inference server with faults, over HTTP. It samples from a real tiny model; its calls are those of a subclass."""

import json
import threading
import time
from collections import defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from transformers import AutoModelForCausalLM, PreTrainedModel

from groupwise.config.policy import ModelCfg, SamplingCfg
from groupwise.speed.decoding import FastDecoder
from groupwise.text.generation import Completion, complete
from groupwise.text.load import load_causal_lm
from groupwise.text.policy import CausalLM

_LOADING = threading.RLock()
_from_pretrained = PreTrainedModel.from_pretrained.__func__


def _one_at_a_time(kind, *args, **options):
    """transformers replaces functions of its own while it loads a model. Servers and runs in threads would leave the wrong ones."""
    with _LOADING:
        return _from_pretrained(kind, *args, **options)


PreTrainedModel.from_pretrained = classmethod(_one_at_a_time)


class ServerDouble:
    """Serves a model's folder from a thread. A call of ``/a/b`` is the method ``a_b``.

    ``faults[path]`` has a fault for each of the next calls of a path; ``calls`` lists paths and bodies.
    A group takes ``seconds_per_token`` of its longest completion, whatever else is written meanwhile. With ``in_flight`` it is
    written token by token, each by the weights of that moment.
    """

    generate_path = load_path = ""

    def __init__(self, model, *, port=0, host="127.0.0.1"):
        self.calls, self.faults, self.closing = [], defaultdict(list), threading.Event()
        self.seconds_per_token, self.seconds_of_a_hang = 0.0, 5.0
        self.in_flight, self._held = False, False
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
        self._policy = self._load_adapters(self._model)
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
        with self._lock:
            if fault == "restart":
                self.restart()
            return getattr(self, path.strip("/").replace("/", "_"), lambda *call: (404, {}))(body, query, fault)

    def tokens_of_longest(self, found):
        """Of the completions that an answer has."""
        raise NotImplementedError

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
                    ((new, _, told),) = self._write(self._policy, text, seed, eos_ids, fault, max_new_tokens=1, **how)
                    group[number] = Completion(so_far.tokens + new.tokens, so_far.log_probs + new.log_probs, new.stop)
                    versions[number] += told
        return [(c, c.tokens, told) for c, told in zip(group, versions, strict=True)]

    def _let_others_call(self):
        seconds = self.seconds_per_token
        while True:
            self._lock.release()
            self.closing.wait(seconds)
            self._lock.acquire()
            if not self._held or self.closing.is_set():
                return
            seconds = 0.002

    def _changed(self, tokens, fault):
        if fault == "strange":
            return [token + 10**6 for token in tokens]
        if fault == "shifted":  # other tokens of the model, but none that ends
            return [token if token in self._policy.eos_ids else 4 + (token - 3) % 11 for token in tokens]
        return tokens


def spans(versions):
    """As servers tell it: where the versions of a completion begin and end."""
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
            if parts.path == double.generate_path and status == 200 and not double.in_flight:
                double.closing.wait(double.seconds_per_token * double.tokens_of_longest(found))
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
