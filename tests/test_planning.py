"""Plans of the tiny Llama of ``tiny_models``, whose numbers fit on paper.

Width 32, MLP 48, 2 layers, 4 heads of 8 with 2 for keys and values, 40 tokens. Weights of a layer: 32 * 32 for queries, 16 *
32 for keys, as many for values, 32 * 32 behind, and 3 * 32 * 48 in the MLP: 7,680. Head and embeddings: 40 * 32 = 1,280
each. Five norms of 32. So 18,080 parameters.
"""

from pathlib import Path

import pytest
import torch
from forked import run_script
from tiny_models import FAMILIES, tiny_model
from torch.autograd.graph import saved_tensors_hooks
from transformers.cache_utils import DynamicCache

from groupwise import config
from groupwise.algorithms.grpo import GRPO
from groupwise.config.policy import LoRACfg, ModelCfg
from groupwise.errors import ConfigError
from groupwise.planning import USABLE, Weight, fixes, plan_run, sizes_of, total_bytes
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.generation import complete
from groupwise.text.load import with_adapters
from groupwise.text.policy import CausalLM

BODY, HEAD, NORMS, ALL = 2 * 7680, 1280, 160, 18_080
HERE = Path(__file__).parent


def save_config(folder, family="llama"):
    with torch.device("meta"):
        tiny_model(family).config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_config(tmp_path_factory.mktemp("llama"))


def settings(folder, algorithm=None, **fields):
    """A run of 2 prompts a rank, each with 4 completions of at most 6 tokens."""
    model = {"path": str(folder)} | fields.pop("model", {})
    sampling = {"max_new_tokens": 6} | fields.pop("sampling", {})
    given = {"num_prompts": 2, "task": {"data": "none.jsonl"}} | fields
    return config.resolve_text({"group_size": 4} | (algorithm or {}), model=model, sampling=sampling, **given)


def planned(cfg, gpus=1, gpu=1e9):
    return plan_run(cfg, gpus, gpu, prompt=10)


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def elements(weights):
    return sum(weight.part(1) for weight in weights)


# Sizes


def test_sizes_by_hand(llama):
    sizes = sizes_of(ModelCfg(path=str(llama)))
    assert (sizes.name, sizes.body, sizes.head) == ("Llama", BODY, HEAD)
    assert (sizes.trains_head, sizes.width) == (True, 32)
    assert sizes.kv_width == 2 * 2 * 2 * 8  # keys and values, layers, heads, width
    assert elements(sizes.weights) == BODY + 2 * HEAD + NORMS == ALL
    assert total_bytes(sizes.weights) == 4 * ALL


def test_adapters_by_hand(llama):
    # r = 2 for each matrix [out, in] adds 2 * (in + out): 64 + 48 + 48 + 64 in attention, 3 * 80 in the MLP
    sizes = sizes_of(ModelCfg(path=str(llama), precision="bfloat16", lora=LoRACfg(r=2)))
    adapters = 2 * 2 * (64 + 48 + 48 + 64 + 3 * 80)
    assert (sizes.body, sizes.trains_head) == (BODY + adapters, False)
    assert elements(sizes.trained) == adapters
    assert total_bytes(sizes.weights) == 2 * ALL + 4 * adapters  # adapters are in float32


@pytest.mark.parametrize(("quantization", "element"), [("int8", 1), ("nf4", 0.5625)])
def test_quantised_weights_are_those_of_linear_layers(llama, quantization, element):
    cfg = {"path": str(llama), "precision": "bfloat16", "lora": LoRACfg(r=2)}
    plain, small = sizes_of(ModelCfg(**cfg)), sizes_of(ModelCfg(**cfg, quantization=quantization))
    assert total_bytes(plain.weights) - total_bytes(small.weights) == pytest.approx((2 - element) * BODY)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(tmp_path, family):
    sizes = sizes_of(ModelCfg(path=str(save_config(tmp_path, family))))
    model = tiny_model(family)
    assert elements(sizes.weights) == sum(p.numel() for p in model.parameters())
    assert sizes.head == model.get_output_embeddings().weight.numel()


@pytest.mark.parametrize(
    ("family", "precision", "lora"),
    [
        ("llama", "float32", None),
        ("llama", "bfloat16", LoRACfg(r=2)),
        ("gpt2", "bfloat16", None),
        ("qwen3", "float32", None),
    ],
)
def test_activations_are_what_autograd_keeps(tmp_path, family, precision, lora):
    """Of a pass over real tensors, up to a tenth: a real pass needs no mask, and repeats no keys for each query's head."""
    cfg = ModelCfg(path=str(save_config(tmp_path, family)), precision=precision, lora=lora)
    fixed, of_token = sizes_of(cfg).activations
    model = tiny_model(family).to(getattr(torch, precision)).eval()
    base = (with_adapters(model, lora).get_base_model() if lora else model).base_model
    own = {tensor.data_ptr() for tensor in (*base.parameters(), *base.buffers())}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        base(input_ids=torch.zeros(3, 40, dtype=torch.long), use_cache=False)
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert real <= fixed + of_token * 120 <= 1.15 * real


def test_autocast_keeps_weights_in_half_precision(llama):
    fixed, _ = sizes_of(ModelCfg(path=str(llama), precision="autocast")).activations
    assert fixed == pytest.approx(2 * BODY, rel=0.1)


@pytest.mark.parametrize(("shape", "part"), [((40, 32), 20 * 32), ((5,), 3), ((1, 7), 7)])
def test_ranks_divide_the_first_dimension(shape, part):
    assert Weight(shape, 4, True).part(2) == part
    assert Weight(shape, 4, True).part(1) == torch.Size(shape).numel()


def test_models_that_are_not_planned(tmp_path):
    from transformers import MambaConfig, MixtralConfig

    kinds = {"mixture of experts": MixtralConfig(), "without attention": MambaConfig(num_hidden_layers=1)}
    for number, (message, refused) in enumerate(kinds.items()):
        refused.save_pretrained(tmp_path / str(number))
        with pytest.raises(ConfigError, match=message):
            sizes_of(ModelCfg(path=str(tmp_path / str(number))))
    with pytest.raises(ConfigError, match="no folder"):
        sizes_of(settings("./nowhere").model)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapters alone"):
        sizes_of(ModelCfg(path=str(adapters)))


def test_adapters_that_peft_refuses_are_one_clear_error(tmp_path):
    """Its layers have attention and a state space beside it, which takes no adapters."""
    from transformers import FalconH1Config

    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
    width = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 40}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    FalconH1Config(**mamba, **width, **heads).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"lora.targets = 'all-linear': .*'out_proj' is incompatible.*; fix: names of"
    ):
        sizes_of(ModelCfg(path=str(tmp_path), lora=LoRACfg(r=4)))
    assert sizes_of(ModelCfg(path=str(tmp_path), lora=LoRACfg(r=4, targets=("q_proj",)))).name == "FalconH1"


# Memory


def test_kept_by_hand(llama):
    whole = {"policy": 4 * ALL, "gradients": 4 * ALL, "optimizer state": 8 * ALL}
    half = {name: size / 2 for name, size in whole.items()}
    assert planned(settings(llama)).kept == whole
    assert planned(settings(llama), gpus=8).kept == whole
    assert planned(settings(llama, {"kl_coef": 0.1})).kept == whole | {"reference": 4 * ALL}
    assert planned(settings(llama, model={"precision": "bfloat16"})).kept == half


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [("adam", 2), ("adamw", 2), ("sgd", 0), ({"name": "sgd", "momentum": 0.9}, 1), ("rmsprop", 1)],
)
def test_numbers_of_the_optimiser(llama, optimizer, slots):
    assert planned(settings(llama, {"optimizer": optimizer})).kept["optimizer state"] == slots * 4 * ALL


def test_sharded_ranks_hold_parts_beside_the_policy(llama):
    cfg, part = settings(llama, {"kl_coef": 0.1}, engine="fsdp"), 4 * ALL / 2  # all first dimensions are even
    parts = {"learner": part, "gradients": part, "optimizer state": 2 * part, "reference": part}
    assert planned(cfg, gpus=2).kept == {"policy": 4 * ALL} | parts


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["weights", "adapters"])
def test_offloaded_parts_are_in_the_memory_of_the_host(llama, lora):
    fields = {"engine": "fsdp", "model": {"lora": lora}}
    divided, offloaded = (
        planned(settings(llama, {"kl_coef": 0.1}, cpu_offload=on, **fields), gpus=2) for on in (False, True)
    )
    assert [*offloaded.kept] == ["policy"]
    assert offloaded.kept | offloaded.host == divided.kept
    assert offloaded.passing == divided.passing
    assert divided.host == {}
    assert planned(settings(llama, cpu_offload=True, **fields)).host == {}


@pytest.mark.parametrize(
    ("algorithm", "lora", "precision"),
    [
        ({"kl_coef": 0.1}, None, "float32"),
        ({"optimizer": {"name": "sgd", "momentum": 0.9}}, None, "bfloat16"),
        ({"kl_coef": 0.1}, {"r": 2}, "bfloat16"),
    ],
)
def test_kept_is_what_an_algorithm_holds(llama, algorithm, lora, precision):
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
        shared = {parameter.data_ptr() for parameter in policy.parameters()}  # the base below adapters
        held["reference"] = size(p for p in trained.reference.parameters() if p.data_ptr() not in shared)
    assert planned(cfg).kept == held


@pytest.mark.slow
def test_parts_are_what_two_ranks_hold(tmp_path):
    # families, and numbers that the optimisers keep of each weight
    cases = {"adam": ("llama", 2), "tied": ("smollm", 1)}
    run_script(HERE / "support" / "sharded_runs.py", "updates", tmp_path / "out", *cases, ranks=2)
    held = torch.load(tmp_path / "out.0", weights_only=True)
    for case, (family, slots) in cases.items():
        weights = sizes_of(ModelCfg(path=str(save_config(tmp_path / family, family)))).weights
        assert held[case]["held"] == (1 + slots) * sum(weight.part(2) for weight in weights)


def test_passes_by_hand(llama):
    cfg = settings(llama)  # one micro-batch of 8 rows of 16 tokens
    fixed, of_token = sizes_of(cfg.model).activations
    assert planned(cfg).passing == {
        "update": {
            "activations of 128 tokens": fixed + 128 * of_token,
            "logits and gradient of the head": 4 * (3 * 128 * HEAD // 32 + 2 * 128 * 32 + HEAD),
        },
        "generation": {"cache of 8 completions": 8 * 16 * 64 * 4, "weights for decoding": 4 * BODY + 4 * HEAD},
    }
    assert planned(cfg, gpus=2).passing["sum over ranks"] == {"gradients, in one tensor": 4 * ALL}
    assert "generation" not in planned(settings(llama, generation={"name": "server"})).passing


@pytest.mark.parametrize(
    ("algorithm", "fields", "tokens"),
    [
        ({"micro_batch_size": 40}, {}, 40),
        ({"micro_batch_size": 5}, {}, 16),  # at least a whole row
        ({"minibatch_size": 24}, {}, 64),  # half of the 48 tokens that are written, so half of the rows
        ({}, {"task": {"data": "none.jsonl", "max_prompt_tokens": 20}}, 8 * 26),
        ({"group_size": 2}, {}, 64),
    ],
)
def test_tokens_of_a_micro_batch(llama, algorithm, fields, tokens):
    assert f"activations of {tokens} tokens" in planned(settings(llama, algorithm, **fields)).passing["update"]


def test_passes_of_adapters_and_of_parts_by_hand(llama):
    frozen = planned(settings(llama, model={"lora": {"r": 2}})).passing
    assert frozen["generation"]["weights for decoding"] == 4 * HEAD
    assert frozen["update"]["logits and gradient of the head"] == 4 * (3 * 128 * HEAD // 32 + 2 * 128 * 32)
    # head, embeddings and the last norm; three times a layer with its two norms
    parts = planned(settings(llama, engine="fsdp"), gpus=2).passing["update"]
    assert parts["layers, whole for a pass"] == 4 * (2 * HEAD + 32) + 3 * 4 * (7_680 + 64)


def test_recomputed_layers_keep_their_input_and_one_of_them_all(llama):
    plain, recomputed = (
        planned(settings(llama, model={"gradient_checkpointing": on})).passing["update"] for on in (False, True)
    )
    fixed, of_token = sizes_of(settings(llama).model).activations
    (name, whole), *rest = plain.items()
    assert whole == fixed + 128 * of_token
    assert recomputed == {name: fixed + 128 * of_token / 2 + 2 * 128 * 32 * 4, **dict(rest)}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_the_cache_is_that_of_transformers(tmp_path, family):
    model = tiny_model(family).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros(3, 7, dtype=torch.long), cache=cache)
    held = sum(size((layer.keys, layer.values)) for layer in cache.layers)
    sizes = sizes_of(ModelCfg(path=str(save_config(tmp_path, family))))
    assert 4 * sizes.kv_width * 3 * 7 == held


# The verdict, and what to change


def roomy(cfg, share, **options):
    """The plan on a GPU with a share of the memory that the run needs."""
    return planned(cfg, gpu=share * planned(cfg, **options).peak / USABLE, **options)


def test_the_peak_is_what_is_kept_and_the_fullest_phase(llama):
    plan = planned(settings(llama))
    assert plan.fullest == "update"  # chunks of logits are large beside so small a model
    assert plan.peak == sum(plan.kept.values()) + sum(plan.passing["update"].values())
    assert roomy(settings(llama), 1.001).fits
    assert not roomy(settings(llama), 0.999).fits


def test_each_fix_fits_and_is_an_option_of_the_command_line(llama):
    from groupwise.cli.options import Parser, parse_options

    cfg = settings(llama, sampling={"max_new_tokens": 900}, num_prompts=640)
    path = llama / "run.json"
    path.write_text(cfg.model_dump_json())
    for gpus in (1, 4):
        plan = roomy(cfg, 0.8, gpus=gpus)
        found = fixes(plan)
        assert found
        for options, peak in found.items():
            assert peak <= plan.room
            changed = parse_options([str(path), *options.split()], Parser())
            assert planned(changed, gpus=gpus).peak == pytest.approx(peak)


@pytest.mark.parametrize("engine", ["fsdp", "ddp"])
def test_parts_may_go_to_the_host(llama, engine):
    model = {"precision": "bfloat16", "gradient_checkpointing": True}
    cfg = settings(llama, {"micro_batch_size": 16}, engine=engine, model=model)
    offloaded = planned(cfg.model_copy(update={"engine": "fsdp", "cpu_offload": True}), gpus=8).peak
    found = fixes(planned(cfg, gpus=8, gpu=1.0001 * offloaded / USABLE))
    assert next(iter(found.items())) == ("--engine fsdp --cpu-offload", offloaded)
    assert sum("--cpu-offload" in option for option in found) == 1


@pytest.mark.parametrize(("lora", "half"), [(None, "autocast"), ({"r": 2}, "bfloat16")])
def test_weights_that_are_trained_stay_in_float32(llama, lora, half):
    cfg = settings(llama, {"micro_batch_size": 4096}, model={"lora": lora})
    peak = planned(cfg.model_copy(update={"model": cfg.model.model_copy(update={"precision": half})})).peak
    options = [option for option in fixes(planned(cfg, gpu=1.0001 * peak / USABLE)) if "precision" in option]
    assert options == [f"--model.precision {half}"]


def test_nothing_helps_where_the_weights_alone_are_too_large(llama):
    assert fixes(planned(settings(llama), gpu=1.0)) == {}
