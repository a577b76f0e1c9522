"""Results, models, runs and measurements that the parts of ``make gpu`` share.

A part is a script. It prints a JSON line for each of its cases, and appends it to the file that ``GPU_RESULTS`` names.
"""

import gc
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

DEVICE = os.environ.get("DEV", "cuda")
TINY = os.environ.get("TINY") == "1"
"""Whether sizes are those of a dry run on a CPU."""
CUDA = DEVICE == "cuda"
PART = os.environ.get("GPU_PART") or Path(sys.argv[0]).stem
NO_EVALUATION = {"evaluation": {"interval": 10**12, "episodes": 1}, "logging": {"progress": "none"}}

# --- results ---


@contextmanager
def case(name: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Record what the block puts into the dictionary. ``ok`` is True unless it sets it; an error is recorded, and the part goes on."""
    found, begin = dict(fields), time.perf_counter()
    try:
        yield found
        ok = bool(found.pop("ok", True))
    except Exception as error:
        ok, frames = False, traceback.extract_tb(error.__traceback__)
        found["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        found["notes"] = [note[:300] for note in getattr(error, "__notes__", ())]
        found["where"] = [f"{'/'.join(Path(f.filename).parts[-3:])}:{f.lineno}" for f in frames[-5:]]
        traceback.print_exc()
    line = {"part": PART, "case": name, "ok": ok, "seconds": round(time.perf_counter() - begin, 2)}
    text = json.dumps(line | found, default=str)
    print(text, flush=True)
    if path := os.environ.get("GPU_RESULTS"):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, text.encode() + b"\n")  # one call, so that parts side by side do not mix their lines
        os.close(handle)


def chosen(cases: Sequence[str]) -> list[str]:
    """The cases that the command line names, or all of them."""
    return [name for name in cases if name in sys.argv[1:]] if len(sys.argv) > 1 else [*cases]


# --- the device ---


def wait() -> None:
    """Wait until the device has computed everything."""
    if CUDA:
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Free what nobody holds, and begin a new peak of memory."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Peak of tensors on the GPU since ``reset_peak``; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if CUDA else 0


def gib(size: float) -> float:
    return round(size / 2**30, 3)


# --- differences ---


def weights(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of parameters and buffers on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in policy.state_dict().items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of two numbers at the same place; 0: equal to the last bit."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a if a[name].numel())


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of ``b``."""
    difference = sum(float((a[name] - b[name]).square().sum()) for name in b)
    return (difference / sum(float(b[name].square().sum()) for name in b)) ** 0.5


# --- control ---

STEPWISE = {"group_key": "group_step", "returns": "return_to_go", "scale": "batch_std"}
"""Credit of groups whose members need not end, as training on many environments in torch has it."""


def control_cfg(kind: str, num_steps: int, minibatch_size: int | None, **settings: Any) -> Any:
    """PPO or GRPO for environments in torch."""
    import groupwise as gw

    shared = {"num_steps": num_steps, "minibatch_size": minibatch_size} | settings
    if kind == "ppo":
        return gw.PPOCfg(**shared)
    return gw.GRPOCfg(group_size=8, credit=STEPWISE, collection={"partial_groups": "truncate"}, **shared)


def control_parts(cfg: Any, num_envs: int, env: Any = None, *, device: str = DEVICE, speed: str = "off") -> Any:
    """The parts of a run on CartPole in torch, or on another environment."""
    from groupwise.config.base import GIVEN
    from groupwise.config.run import EnvCfg, RunCfg
    from groupwise.engines import Engine
    from groupwise.envs.torch_env import TorchCartPole
    from groupwise.training.build import UserObjects, build_components

    where = EnvCfg(id=env if isinstance(env, str) else GIVEN, num_envs=num_envs)
    run = RunCfg(algorithm=cfg, env=where, device=device, seed=1, speed=speed, total_iterations=100)
    given = UserObjects() if isinstance(env, str) else UserObjects(env=env or TorchCartPole)
    return build_components(run, given, Engine())


def collect(parts: Any) -> Any:
    """One rollout."""
    rollout = parts.collector.collect(parts.cfg.algorithm.num_steps, rollout=parts.buffer.start_rollout())
    parts.buffer.add(rollout)
    return parts.buffer.get()


# --- language models ---


def language_config() -> Any:
    """The sizes of a Qwen2 of 0.4 billion parameters."""
    from transformers import Qwen2Config

    heads = {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    sizes = {"vocab_size": 65536, "hidden_size": 896, "intermediate_size": 4864, **heads}
    if TINY:
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, **heads}
    ends = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
    return Qwen2Config(**sizes, **ends, max_position_embeddings=4096, tie_word_embeddings=True)


def language_model(dtype: torch.dtype = torch.bfloat16) -> Any:
    """That model with random weights, on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(language_config(), dtype=dtype)


def word_tokenizer(size: int) -> Any:
    """A tokenizer of ``size`` words."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    words = [*names.values(), *(f"t{i}" for i in range(size - len(names)))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in names.values()])
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **names, padding_side="left", clean_up_tokenization_spaces=False
    )


def prompt_texts(count: int, length: int, size: int) -> list[str]:
    """Prompts of ``length`` words each."""
    generator = random.Random(0)
    return [" ".join(f"t{generator.randrange(size - 4)}" for _ in range(length)) for _ in range(count)]


def text_parts(policy: Any, cfg: Any, prompts: list[str], reward: Any, num_prompts: int, speed: str) -> Any:
    """The parts of a run of the policy on these prompts."""
    import groupwise as gw
    from groupwise.engines import Engine
    from groupwise.run import read_settings
    from groupwise.text.build import build_text_components

    task = gw.TextTask([{"prompt": prompt} for prompt in prompts], reward=reward, chat="never")
    settings = {"num_prompts": num_prompts, "device": DEVICE, "speed": speed, "total_iterations": 1000}
    run, given = read_settings(task, cfg, policy, None, {}, settings)
    return build_text_components(run, given, Engine())
