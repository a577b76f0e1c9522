"""One update from one rollout: on the CPU and on the GPU, whole and in micro-batches, once more, and with tf32.

Sizes of changes are relative to that of the whole update on the CPU.
"""

from typing import Any

import torch
from shared import CUDA, DEVICE, TINY, case, chosen, collect, control_cfg, control_parts, relative_difference

import groupwise as gw
from groupwise.config.policy import LoRACfg, SamplingCfg
from groupwise.envs.torch_env import TorchCartPole
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.generation import complete
from groupwise.text.load import with_adapters
from groupwise.text.policy import CausalLM

SGD = {"optimizer": {"name": "sgd"}, "max_grad_norm": None}
ENVS, STEPS = (64, 32) if not TINY else (16, 32)
NEW = 48 if not TINY else 6
FAMILIES = ("Qwen2", "Llama", "Qwen3", "GPT2") if not TINY else ("Qwen2",)
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"lora": True},
    "gradient checkpointing": {"checkpointing": True},
    "critic": {"algorithm": "ppo"},
    "kl": {"kl_coef": 0.1},
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": torch.bfloat16},
}
if TINY:
    VARIANTS = {name: VARIANTS[name] for name in ("critic", "bfloat16")}
LIMITS = {"control": (1e-5, 1e-5), "float32": (1e-4, 1e-4), "coarse": (0.1, 0.1)}
"""Of the CPU against the GPU, and of micro-batches against the whole. bfloat16 rounds to 0.004 in each operation."""

Change = dict[str, torch.Tensor]


def change(policy: torch.nn.Module, before: Change) -> Change:
    return {name: p.detach().cpu().double() - before[name] for name, p in policy.named_parameters()}


def parameters(policy: torch.nn.Module) -> Change:
    return {name: p.detach().cpu().double().clone() for name, p in policy.named_parameters()}


def with_tf32(on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


# --- control ---


def control(kind: str, env: Any, device: str, rollout: Any = None, **settings: Any) -> tuple[Any, Change]:
    """A rollout, or the given one, and the change of the parameters in an update on it."""
    cfg = control_cfg(kind, STEPS, None, num_epochs=1, learning_rate=0.1, **SGD, **settings)
    parts = control_parts(cfg, ENVS, env, device=device)
    rollout = collect(parts).clone() if rollout is None else rollout
    before = parameters(parts.policy)
    parts.algorithm.update(rollout.clone().to(device))
    return rollout, change(parts.policy, before)


def compare_control(found: dict[str, Any], kind: str, env: Any) -> None:
    rollout, cpu = control(kind, env, "cpu")
    _, whole = control(kind, env, DEVICE, rollout)
    _, parts = control(kind, env, DEVICE, rollout, micro_batch_size=ENVS * STEPS // 5)
    _, again = control(kind, env, DEVICE, rollout)
    found |= {"device": relative_difference(whole, cpu), "micro_batches": relative_difference(parts, whole)}
    found["again"] = relative_difference(again, whole)
    device, micro = LIMITS["control"]
    found["ok"] = found["device"] < device and found["micro_batches"] < micro and found["again"] == 0


# --- texts ---


def model_of(family: str, dtype: torch.dtype) -> Any:
    """A random model, whose outputs differ enough from one token to the next."""
    import transformers

    torch.manual_seed(0)
    ends = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
    width, layers = (256, 4) if not TINY else (32, 2)
    if family == "GPT2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": 8}
    else:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, **heads}
        sizes |= {"head_dim": width // 8} if family == "Qwen3" else {}
    config = getattr(transformers, f"{family}Config")(vocab_size=1000, **sizes, **ends)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)


def text(
    family: str,
    device: str,
    rows: list[TextRow] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    lora: bool = False,
    checkpointing: bool = False,
    algorithm: str = "grpo",
    **settings: Any,
) -> tuple[list[TextRow], Change, float]:
    """Rows that the policy writes, or the given ones, the change in an update on them, and the KL to the sampler."""
    model = model_of(family, dtype)
    if lora:
        torch.manual_seed(5)
        model = with_adapters(model, LoRACfg(r=4))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    sampling = SamplingCfg(max_new_tokens=NEW)
    policy = CausalLM(
        model.to(device),
        sampling,
        actor_only=algorithm == "grpo",
        autocast=autocast,
        gradient_checkpointing=checkpointing,
    )
    prompts = [[5, 6, 7, *range(20, 40)], [9, 11], [*range(100, 160)]]
    if rows is None:
        groups = complete(policy, prompts, torch.arange(24).view(3, 8))
        rows = [
            TextRow(prompts[number], c.tokens, c.log_probs, float(sum(c.tokens) % 5), c.stop == "eos", number)
            for number, group in enumerate(groups)
            for c in group
        ]
    shared = SGD | {"num_epochs": 1, "minibatch_size": None, "learning_rate": 0.1}
    shared |= {"objective": {"old_log_prob": "recomputed"}} | settings
    trained = gw.PPO(gw.PPOCfg(**shared), policy) if algorithm == "ppo" else gw.GRPO(gw.GRPOCfg(**shared), policy)
    rollout = text_rollout(rows).to(device)
    if algorithm == "ppo":
        rollout["value"] = torch.zeros_like(rollout["reward"])
        rollout["next_value"] = torch.zeros_like(rollout["reward"])
    before = parameters(policy)
    metrics = trained.update(rollout)
    return rows, change(policy, before), metrics["rollout/sampler_kl"]


def compare_text(found: dict[str, Any], family: str, **variant: Any) -> None:
    rows, whole, found["sampler_kl"] = text(family, DEVICE, **variant)
    _, cpu, _ = text(family, "cpu", rows, **variant)
    _, parts, _ = text(family, DEVICE, rows, micro_batch_size=3 * NEW, **variant)
    _, again, _ = text(family, DEVICE, rows, **variant)
    found |= {"device": relative_difference(whole, cpu), "micro_batches": relative_difference(parts, whole)}
    found["again"] = relative_difference(again, whole)
    kind = "coarse" if {"dtype", "autocast"} & variant.keys() else "float32"
    device, micro = LIMITS[kind]
    mismatch = 1e-5 if kind == "float32" else 0.01
    close = found["device"] < device and found["micro_batches"] < micro and found["sampler_kl"] < mismatch
    # the gradient of memory-efficient attention is added up in any order; with deterministic algorithms it is 0
    found["ok"] = close and found["again"] < micro
    if CUDA and kind == "float32" and not variant:
        with_tf32(True)
        _, tf32, _ = text(family, DEVICE, rows)
        with_tf32(False)
        found["tf32"] = relative_difference(tf32, cpu)


def main() -> None:
    torch.set_num_threads(1 if TINY else 4)
    with_tf32(False)
    for name in chosen(["control", "text", "variants"]):
        if name == "control":
            for kind in ("ppo", "grpo"):
                with case(f"{kind}, CartPole") as found:
                    compare_control(found, kind, TorchCartPole)
        elif name == "text":
            for family in FAMILIES:
                with case(f"text, {family}") as found:
                    compare_text(found, family)
        else:
            for variant, settings in VARIANTS.items():
                with case(f"text, {variant}") as found:
                    compare_text(found, "Qwen2", **settings)


if __name__ == "__main__":
    main()
