from pathlib import Path

import pytest
import torch
from forked import run_script
from planned import BODY, HEAD, planned, save_config, settings
from tiny_models import tiny_model
from transformers.cache_utils import DynamicCache

from groupwise.algorithms.grpo import GRPO
from groupwise.config.policy import LoRACfg, ModelCfg
from groupwise.functional.vocabulary import CHUNK_ELEMENTS
from groupwise.planning.memory import cache_bytes
from groupwise.planning.sizes import sizes_of
from groupwise.text.generation import complete
from groupwise.text.load import with_adapters
from groupwise.text.policy import CausalLM
from groupwise.text.rollout import TextRow, text_rollout

ALL = 18_080
SUPPORT = Path(__file__).parents[1] / "support"


def kept(cfg, gpus=1):
    return planned(cfg, gpus).memory.kept


def test_what_is_kept_by_hand(llama):
    whole = {"policy": 4 * ALL, "gradients": 4 * ALL, "optimizer state": 8 * ALL}
    assert kept(settings(llama)) == whole
    assert kept(settings(llama), gpus=8) == whole
    assert kept(settings(llama, {"kl_coef": 0.1})) == whole | {"reference": 4 * ALL}
    assert kept(settings(llama, model={"precision": "bfloat16"})) == {name: size / 2 for name, size in whole.items()}


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [("adam", 2), ("adamw", 2), ("sgd", 0), ({"name": "sgd", "momentum": 0.9}, 1), ("rmsprop", 1)],
)
def test_numbers_of_the_optimiser(llama, optimizer, slots):
    assert kept(settings(llama, {"optimizer": optimizer}))["optimizer state"] == slots * 4 * ALL


def test_sharded_ranks_hold_parts_beside_the_policy(llama):
    found = kept(settings(llama, {"kl_coef": 0.1}, engine="fsdp"), gpus=2)  # all first dimensions are even
    part = 4 * ALL / 2
    assert found == {
        "policy": 4 * ALL, "learner": part, "gradients": part, "optimizer state": 2 * part, "reference": part,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lora", "on_gpu"), [(None, ["policy"]), ({"r": 2}, ["policy", "reference"])], ids=["weights", "adapters"]
)
def test_offloaded_parts_are_in_the_memory_of_the_host(llama, lora, on_gpu):
    fields = {"engine": "fsdp", "model": {"lora": lora}}
    divided, offloaded = (
        planned(settings(llama, {"kl_coef": 0.1}, cpu_offload=on, **fields), gpus=2).memory for on in (False, True)
    )
    assert [*offloaded.kept] == on_gpu
    assert offloaded.kept | offloaded.host == divided.kept
    assert offloaded.passing == divided.passing
    assert divided.host == {}
    assert planned(settings(llama, cpu_offload=True, **fields), gpus=1).memory.host == {}


@pytest.mark.parametrize(
    ("algorithm", "lora", "precision"),
    [
        ({"kl_coef": 0.1}, None, "float32"),
        ({"optimizer": {"name": "sgd", "momentum": 0.9}}, None, "bfloat16"),
        ({"kl_coef": 0.1}, {"r": 2}, "bfloat16"),
    ],
)
def test_what_is_kept_is_what_an_algorithm_holds(llama, algorithm, lora, precision):
    """After an update, to the byte."""
    cfg = settings(llama, algorithm, model={"precision": precision, "lora": lora})
    model = tiny_model().to(getattr(torch, precision))
    policy = CausalLM(with_adapters(model, LoRACfg(**lora)) if lora else model, cfg.sampling)
    trained = GRPO(cfg.algorithm, policy)
    completions = complete(policy, [[5, 6]], torch.arange(4).view(1, 4))[0]
    trained.update(
        text_rollout([TextRow([5, 6], c.tokens, c.log_probs, float(n), True, 0) for n, c in enumerate(completions)])
    )
    state = [entry for entries in trained.optimizer.state.values() for entry in entries.values()]
    held = {
        "policy": size(policy.parameters()),
        "gradients": size(parameter.grad for parameter in trained.parameters),
        "optimizer state": size(entry for entry in state if torch.is_tensor(entry) and entry.dim()),
    }
    if trained.reference is not None:
        held["reference"] = size(trained.reference.parameters())
    assert kept(cfg) == held


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.slow
def test_parts_are_what_two_ranks_hold(tmp_path):
    cases = {
        "adam": ("llama", 2),
        "tied": ("smollm", 1),
    }  # families, and numbers that the optimisers keep of each weight
    run_script(SUPPORT / "sharded_runs.py", "updates", tmp_path / "out", *cases, ranks=2)
    held = torch.load(tmp_path / "out.0", weights_only=True)
    for case, (family, slots) in cases.items():
        weights = [*sizes_of(ModelCfg(path=str(save_config(tmp_path / family, family)))).weights]
        assert held[case]["held"] == (1 + slots) * sum(weight.part(2) for weight in weights)


def test_passes_by_hand(llama):
    cfg = settings(llama)  # one micro-batch of 8 rows of 16 tokens
    phases = planned(cfg).memory.passing
    fixed, of_token = sizes_of(cfg.model).activations
    assert phases["update"] == {
        "activations of 128 tokens": fixed + 128 * of_token,
        "logits and gradient of the head": 4 * (3 * CHUNK_ELEMENTS + 2 * 128 * 32 + HEAD),
    }
    assert phases["generation"] == {
        "cache of 8 completions": 8 * 16 * 64 * 4,
        "weights for decoding": 4 * BODY + 4 * HEAD,
    }
    assert set(phases) == {"update", "generation"}
    assert planned(cfg, gpus=2).memory.passing["sum over ranks"] == {"gradients, in one tensor": 4 * ALL}


def test_passes_of_adapters_and_of_parts_by_hand(llama):
    frozen = planned(settings(llama, model={"lora": {"r": 2}})).memory.passing
    assert frozen["generation"]["weights for decoding"] == 4 * HEAD
    assert frozen["update"]["logits and gradient of the head"] == 4 * (3 * CHUNK_ELEMENTS + 2 * 128 * 32)
    # head, embeddings and the last norm; three times a layer with its two norms
    parts = planned(settings(llama, engine="fsdp"), gpus=2).memory.passing["update"]
    assert parts["layers, whole for a pass"] == 4 * (2 * HEAD + 32) + 3 * 4 * (7_680 + 64)


def test_recomputed_layers_keep_their_input_and_one_of_them_all(llama):
    plain, recomputed = (
        planned(settings(llama, model={"gradient_checkpointing": on})).memory.passing["update"] for on in (False, True)
    )
    fixed, of_token = sizes_of(settings(llama).model).activations
    (name, whole), *rest = plain.items()
    assert whole == fixed + 128 * of_token
    assert recomputed == {name: fixed + 128 * of_token / 2 + 2 * 128 * 32 * 4, **dict(rest)}


def test_servers_keep_the_cache_elsewhere(llama):
    assert "generation" not in planned(settings(llama, generation={"name": "server"})).memory.passing


def test_the_peak_is_what_is_kept_and_the_fullest_phase(llama):
    memory = planned(settings(llama)).memory
    assert memory.fullest == "update"  # chunks of logits are large beside so small a model
    assert memory.peak == sum(memory.kept.values()) + sum(memory.passing["update"].values())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_the_cache_is_that_of_transformers(tmp_path, family):
    model = tiny_model(family).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros(3, 7, dtype=torch.long), past_key_values=cache)
    held = sum(size((layer.keys, layer.values)) for layer in cache.layers)
    sizes = sizes_of(ModelCfg(path=str(save_config(tmp_path, family))))
    assert cache_bytes(sizes, 4) * 3 * 7 == held
