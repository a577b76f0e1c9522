import io
import json
import os
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import EOS, FAMILIES, tiny_model
from tiny_tokenizers import character_tokenizer, tiny_tokenizer
from torch import nn
from transformers import BartConfig, LlamaConfig, LlamaForCausalLM

import groupwise as gw
from groupwise.config.policy import LoRACfg, ModelCfg, SamplingCfg
from groupwise.data.rollout import transition_view
from groupwise.errors import ConfigError, MissingExtraError
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.load import find_model, load_causal_lm, with_adapters
from groupwise.text.policy import CausalLM

ROWS = [TextRow([5, 6, 7], [8, 9], [0.0] * 2, 1.0, False, 0), TextRow([5, 6, 7], [4], [0.0], 1.0, False, 0)]
LORA = LoRACfg(r=2)


def batch():
    return dict(transition_view(text_rollout(ROWS)).items())


def move(policy):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model and its tokenizer, one for each family."""
    made = {}

    def folder_of(family="llama"):
        if family not in made:
            made[family] = str(tmp_path_factory.mktemp(family))
            tiny_model(family).save_pretrained(made[family])
            character_tokenizer("0123456789").save_pretrained(made[family])
        return made[family]

    return folder_of


def test_the_decoder_of_a_model_with_an_encoder_is_not_taken_alone(tmp_path):
    BartConfig(vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1).save_pretrained(tmp_path)
    character_tokenizer("0123456789").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"can load \(it is an encoder-decoder model\); fix: .*causal"):
        load_causal_lm(ModelCfg(path=str(tmp_path)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, LORA])
def test_a_folder_becomes_the_policy_with_its_tokenizer(folder, family, lora):
    policy = load_causal_lm(ModelCfg(path=folder(family), lora=lora), SamplingCfg(temperature=0.7))
    model = tiny_model(family).eval()
    tokens = torch.tensor([[5, 6, 7]])
    assert torch.equal(policy.network(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert policy.tokenizer.decode([4, 5, 6]) == "012"
    assert policy.sampling.temperature == 0.7
    assert policy.eos_ids == (EOS,)
    assert policy.has_adapters == (lora is not None)
    assert not policy.training
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in trained) == (lora is not None)
    assert not any("lm_head" in name for name in trained if lora)


@pytest.mark.parametrize(
    ("precision", "weights", "adapters", "products"),
    [
        ("float32", torch.float32, torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.float32, torch.bfloat16),
        ("autocast", torch.float32, torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("lora", [None, LORA])
def test_precision_is_that_of_weights_and_products(folder, precision, weights, adapters, products, lora):
    policy = load_causal_lm(ModelCfg(path=folder(), precision=precision, lora=lora), actor_only=False)
    found = []
    policy.network.model.layers[0].mlp.down_proj.register_forward_hook(lambda layer, args, out: found.append(out.dtype))
    scores = policy.evaluate(batch())
    assert set(found) == {products}
    assert scores.log_prob.dtype == scores.value.dtype == torch.float32
    kinds = {name: p.dtype for name, p in policy.model.named_parameters()}
    assert {kind for name, kind in kinds.items() if "lora_" not in name} == {weights}
    assert {kind for name, kind in kinds.items() if "lora_" in name} == ({adapters} if lora else set())
    exact = load_causal_lm(ModelCfg(path=folder())).evaluate(batch()).log_prob
    torch.testing.assert_close(scores.log_prob, exact, rtol=0, atol=0.03)


def test_settings_reach_the_policy(folder):
    policy = load_causal_lm(ModelCfg(path=folder(), gradient_checkpointing=True))
    calls = []
    policy.network.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    policy.evaluate(batch() | {"group_id": torch.tensor([[0], [1]]).expand(2, 4)}).log_prob.sum().backward()
    assert len(calls) == 2


def test_saved_adapters_are_trained_on(folder, tmp_path):
    policy = load_causal_lm(ModelCfg(path=folder(), lora=LORA))
    move(policy)
    expected = policy.evaluate(batch()).log_prob
    policy.save_pretrained(tmp_path)
    for lora in (None, LORA):
        again = load_causal_lm(ModelCfg(path=str(tmp_path), lora=lora))
        assert torch.equal(again.evaluate(batch()).log_prob, expected)
        assert list(again.state_dict()) == list(policy.state_dict())
        assert torch.equal(again.make_reference().evaluate(batch()).log_prob, expected)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoRACfg(r=4), r"have r=2, alpha=32\.0; got r=4, alpha=32\.0; fix: lora=None"),
        (LoRACfg(r=2, alpha=7.0), r"have r=2, alpha=32\.0; got r=2, alpha=7\.0"),
    ],
)
def test_settings_that_saved_adapters_do_not_have_are_refused(lora, message, folder, tmp_path):
    load_causal_lm(ModelCfg(path=folder(), lora=LoRACfg(r=2))).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_causal_lm(ModelCfg(path=str(tmp_path), lora=lora))


def test_adapters_that_are_no_lora_are_trained_on_as_they_are(folder, tmp_path):
    with warnings.catch_warnings(action="ignore"):
        from peft import IA3Config, get_peft_model

        model = get_peft_model(tiny_model(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    model.peft_config["default"].base_model_name_or_path = folder()
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    assert any("ia3" in name for name in load_causal_lm(ModelCfg(path=str(tmp_path))).state_dict())
    with pytest.raises(ConfigError, match=r"have type IA3; got r=2, .*fix: lora=None"):
        load_causal_lm(ModelCfg(path=str(tmp_path), lora=LORA))


def test_virtual_tokens_before_the_prompt_are_refused():
    with warnings.catch_warnings(action="ignore"):
        from peft import PromptTuningConfig, get_peft_model

        model = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ConfigError, match="type PROMPT_TUNING are tokens before the prompt"):
        CausalLM(model)


def test_adapters_of_another_vocabulary_are_refused(folder, tmp_path):
    policy = load_causal_lm(ModelCfg(path=folder(), lora=LORA))
    policy.tokenizer = tiny_tokenizer()  # 300 tokens, the base has 40
    policy.save_pretrained(tmp_path / "tokens")
    with pytest.raises(ConfigError, match="the tokenizer has 300 tokens, and LlamaForCausalLM only 40"):
        load_causal_lm(ModelCfg(path=str(tmp_path / "tokens")))


def test_adapters_whose_base_has_gone_are_refused(folder, tmp_path):
    load_causal_lm(ModelCfg(path=folder(), lora=LORA)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for base in ("/nowhere/base", None):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(ConfigError, match=rf"names its base {base!r}: no folder"):
            load_causal_lm(ModelCfg(path=str(tmp_path)))


@pytest.mark.parametrize("path", ["", "./none", "/none/at/all", "~/none", "a/b/c"])
def test_a_folder_that_is_not_there_is_refused_without_asking_the_hub(path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ConfigError, match=rf"no folder '{path}'; fix: a folder with config\.json"):
        find_model(path)


def test_a_model_that_the_hub_does_not_give_is_refused_in_one_line(monkeypatch):
    def offline(api, name, timeout):
        raise ConnectionError("cannot reach the hub\nand a long story")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)
    with pytest.raises(
        ConfigError, match=r"^no folder 'some/model', nor such .*\(cannot reach the hub\)[^\n]*$"
    ) as info:
        load_causal_lm(ModelCfg(path="some/model"))
    assert info.value.__suppress_context__
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    assert find_model("some/model") == "some/model"
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: "/cache/config.json")
    assert find_model("some/model") == "some/model"


def test_a_folder_needs_a_tokenizer_and_a_model(folder, tmp_path):
    tiny_model().save_pretrained(tmp_path / "mute")
    with pytest.raises(ConfigError, match=r"mute has no tokenizer that can be read; fix: tokenizer\.save_pretrained"):
        load_causal_lm(ModelCfg(path=str(tmp_path / "mute")))
    character_tokenizer().save_pretrained(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"empty is no language model that transformers can load \([^\n]*\); fix"):
        load_causal_lm(ModelCfg(path=str(tmp_path / "empty")))


def test_targets_that_match_nothing_are_told_what_there_is():
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or 'all-linear'"
    for target in ("c_attn", "lm_head", "embed_tokens", "proj"):
        with pytest.raises(ConfigError, match=f"lora.targets has '{target}', .* some of {known}"):
            with_adapters(tiny_model(), LoRACfg(targets=("q_proj", target)))
    policy = with_adapters(tiny_model(), LoRACfg(targets=("q_proj", "layers.1.mlp.up_proj")))
    names = {
        name.split(".lora_")[0].rpartition("layers.")[2] for name, p in policy.named_parameters() if p.requires_grad
    }
    assert names == {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj"}


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_reach_every_linear_layer_but_the_head(family):
    model = with_adapters(tiny_model(family), LoRACfg(r=2, alpha=3.0))
    reached = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert len(reached) == 2 * (4 if family == "gpt2" else 7)
    assert not any("lm_head" in name for name in reached)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (2, 3.0, 0.0)


def test_a_completion_that_fills_the_context_is_refused(folder):
    with pytest.raises(
        ConfigError, match=r"max_new_tokens=2048 leaves no room .* positions for 2048 tokens; fix: at most 2047"
    ):
        load_causal_lm(ModelCfg(path=folder()), SamplingCfg(max_new_tokens=2048))


@pytest.mark.parametrize(
    ("missing", "settings", "extra"),
    [
        ("transformers", {}, "text"),
        ("peft", {"lora": LORA}, "text"),
        ("bitsandbytes", {"lora": LORA, "quantization": "nf4"}, "quant"),
    ],
)
def test_missing_extras_are_named(folder, monkeypatch, missing, settings, extra):
    monkeypatch.setattr("groupwise.errors.find_spec", lambda module: None if module == missing else True)
    with pytest.raises(MissingExtraError, match=rf"'{missing}' is not installed; fix: pip install -e '\.\[{extra}\]'"):
        load_causal_lm(ModelCfg(path=folder(), **settings))


def test_a_model_made_in_python_is_shown_where_it_goes():
    task = gw.TextTask([{"prompt": "1"}], reward=lambda completions, **columns: [0.0] * len(completions))
    with pytest.raises(
        ConfigError, match=r"model = LlamaForCausalLM\(.* \.\.\.: .*; fix: .*policy=gw\.CausalLM\("
    ) as caught:
        gw.train(task, model=tiny_model())
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_adapters_above_quantised_weights_get_the_gradient_of_those_weights(kind, tmp_path):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    policy = load_causal_lm(ModelCfg(path=str(tmp_path), lora=LORA, quantization=kind))
    move(policy)
    policy.train().eval()
    with torch.no_grad():
        start = policy.evaluate(batch()).log_prob
    scores = policy.evaluate(batch()).log_prob
    assert torch.equal(scores, start)  # whichever way the weights are read
    scores.sum().backward()
    base = policy.network.model.layers[0].self_attn.q_proj.base_layer.weight
    assert base.dtype == {"nf4": torch.uint8, "int8": torch.int8}[kind]
    assert len(policy.state_dict()) == 28

    plain = load_causal_lm(ModelCfg(path=str(tmp_path), lora=LORA))
    dequantise(policy, plain)
    plain.load_state_dict(policy.state_dict())
    expected = plain.evaluate(batch()).log_prob
    expected.sum().backward()
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-3)
    for (name, p), (_, q) in zip(trained(policy), trained(plain), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=0.02 * float(q.grad.abs().max()), msg=name)


def trained(policy):
    return [(name, p) for name, p in policy.named_parameters() if p.requires_grad]


def dequantise(policy, plain):
    """Give a plain policy the weights that the quantised one stands for: what its layers make of the unit vectors."""
    with torch.no_grad(), policy.model.disable_adapter():
        layers = dict(plain.network.named_modules())
        for name, layer in policy.network.named_modules():
            if name.endswith("_proj"):
                weight = layer(torch.eye(layer.in_features)).T
                layers[name].base_layer.weight.copy_(weight)
    assert isinstance(layers["model.layers.0.mlp.up_proj"].base_layer, nn.Linear)


def hostile(source, target, **changes):
    """A copy of a model's folder with other entries in its config.json, and code that must not run."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    (target / "evil.py").write_text(f"open({str(target / 'ran')!r}, 'w')")
    return target


@pytest.mark.parametrize("answer", ["y", ""])
def test_code_of_a_model_never_runs_and_nobody_is_asked(folder, tmp_path, monkeypatch, answer):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    mapped = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tok", None]}
    path = hostile(folder(), tmp_path / "model", auto_map=mapped, model_type="evil")
    with pytest.raises(ConfigError):
        load_causal_lm(ModelCfg(path=str(path)))
    assert not (path / "ran").exists()


def test_a_pickle_of_weights_is_not_read(folder, tmp_path):
    path = hostile(folder(), tmp_path / "model")
    (path / "model.safetensors").unlink()
    torch.save({}, path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="no language model that transformers can load"):
        load_causal_lm(ModelCfg(path=str(path)))


def test_a_pickle_of_adapters_is_not_read(folder, tmp_path):
    path = tmp_path / "adapters"
    load_causal_lm(ModelCfg(path=folder(), lora=LORA)).save_pretrained(path)
    config = json.loads((path / "adapter_config.json").read_text()) | {"base_model_name_or_path": folder()}
    (path / "adapter_config.json").write_text(json.dumps(config))
    load_causal_lm(ModelCfg(path=str(path)))
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors; fix: "):
        load_causal_lm(ModelCfg(path=str(path)))


@pytest.mark.parametrize("family", ["llama", "smollm"])
@pytest.mark.parametrize(
    "change", [lambda weights, name: weights.pop(name), lambda w, name: w.update({name: torch.ones(7)})]
)
def test_missing_weights_are_named_instead_of_drawn_at_random(folder, tmp_path, family, change):
    path, name = hostile(folder(family), tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"
    weights = load_file(path / "model.safetensors")
    change(weights, name)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"lack 1 of the model's, or have them in other shapes: {name}; fix: "):
        load_causal_lm(ModelCfg(path=str(path)))


def test_missing_adapters_are_named(folder, tmp_path):
    path = tmp_path / "adapters"
    load_causal_lm(ModelCfg(path=folder(), lora=LORA)).save_pretrained(path)
    weights = load_file(path / "adapter_model.safetensors")
    name, _ = weights.popitem()
    save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=rf"are not complete: .*{name.removesuffix('.weight')}.*; fix: save them again"
    ):
        load_causal_lm(ModelCfg(path=str(path)))


@pytest.mark.parametrize("damage", ["fifo", "config", "deep", "weights", "adapters"])
def test_a_damaged_folder_is_one_clear_error(folder, tmp_path, damage):
    path = hostile(folder(), tmp_path / "model")
    if damage == "fifo":
        (path / "config.json").unlink()
        os.mkfifo(path / "config.json")
    elif damage == "adapters":
        (path / "adapter_config.json").write_text("[" * 100_000)
    else:
        name = "model.safetensors" if damage == "weights" else "config.json"
        (path / name).write_bytes(b"[" * 100_000 if damage == "deep" else b"\xff" * 20)
    with pytest.raises(ConfigError):
        load_causal_lm(ModelCfg(path=str(path)))
