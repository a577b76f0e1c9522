"""What TRL 1.16's own GRPOTrainer makes of fixed tokens and rewards: advantages, loss and gradient, for parity tests.

TRL samples nothing here (a ``rollout_func`` hands it the tokens) and does the rest itself: masks, group statistics,
log-probabilities under the old and the reference policy. Between its scoring and its loss the weights are replaced, so
that ratios are not 1. Weights are stored as bfloat16, without loss; everything is computed in float32.

    python -m venv .venv-text
    .venv-text/bin/pip install -c constraints.txt -e '.[text]' -r benchmarks/requirements_text.txt
    .venv-text/bin/python benchmarks/trl_record.py         # writes tests/text/trl_parity.json and .safetensors
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import save
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, EOS, PAD, GROUP, MAX_LENGTH = 40, 3, 0, 4, 9
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 2,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
SEQUENCE = {"importance_sampling_level": "sequence"}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "batch_scale": {"loss_type": "dapo", "scale_rewards": "batch"},
    "gspo": {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4} | SEQUENCE,
    "gspo_wide": {"loss_type": "grpo"} | SEQUENCE,  # the narrow clip leaves few gradients to compare
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "cispo_tight": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "epsilon": 2e-3, "epsilon_high": 2.5e-3} | SEQUENCE,
    "vespo": {"loss_type": "vespo"},
    "two_sided": {"loss_type": "dapo", "delta": 1.3},
    "off_policy_mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
    "top_entropy": {"loss_type": "dapo", "epsilon_high": 0.28, "top_entropy_quantile": 0.2},
    "entropy_bonus": {"loss_type": "dapo", "entropy_coef": 0.1},
    "temperature": {"loss_type": "grpo", "temperature": 0.7},
}
KL: dict[str, dict[str, Any]] = {
    "none": {"beta": 0.0},
    "plain": {"beta": 0.5, "use_bias_correction_kl": False},
    "corrected": {"beta": 0.5, "use_bias_correction_kl": True},  # TRL's default
}
SEQUENCE_LEVEL = [case for case, settings in CASES.items() if settings.items() >= SEQUENCE.items()]
"""Here TRL weights each token's KL by its whole sequence's ratio, which is biased; groupwise by the token's own."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<unk>": 1, "<bos>": 2, "<eos>": EOS} | {f"t{i}": i for i in range(4, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def batch(generator: torch.Generator) -> dict[str, list[Any]]:
    """Three prompts of unlike lengths, four completions each, some truncated; the last group's rewards are equal."""

    def tokens(count: int) -> list[int]:
        return torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()

    prompts = [tokens(length) for length in (3, 6, 1)]
    lengths = [4, 9, 1, 7, 9, 2, 5, 9, 3, 6, 9, 8]
    completions = [tokens(n) if n == MAX_LENGTH else [*tokens(n - 1), EOS] for n in lengths]
    return {
        "prompts": [prompt for prompt in prompts for _ in range(GROUP)],
        "completions": completions,
        "rewards": [1.0, 0.0, 0.0, 1.0, 0.25, -0.5, 2.0, 0.7, 0.5, 0.5, 0.5, 0.5],
    }


def weights(scale: float, start: dict[str, Tensor] | None, generator: torch.Generator) -> dict[str, Tensor]:
    """Random weights, around ``start`` if given, that bfloat16 holds exactly."""
    if start is None:
        state = LlamaForCausalLM(LlamaConfig(**MODEL)).state_dict()
        start = {name: torch.ones_like(t) if t.dim() == 1 else torch.zeros_like(t) for name, t in state.items()}
    return {
        name: (value + scale * torch.randn(value.shape, generator=generator)).bfloat16().float()
        for name, value in start.items()
    }


def trainer_of(settings: dict[str, Any], folder: Path, data: dict[str, list[Any]], log_probs: list[Any]) -> Any:
    """TRL's trainer, which is handed the tokens and rewards of ``data``."""
    args = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=len(data["prompts"]),
        num_generations=GROUP,
        num_iterations=2,  # makes it keep the log-probabilities of the policy that it found
        max_completion_length=MAX_LENGTH,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        **settings,
    )

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": data["prompts"], "completion_ids": data["completions"], "logprobs": log_probs}

    def reward(**_: Any) -> list[float | None]:
        return data["rewards"]

    return trl.GRPOTrainer(
        model=str(folder),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["t4"] * len(data["prompts"])}),
        processing_class=tokenizer(),
        rollout_func=rollout,
    )


def measure(settings: dict[str, Any], sets: dict[str, dict[str, Tensor]], data: dict[str, list[Any]]) -> dict[str, Any]:
    """Advantages, loss, and what is needed to compare gradients."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = LlamaForCausalLM(LlamaConfig(**MODEL))
        model.load_state_dict(sets["old"])
        model.save_pretrained(folder)
        trainer = trainer_of(settings, folder, data, [[0.0] * len(c) for c in data["completions"]])
        if trainer.ref_model is not None:
            trainer.ref_model.load_state_dict(sets["reference"])
        trainer.model.train()
        inputs = trainer._generate_and_score_completions([{"prompt": "t4"}] * len(data["prompts"]))
        inputs.pop("sampling_per_token_logps")  # zeros: the sampler is the old policy
        trainer.model.load_state_dict(sets["policy"])
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        gradient = {name: p.grad for name, p in trainer.model.named_parameters()}
    mask = [len(c) for c in data["completions"]]
    return {
        "advantages": inputs["advantages"].tolist(),
        "loss": loss.item(),
        "grad_norm": torch.stack([g.norm() for g in gradient.values()]).norm().item(),
        # along the way from the policy to the reference: tells the gradient's direction, too
        "slope": sum(float((g * (sets["reference"][n] - sets["policy"][n])).sum()) for n, g in gradient.items()),
        "old_log_probs": [row[:n].tolist() for row, n in zip(inputs["old_per_token_logps"], mask, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "tests" / "text")
    parser.add_argument("--smallest", action="store_true", help="the first case alone")
    args = parser.parse_args()
    out, cases = args.out, list(CASES.items())[: 1 if args.smallest else None]
    generator = torch.Generator().manual_seed(0)
    old = weights(0.3, None, generator)
    sets = {"old": old, "policy": weights(0.02, old, generator), "reference": weights(0.06, old, generator)}
    data = batch(generator)
    records = []
    for (case, settings), (kl, more), masked in itertools.product(cases, KL.items(), (False, True)):
        if (kl == "corrected" and case in SEQUENCE_LEVEL) or (masked and (kl == "corrected" or case == "temperature")):
            continue
        found = measure(settings | more | {"mask_truncated_completions": masked}, sets, data)
        log_probs = found.pop("old_log_probs")
        if case == "temperature":
            found["old_log_probs"] = log_probs
        elif not masked:  # of rows that are masked, TRL writes zeros
            data["old_log_probs"] = log_probs
        records.append({"case": case, "kl": kl, "mask_truncated": masked, "settings": settings | more} | found)
    rewards = [None if number == 1 else reward for number, reward in enumerate(data["rewards"])]
    unscored = measure(CASES["grpo"] | KL["none"], sets, data | {"rewards": rewards})
    result = {
        "made_by": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "model": MODEL,
        "batch": data | {"group_size": GROUP, "eos": EOS, "max_length": MAX_LENGTH},
        "unscored": {"rewards": rewards, "advantages": unscored["advantages"]},
        "records": records,
    }
    lines = ",\n".join(f"  {json.dumps(key)}: {_lines(value)}" for key, value in result.items())
    (out / "trl_parity.json").write_text("{\n" + lines + "\n}\n")
    stored = {f"{name}.{key}": t.bfloat16() for name in ("policy", "reference") for key, t in sets[name].items()}
    (out / "trl_parity.safetensors").write_bytes(save(stored))
    print(f"{len(records)} records in {out}")


def _lines(value: Any) -> str:
    """JSON with one line for each entry of a list of records."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in value) + "\n  ]"
    return json.dumps(value)


if __name__ == "__main__":
    main()
