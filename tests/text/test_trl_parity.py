"""The same tokens, rewards and settings give TRL's advantages, loss and gradient.

``trl_parity.json`` and ``.safetensors`` were recorded from TRL's own trainer by ``benchmarks/trl_record.py``. The rollout
holds the old policy's log-probabilities; the policy that is updated and the reference have other weights.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from variants import SETTINGS

from groupwise.algorithms.grpo import GRPO
from groupwise.config.algorithm import GRPOCfg
from groupwise.config.policy import SamplingCfg
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.policy import CausalLM

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "trl_parity.json").read_text())
BATCH = RECORDED["batch"]
TOKEN_MEAN = {"aggregation": "token_mean"}
OFF_POLICY_MASK = {"name": "off_policy_mask", "off_policy_mask_threshold": 0.05}
TRL_EPS = {"eps": 1e-4}  # to the deviation; presets that follow verl add less

# our preset, and what differs between it and TRL's settings in the record
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {}),
    "bnpo": ("grpo", {}, TOKEN_MEAN),  # a mean over the tokens of the local batch, which is the whole one here
    "dr_grpo": ("dr_grpo", {}, {"aggregation": {"name": "constant", "max_length": BATCH["max_length"]}}),
    "dapo": ("dapo", TRL_EPS, {}),
    "batch_scale": ("grpo", {"scale": "batch_std"}, TOKEN_MEAN),
    "gspo": ("gspo", TRL_EPS, {}),
    "gspo_wide": ("gspo", TRL_EPS, {"trust_region": "clip"}),
    "cispo": ("cispo", {}, {}),
    "cispo_tight": ("cispo", {}, {"trust_region": {"name": "cispo", "high": 1.1}}),
    "sapo": ("sapo", {}, {}),
    "luspo": ("luspo", {}, {}),
    "vespo": ("vespo", {}, {}),
    "two_sided": ("intellect2", {}, {"trust_region": {"name": "two_sided", "delta": 1.3}}),
    "off_policy_mask": ("grpo", {}, {"importance_sampling_correction": OFF_POLICY_MASK}),
    "top_entropy": ("high_entropy", TRL_EPS, {}),
    "entropy_bonus": ("grpo", {}, TOKEN_MEAN),
    "temperature": ("grpo", {}, {}),
}


PER_EPISODE = ("seq_mean_token_mean", "seq_mean_token_sum", "constant")


class Watched(GRPO):
    """Keeps what it minimised."""

    def loss(self, batch, evaluation):
        out = super().loss(batch, evaluation)
        self.minimised = (batch["weight"] * out.loss).sum().item()
        self.seen = batch
        return out


@functools.cache
def weights_of(name):
    stored = load_file(HERE / "trl_parity.safetensors")
    return {key.removeprefix(f"{name}."): t.float() for key, t in stored.items() if key.startswith(name)}


def policy_of(name, temperature=1.0):
    model = LlamaForCausalLM(LlamaConfig(**RECORDED["model"]))
    model.load_state_dict(weights_of(name))
    return CausalLM(model, SamplingCfg(temperature=temperature))


def rollout(record, rewards):
    ended = [tokens[-1] == BATCH["eos"] for tokens in BATCH["completions"]]
    old_log_probs = record.get("old_log_probs", BATCH["old_log_probs"])
    rows = zip(BATCH["prompts"], BATCH["completions"], old_log_probs, rewards, ended, strict=True)
    return text_rollout(
        [
            TextRow(*row, number // BATCH["group_size"], trained=row[-1] or not record["mask_truncated"])
            for number, row in enumerate(rows)
        ]
    )


def updated(record, rewards=BATCH["rewards"]):
    """Our algorithm after the one update that TRL's record describes, and the metrics of it."""
    preset, credit, objective = CASES[record["case"]]
    settings = SETTINGS[preset]
    cfg = GRPOCfg(
        **settings
        | {"credit": settings["credit"] | credit, "objective": settings["objective"] | objective}
        | {"kl_estimator": "k3_unbiased" if record["kl"] == "corrected" else "k3"},
        group_size=BATCH["group_size"],
        num_epochs=1,
        minibatch_size=10_000,
        kl_coef=record["settings"]["beta"],
        ent_coef=record["settings"].get("entropy_coef", 0.0),
        optimizer={"name": "sgd"},
        learning_rate=1.0,  # the weights then move by the gradient
        max_grad_norm=None,
    )
    algorithm = Watched(cfg, policy_of("policy", record["settings"].get("temperature", 1.0)))
    if algorithm.reference is not None:
        algorithm.reference.model.load_state_dict(weights_of("reference"))
    return algorithm, algorithm.update(rollout(record, rewards))


def advantages(algorithm):
    """Advantage of each episode that is trained on, by its place in the rollout."""
    where = algorithm.seen["loss_mask"].long().argmax(dim=1, keepdim=True)
    numbers = algorithm.seen["episode_id"].gather(1, where)[:, 0].tolist()
    return dict(zip(numbers, algorithm.seen["advantage"].gather(1, where)[:, 0].tolist(), strict=True))


def slope(algorithm):
    """Derivative of the loss along the way from the policy to the reference."""
    after, policy, reference = algorithm.policy.model.state_dict(), weights_of("policy"), weights_of("reference")
    return sum(float(((policy[k] - after[k]) * (reference[k] - policy[k])).sum()) for k in policy)


def identify(record):
    return f"{record['case']}, KL {record['kl']}{', cut ones masked' if record['mask_truncated'] else ''}"


@pytest.mark.parametrize("record", [pytest.param(record, id=identify(record)) for record in RECORDED["records"]])
def test_advantages_loss_and_gradient_are_those_of_trl(record):
    algorithm, metrics = updated(record)
    ours = advantages(algorithm)
    # masked episodes do not count here; TRL takes them into its mean over episodes, as zeros
    counted = len(ours) / len(BATCH["rewards"]) if algorithm.cfg.objective.aggregation.name in PER_EPISODE else 1.0
    assert ours == pytest.approx({number: record["advantages"][number] for number in ours}, abs=1e-5)
    assert algorithm.minimised * counted == pytest.approx(record["loss"], abs=1e-5)
    assert metrics["train/grad_norm"] * counted == pytest.approx(record["grad_norm"], rel=1e-5)
    assert slope(algorithm) * counted == pytest.approx(record["slope"], rel=2e-5, abs=1e-5 * record["grad_norm"])


def test_the_record_says_something():
    grpo = RECORDED["records"][0]
    _, metrics = updated(grpo)
    assert 0.3 < metrics["train/clip_fraction"] < 0.7  # the old policy is another
    assert sum(map(abs, grpo["advantages"][: 2 * BATCH["group_size"]])) > 5
    assert grpo["advantages"][2 * BATCH["group_size"] :] == [0.0] * BATCH["group_size"]  # rewards are equal there
    assert 0 < sum(tokens[-1] != BATCH["eos"] for tokens in BATCH["completions"]) < len(BATCH["completions"])
    assert {record["case"] for record in RECORDED["records"]} == set(CASES)


def test_members_of_one_that_nobody_could_score_are_compared_as_in_trl():
    unscored = RECORDED["unscored"]
    ours = advantages(updated(RECORDED["records"][0], unscored["rewards"])[0])
    expected = {n: a for n, a in enumerate(unscored["advantages"]) if unscored["rewards"][n] is not None}
    assert ours == pytest.approx(expected, abs=1e-5)
