"""The calls of SGLang that training uses, in a small server."""

from functools import partial
from pathlib import Path

import torch
from server_double import ServerDouble, spans

GENERATE = "/generate"


class SGLangDouble(ServerDouble):
    """SGLang. ``original``: as with ``SGLANG_RETURN_ORIGINAL_LOGPROB``; ``config``: other settings of the server."""

    generate_path, load_path = GENERATE, "/update_weights_from_disk"
    health_path = "/model_info"
    passing = ((load_path, "drop"), (load_path, "hang"), (load_path, "500"), (load_path, "cut"))

    def __init__(self, model, *, port=0, lora=False, original=False, **config):
        self.config = {"enable_lora": lora, "speculative_algorithm": None, "preferred_sampling_params": None} | config
        self._original, self._paused = original, True  # someone else left it so
        super().__init__(model, port=port)

    def restart(self):
        super().restart()
        self._adapters = {}

    def tokens_of_longest(self, found):
        return max(len(entry.get("output_ids", ())) for entry in found)

    def prompts(self):
        """Of each group that it was asked for, and how many completions."""
        asked = [body["input_ids"] for path, body in self.calls if path == GENERATE and "top_logprobs_num" not in body]
        return [(prompts[0], len(prompts)) for prompts in asked]

    def adapter_loads(self):
        return [path for path, _ in self.calls].count("/load_lora_adapter")

    def health(self, body, query, fault):
        raise AssertionError("it generates a token, which waits while weights are read")

    def server_info(self, body, query, fault):
        return 200, self.config | {"internal_states": [{}], "version": "0.5.23"}

    def pause_generation(self, body, query, fault):
        assert self.in_flight
        assert body == {"mode": "retract"}  # in_place keeps the cache of the old weights
        self._paused = self._held = True
        return 200, {"status": "ok"}

    def continue_generation(self, body, query, fault):
        self._paused = self._held = False
        return 200, {"status": "ok"}

    def update_weights_from_disk(self, body, query, fault):
        assert body["flush_cache"]
        assert self._held == self.in_flight
        assert not body.get("abort_all_requests")
        self._load(Path(body["model_path"]))
        self.version = body["weight_version"]
        return 200, {"success": True, "message": "", "num_paused_requests": 0}

    def v1_models(self, body, query, fault):
        return 200, {"data": [{"id": name} for name in (str(self._model), *self._adapters)]}

    def load_lora_adapter(self, body, query, fault):
        name = body["lora_name"]
        if name in self._adapters:
            return 400, {"success": False, "error_message": f"{name} is already loaded"}
        self._adapters[name] = self._load_adapters(body["lora_path"])
        return 200, {"success": True}

    def unload_lora_adapter(self, body, query, fault):
        if self._adapters.pop(body["lora_name"], None) is None:
            return 400, {"success": False, "error_message": f"{body['lora_name']} does not exist"}
        return 200, {"success": True}

    def update_weight_version(self, body, query, fault):
        assert body["abort_all_requests"] is False
        self.version = body["new_version"]
        return 200, {"success": True}

    def generate(self, body, query, fault):
        assert self.in_flight or not self._paused
        prompts, params = body["input_ids"], body["sampling_params"]
        assert len(prompts) == len(params)
        assert body["return_logprob"]
        if "top_logprobs_num" in body:
            return 200, [self._top(want["temperature"], body["top_logprobs_num"]) for want in params]
        policy = self._policy
        if "lora_path" in body:
            if body["lora_path"] not in self._adapters:
                return 400, {"error": {"message": f"never been loaded: {body['lora_path']}"}}
            policy = self._adapters[body["lora_path"]]
        (prompt, *others), (want, *more) = prompts, params
        assert [want | {"sampling_seed": other["sampling_seed"]} for other in more] == more
        assert all(other == prompt for other in others)
        assert want["no_stop_trim"]
        assert not want["ignore_eos"]
        assert want["repetition_penalty"] == 1
        assert want["presence_penalty"] == 0
        seeds = torch.tensor([[want["sampling_seed"] for want in params]])
        how = {name: want[name] for name in ("temperature", "max_new_tokens", "stop")}
        ends = want["stop_token_ids"]
        write = self._write_in_flight if self.in_flight else partial(self._write, policy)
        found = [self._entry(prompt, *written, ends, fault) for written in write(prompt, seeds, ends, fault, **how)]
        return 200, found[: -1 if fault == "short" else None]

    def _entry(self, prompt, completion, tokens, versions, ends, fault):
        reason = {"type": "length", "length": len(tokens)}
        if completion.stop != "length":
            matched = tokens[-1] if completion.stop == "eos" else "a stop string"
            reason = {"type": "stop", "matched": 7 if fault == "end" else matched}
        if fault == "abort":
            reason = {"type": "abort", "message": "Abort before prefill"}
        return {
            "output_ids": tokens,
            "prompt_token_ids": [*prompt[::-1], 5] if fault == "prompt" else prompt,
            "meta_info": {
                "finish_reason": reason,
                "weight_version": versions[-1],
                "weight_versions": spans(versions),
                "output_token_logprobs": [[p, t, None] for t, p in zip(tokens, completion.log_probs, strict=True)],
            },
        }

    def _top(self, temperature, count):
        logits = torch.linspace(0, 3, 15) / (1.0 if self._original else temperature)
        values, ids = (logits - logits.logsumexp(0)).topk(count)
        top = [[value, token, None] for value, token in zip(values.tolist(), ids.tolist(), strict=True)]
        return {"output_ids": [14], "meta_info": {"output_top_logprobs": [top]}}
