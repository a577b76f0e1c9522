import pytest
import torch
from planned import BODY, HEAD, NORMS, save_config, settings
from tiny_models import FAMILIES, tiny_model
from torch.autograd.graph import saved_tensors_hooks

from groupwise.config.policy import LoRACfg, ModelCfg
from groupwise.errors import ConfigError
from groupwise.planning.sizes import Weight, sizes_of, total_bytes, total_elements
from groupwise.text.load import with_adapters


def test_sizes_by_hand(llama):
    sizes = sizes_of(ModelCfg(path=str(llama)))
    assert (sizes.name, sizes.body, sizes.trained_body, sizes.head) == ("Llama", BODY, BODY, HEAD)
    assert (sizes.trains_head, sizes.width, sizes.attention_width) == (True, 32, 32)
    assert sizes.kv_width == 2 * 2 * 2 * 8  # keys and values, layers, heads, width
    assert total_elements([*sizes.weights]) == BODY + 2 * HEAD + NORMS == 18_080
    assert total_bytes(sizes.weights) == 4 * 18_080


def test_adapters_by_hand(llama):
    # r = 2 for each matrix [out, in] adds 2 * (in + out): 64 + 48 + 48 + 64 in attention, 3 * 80 in the MLP
    sizes = sizes_of(ModelCfg(path=str(llama), precision="bfloat16", lora=LoRACfg(r=2)))
    adapters = 2 * 2 * (64 + 48 + 48 + 64 + 3 * 80)
    assert (sizes.body, sizes.trained_body, sizes.trains_head) == (BODY + adapters, adapters, False)
    assert total_elements(sizes.trained) == adapters
    assert total_bytes(sizes.weights) == 2 * 18_080 + 4 * adapters  # adapters are in float32


@pytest.mark.parametrize(("quantization", "element"), [("int8", 1), ("nf4", 0.5625)])
def test_quantised_weights_are_those_of_linear_layers(llama, quantization, element):
    cfg = {"path": str(llama), "precision": "bfloat16", "lora": LoRACfg(r=2)}
    plain, small = sizes_of(ModelCfg(**cfg)), sizes_of(ModelCfg(**cfg, quantization=quantization))
    assert total_bytes(plain.weights) - total_bytes(small.weights) == pytest.approx((2 - element) * BODY)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(tmp_path, family):
    sizes = sizes_of(ModelCfg(path=str(save_config(tmp_path, family))))
    model = tiny_model(family)
    assert total_elements([*sizes.weights]) == sum(p.numel() for p in model.parameters())
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
    fixed, of_token = sizes_of(
        ModelCfg(path=str(save_config(tmp_path, family)), precision=precision, lora=lora)
    ).activations
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
    assert Weight(shape, 4, True).part(1) == Weight(shape, 4, True).elements


def test_recomputation_is_not_a_size(llama):
    assert sizes_of(ModelCfg(path=str(llama), gradient_checkpointing=True)) is sizes_of(ModelCfg(path=str(llama)))


def test_what_is_not_planned(tmp_path):
    from transformers import MixtralConfig

    MixtralConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="mixture of experts"):
        sizes_of(ModelCfg(path=str(tmp_path)))
    with pytest.raises(ConfigError, match="no folder"):
        sizes_of(settings("./nowhere").model)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapters alone; fix"):
        sizes_of(ModelCfg(path=str(tmp_path)))
