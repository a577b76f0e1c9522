import functools
import io
import json
import logging
import os
import shutil
import sys
import time
import warnings
from types import ModuleType

import huggingface_hub
import peft
import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from text_updates import batch_of
from tiny_models import EOS, FAMILIES, moved, tiny_model
from tiny_tokenizers import character_tokenizer, tiny_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, BartConfig, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import groupwise as gw
from groupwise.config.policy import LoRACfg, ModelCfg, SamplingCfg
from groupwise.errors import ConfigError, MissingExtraError
from groupwise.text.collector import TextRow
from groupwise.text.load import find_model, load_causal_lm, with_adapters
from groupwise.text.policy import CausalLM

ROWS = [TextRow([5, 6, 7], [8, 9], [0.0] * 2, 1.0, False, 0), TextRow([5, 6, 7], [4], [0.0], 1.0, False, 0)]
LORA = LoRACfg(r=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes, or finds, the folder of a model of a family and its tokenizer, or of adapters above it."""

    @functools.cache
    def folder_of(family="llama", lora=None):
        path = tmp_path_factory.mktemp(family)
        if lora is not None:
            load_causal_lm(ModelCfg(path=str(folder_of(family)), lora=lora)).save_pretrained(path)
        else:
            tiny_model(family).save_pretrained(path)
            character_tokenizer("0123456789").save_pretrained(path)
        return path

    return folder_of


def load(path, sampling=None, actor_only=True, **settings):
    return load_causal_lm(ModelCfg(path=str(path), **settings), sampling or SamplingCfg(), actor_only=actor_only)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, LORA])
def test_a_folder_becomes_the_policy_with_its_tokenizer(folder, family, lora):
    policy = load(folder(family), SamplingCfg(temperature=0.7), lora=lora)
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
    if lora is not None:  # on every linear layer of two, but not on the head
        assert len(trained) == 2 * 2 * (4 if family == "gpt2" else 7)
        assert not any("lm_head" in name for name in trained)
        adapters = policy.model.peft_config["default"]
        assert (adapters.r, adapters.lora_alpha, adapters.lora_dropout) == (2, 32.0, 0.0)


@pytest.mark.parametrize(
    ("precision", "weights", "products"),
    [
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("autocast", torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("lora", [None, LORA])
def test_precision_is_that_of_weights_and_products_and_layers_are_computed_again(
    folder, precision, weights, products, lora
):
    policy = load(folder(), actor_only=False, precision=precision, lora=lora, gradient_checkpointing=True)
    found = []
    policy.network.model.layers[0].mlp.down_proj.register_forward_hook(lambda layer, args, out: found.append(out.dtype))
    scores = policy.evaluate(batch_of(ROWS))
    assert set(found) == {products}
    again = []
    policy.network.model.layers[0].mlp.register_forward_pre_hook(lambda *_: again.append(1))
    scores.log_prob.sum().backward()
    assert again
    assert scores.log_prob.dtype == scores.value.dtype == torch.float32
    kinds = {name: p.dtype for name, p in policy.model.named_parameters()}
    assert {kind for name, kind in kinds.items() if "lora_" not in name} == {weights}
    assert {kind for name, kind in kinds.items() if "lora_" in name} == ({torch.float32} if lora else set())
    exact = load(folder()).evaluate(batch_of(ROWS)).log_prob
    torch.testing.assert_close(scores.log_prob, exact, rtol=0, atol=0.03)


@pytest.mark.parametrize("own", [LORA, LoRACfg(r=2, rslora=True, dora=True, init="gaussian")], ids=["lora", "dora"])
def test_saved_adapters_are_trained_on(folder, tmp_path, own):
    policy = moved(load(folder(), lora=own), 0.1)
    expected = policy.evaluate(batch_of(ROWS)).log_prob
    policy.save_pretrained(tmp_path)
    for lora in (None, own):
        again = load(tmp_path, lora=lora)
        assert torch.equal(again.evaluate(batch_of(ROWS)).log_prob, expected)
        assert list(again.state_dict()) == list(policy.state_dict())
        assert torch.equal(again.make_reference().evaluate(batch_of(ROWS)).log_prob, expected)
    for lora in (LoRACfg(r=4), LoRACfg(r=2, alpha=7.0), LoRACfg(r=2, rslora=not own.rslora)):
        with pytest.raises(ConfigError, match=rf"have r=2, alpha=32\.0, .*; got r={lora.r}, alpha={lora.alpha}, rs"):
            load(tmp_path, lora=lora)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 32}))  # as peft's users write it
    assert torch.equal(load(tmp_path, lora=own).evaluate(batch_of(ROWS)).log_prob, expected)
    policy.tokenizer = tiny_tokenizer()
    policy.save_pretrained(tmp_path / "tokens")
    with pytest.raises(ConfigError, match="the tokenizer has 300 tokens, and LlamaForCausalLM only 40"):
        load(tmp_path / "tokens")


def test_adapters_that_are_no_lora_are_trained_on_as_they_are(folder, tmp_path):
    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(tiny_model(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    model.peft_config["default"].base_model_name_or_path = str(folder())
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    assert any("ia3" in name for name in load(tmp_path).state_dict())
    with pytest.raises(ConfigError, match=r"have type=IA3; got r=2"):
        load(tmp_path, lora=LORA)


def test_adapters_whose_base_has_gone_are_refused(folder, tmp_path):
    for base in ("/nowhere/base", None):
        path = hostile(folder(lora=LORA), tmp_path / str(base is None), base_model_name_or_path=base)
        with pytest.raises(ConfigError, match=rf"names its base {base!r}: no folder"):
            load(path)


def test_a_model_that_is_no_folder_and_that_the_hub_does_not_give_is_refused_in_one_line(monkeypatch):
    def offline(api, name, timeout):
        raise ConnectionError("cannot reach the hub\nand a long story")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("asked"))
    for path in ("", "./none", "/none/at/all", "~/none", "a/b/c"):
        with pytest.raises(ConfigError, match=rf"no folder '{path}'; fix: a folder with config\.json"):
            find_model(path)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)
    with pytest.raises(ConfigError, match=r"^no folder 'some/model', .*\(cannot reach the hub\)[^\n]*$") as info:
        load("some/model")
    assert info.value.__suppress_context__


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Puts a model into the cache of a hub that is not asked, and returns its folder there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("asked"))
    download = functools.partial(huggingface_hub.hf_hub_download, local_files_only=True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)

    def put(name, source, **changes):
        root = tmp_path / "hub" / f"models--some--{name}"
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text("a" * 40)
        return hostile(source, root / "snapshots" / ("a" * 40), **changes)

    return put


def test_a_model_of_the_hub_may_not_ask_for_more_than_a_folder(folder, hub, tmp_path):
    for name, changes, message in (
        ("kernel", {"attn_implementation": "a/kernel"}, "= 'a/kernel' would run a kernel of the hub"),
        ("large", {"num_hidden_layers": 10**6}, r"num_hidden_layers = 1,000,000, but there are \d+ tensors"),
    ):
        hub(name, folder(), **changes)
        with pytest.raises(ConfigError, match=message):
            load(f"some/{name}")
        path = hostile(folder(lora=LORA), tmp_path / name, base_model_name_or_path=f"some/{name}")
        with pytest.raises(ConfigError, match=rf"names its base 'some/{name}': .*{message}"):
            load(path)
    hub("adapters", folder(lora=LORA))
    with pytest.raises(ConfigError, match=r"'some/adapters' on the hub has adapters; fix: hf download some/adapters"):
        load("some/adapters")
    path = hostile(folder(lora=LORA), tmp_path / "above", base_model_name_or_path=str(folder(lora=LORA)))
    with pytest.raises(ConfigError, match=r"names its base .*, which has adapters itself; fix: merge"):
        load(path)
    cached = hub("plain", folder())
    assert find_model("some/plain") == "some/plain"
    weights = dict.fromkeys(load_file(cached / "model.safetensors"), "model-2.safetensors")  # which is still to come
    (cached / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert find_model("some/plain") == "some/plain"


def test_a_package_that_a_model_needs_and_is_absent_is_one_clear_error(folder, tmp_path):
    with pytest.raises(
        ConfigError, match=r"is no language model that transformers can load \(.*FlashAttention2.*; fix: "
    ):
        load(hostile(folder(), tmp_path / "model", attn_implementation="flash_attention_2"))


def test_a_folder_needs_a_tokenizer_and_a_causal_model_with_room(folder, tmp_path):
    tiny_model().save_pretrained(tmp_path / "mute")
    BartConfig(vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1).save_pretrained(tmp_path / "bart")
    for name in ("empty", "bart"):
        character_tokenizer("0123456789").save_pretrained(tmp_path / name)
    pickled = hostile(folder(), tmp_path / "pickle")
    (pickled / "model.safetensors").unlink()
    torch.save({}, pickled / "pytorch_model.bin")
    for name, message in {
        "mute": r"mute has no tokenizer that can be read \(.*\); fix: tokenizer\.save_pretrained",
        "empty": r"empty is no language model that transformers can load \([^\n]*\); fix",
        "bart": r"can load \(it is an encoder-decoder model\); fix: .*causal",
        "pickle": "no language model that transformers can load",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / name)
    with pytest.raises(ConfigError, match=r"max_new_tokens=2048 leaves no room .*; fix: at most 2047"):
        load(folder(), SamplingCfg(max_new_tokens=2048))


def test_targets_that_match_nothing_are_told_what_there_is():
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or 'all-linear'"
    for target in ("c_attn", "lm_head", "embed_tokens", "proj"):
        with pytest.raises(ConfigError, match=f"lora.targets: no linear layer ends in '{target}'; fix: {known}"):
            with_adapters(tiny_model(), LoRACfg(targets=("q_proj", target)))
    policy = with_adapters(tiny_model(), LoRACfg(targets=("q_proj", "layers.1.mlp.up_proj")))
    names = {name.split(".lora_")[0] for name, p in policy.named_parameters() if p.requires_grad}
    reached = {name.rpartition("layers.")[2] for name in names}
    assert reached == {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj"}


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
        load(folder(), **settings)


def test_a_model_made_in_python_is_shown_where_it_goes():
    task = gw.TextTask([{"prompt": "1"}], reward=len)
    with pytest.raises(ConfigError, match=r"model = LlamaForCausalLM\(.* \.\.\.: .*policy=gw\.CausalLM\(") as caught:
        gw.train(task, model=tiny_model())
    assert len(str(caught.value)) < 400


def test_weights_that_a_folder_keeps_quantised_need_adapters(tmp_path):
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).save_pretrained(tmp_path / "plain")
    quantised = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=quantised).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    task = gw.TextTask(["1"], reward=lambda completions, **_: [0.0] * len(completions))
    with pytest.raises(ConfigError, match=r"weights are quantised, .*fix: adapters, as lora=\{'r': 16\}"):
        gw.train(task, "grpo", model=tmp_path, num_prompts=1, total_iterations=1, run_dir=tmp_path / "run")
    assert load(tmp_path, lora=LORA).has_adapters


def test_weights_that_are_not_finite_are_named(folder, tmp_path):
    shutil.copytree(folder(), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][1] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"weights of .* are not finite: model\.norm\.weight; fix: "):
        load(tmp_path)


@pytest.mark.parametrize(("kind", "dtype"), [("nf4", torch.uint8), ("int8", torch.int8)])
def test_adapters_above_quantised_weights_get_the_gradient_of_those_weights(kind, dtype, tmp_path):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    policy = moved(load(tmp_path, lora=LORA, quantization=kind), 0.1)
    policy.train().eval()
    with torch.no_grad():
        start = policy.evaluate(batch_of(ROWS)).log_prob
    scores = policy.evaluate(batch_of(ROWS)).log_prob
    assert torch.equal(scores, start)  # whichever way the weights are read
    scores.sum().backward()
    assert policy.network.model.layers[0].self_attn.q_proj.base_layer.weight.dtype == dtype
    assert len(policy.state_dict()) == 28

    plain = load(tmp_path, lora=LORA)
    layers = dict(plain.network.named_modules())
    with torch.no_grad(), policy.model.disable_adapter():  # what the layers make of the unit vectors are their weights
        for name, layer in policy.network.named_modules():
            if name.endswith("_proj"):
                layers[name].base_layer.weight.copy_(layer(torch.eye(layer.in_features)).T)
    assert isinstance(layers["model.layers.0.mlp.up_proj"].base_layer, nn.Linear)
    plain.load_state_dict(policy.state_dict())
    expected = plain.evaluate(batch_of(ROWS)).log_prob
    expected.sum().backward()
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-3)
    gradients = [{n: p.grad for n, p in one.named_parameters() if p.requires_grad} for one in (policy, plain)]
    assert gradients[0].keys() == gradients[1].keys()
    for name, wanted in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


def hostile(source, target, **changes):
    """A copy of a model's or adapters' folder with other entries in its settings, and code that must not run."""
    shutil.copytree(source, target)
    (settings,) = (path for path in target.glob("*config.json") if path.name in ("config.json", "adapter_config.json"))
    settings.write_text(json.dumps(json.loads(settings.read_text()) | changes))
    (target / "evil.py").write_text(f"open({str(target / 'ran')!r}, 'w')")
    return target


@pytest.mark.parametrize("answer", ["y", ""])
def test_code_of_a_model_never_runs_and_nobody_is_asked(folder, tmp_path, monkeypatch, answer):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    mapped = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tok", None]}
    path = hostile(folder(), tmp_path / "model", auto_map=mapped, model_type="evil")
    with pytest.raises(ConfigError):
        load(path)
    assert not (path / "ran").exists()


def test_adapters_that_are_a_pickle_or_not_complete_or_finite_are_not_read(folder, tmp_path):
    path = hostile(folder(lora=LORA), tmp_path / "adapters", base_model_name_or_path=str(folder()))
    load(path)
    weights = load_file(path / "adapter_model.safetensors")
    name = list(weights)[-1]
    broken = weights | {name: torch.full_like(weights[name], torch.nan)}
    save_file(broken, path / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=rf"weights of {path} or of its base .* are not finite: .*{name.removesuffix('.weight')}"
    ):
        load(path)
    del weights[name]
    save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"are not complete: .*{name.removesuffix('.weight')}"):
        load(path)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors; fix: "):
        load(path)


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
        load(path)


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
        load(path)


HUGE = [
    ("llama", {"num_hidden_layers": 10**7}),
    ("llama", {"vocab_size": 10**12}),
    ("llama", {"vocab_size": 10**7}),
    ("llama", {"intermediate_size": 10**9}),
    ("llama", {"hidden_size": 10**6, "head_dim": None}),
    ("llama", {"num_attention_heads": 10**9, "head_dim": 8}),
    ("gpt2", {"n_layer": 10**7}),
    ("gpt2", {"n_positions": 10**9}),
]


@pytest.mark.parametrize(("family", "changes"), HUGE, ids=str)
def test_sizes_that_the_weights_do_not_have_are_refused_before_anything_is_built(folder, tmp_path, family, changes):
    path = hostile(folder(family), tmp_path / "model", **changes)
    name = next(iter(changes))
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=rf"config.json: {name} = [\d,]+, but there are \d+ tensors .*; fix: "):
        load(path)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("changes", [{"num_attention_heads": 0}, {"hidden_size": -1}, {"head_dim": -8}], ids=str)
def test_settings_that_make_no_sense_are_one_clear_error(folder, tmp_path, changes):
    with pytest.raises(ConfigError):
        load(hostile(folder(), tmp_path / "model", **changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_implementation", "a/kernel"),
        ("_attn_implementation", "a/kernel@main:forward"),
        ("_attn_implementation_internal", "a/kernel"),
        ("experts_implementation", "a/kernel"),
        ("attn_implementation", {"text_config": "a/kernel"}),
    ],
)
def test_kernels_of_the_hub_are_no_choice_of_a_model(folder, tmp_path, name, value):
    with pytest.raises(ConfigError, match=rf"{name}.* = 'a/kernel.*' would run a kernel of the hub; fix: remove it"):
        load(hostile(folder(), tmp_path / "model", **{name: value}))
    load(hostile(folder(), tmp_path / "plain", attn_implementation="eager"))


@pytest.mark.parametrize("name", ["../mine.safetensors", "/etc/passwd", "no.safetensors", "evil/x.safetensors", 3])
def test_an_index_of_weights_names_files_of_its_folder(folder, tmp_path, name):
    path = hostile(folder(), tmp_path / "model")
    shutil.move(path / "model.safetensors", path / "part.safetensors")
    weights = dict.fromkeys(load_file(path / "part.safetensors"), "part.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    load(path)
    index.write_text(json.dumps({"weight_map": weights | {"lm_head.weight": name}}))
    with pytest.raises(ConfigError, match=r"index\.json (names|is damaged).*; fix: "):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "have megatron_config = .*; fix: adapters without it"),
        (
            {"peft_type": "XLORA", "adapters": {"0": "/other"}},
            "have peft_type = 'XLORA', .* no other folder; fix: LORA",
        ),
        (
            {"peft_type": "PROMPT_TUNING"},
            "have peft_type = 'PROMPT_TUNING', expected one that changes layers .*; fix: ",
        ),
        ({"peft_type": ["LORA"]}, r"have peft_type = \['LORA'\], .*; fix: LORA"),
        ({"r": "many"}, "cannot be loaded .* expected adapter_config.json .*; fix: save them again"),
        ({"r": 2_000_000_000}, "rank 2,000,000,000, but no tensor has such a size; fix: the one that belongs"),
        ({"rank_pattern": {"q_proj": 10**9}}, "rank 1,000,000,000, but no tensor has such a size"),
        ({"target_modules": "(.*.*)*q_projX"}, "a pattern of layers: it takes more than 0.5 s of CPU time; fix: names"),
        ({"alpha_pattern": {"(.*.*)*q_projX": 2}}, "a pattern of layers: it takes more than 0.5 s"),
        ({"target_modules": "("}, "a pattern of layers: .*; fix: names of layers"),
    ],
    ids=str,
)
def test_adapters_are_weights_of_their_folder_alone(folder, tmp_path, monkeypatch, changes, message):
    path = hostile(folder(lora=LORA), tmp_path / "adapters", base_model_name_or_path=str(folder()), **changes)
    if changes.get("r") != "many":  # refused before peft reads anything
        monkeypatch.setattr(peft.PeftConfig, "from_pretrained", None)
    with pytest.raises(ConfigError, match=message):
        load(path)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_other_adapters_that_change_layers_are_trained_and_damaged_ones_are_refused(folder, tmp_path):
    path = tmp_path / "adapters"
    model = AutoModelForCausalLM.from_pretrained(folder())
    get_peft_model(model, peft.LoHaConfig(r=2, target_modules=["q_proj"])).save_pretrained(path)
    assert any("hada" in name for name, part in load(path).named_parameters() if part.requires_grad)
    (path / "adapter_model.safetensors").write_bytes(b"junk" * 20)
    with pytest.raises(ConfigError, match=rf"adapters in {path} cannot be loaded .*; fix: save them again"):
        load(path)


@pytest.mark.parametrize(("algorithm", "cfg"), [(gw.GRPO, gw.GRPOCfg()), (gw.PPO, gw.PPOCfg())])
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_adapters_that_are_frozen_are_refused(folder, algorithm, cfg):
    model = PeftModel.from_pretrained(tiny_model(), folder("llama", LORA))  # for inference
    with pytest.raises(ConfigError, match=r"has requires_grad=True, .*is_trainable=True"):
        algorithm(
            gw.GRPOCfg() if algorithm is gw.GRPO else gw.PPOCfg(), CausalLM(model, actor_only=algorithm is gw.GRPO)
        )


def test_adapters_say_nothing_about_kernels_for_quantised_weights(caplog, monkeypatch):
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")

    class Peft(ModuleType):
        def __getattr__(self, name):  # bitsandbytes logs when peft is imported
            log.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "offline")
            log.warning("another line")
            return getattr(peft, name)

    fake = Peft("peft")
    fake.__spec__ = peft.__spec__
    monkeypatch.setitem(sys.modules, "peft", fake)
    with_adapters(tiny_model(), LORA)
    assert set(caplog.messages) == {"another line"}
    assert log.filters == []


def test_saved_adapters_stay_on_their_layers(folder):
    path = folder("llama", LORA)
    saved = json.loads((path / "adapter_config.json").read_text())["target_modules"]
    assert load(path, lora={"r": 2, "targets": saved}).has_adapters
    with pytest.raises(
        ConfigError, match=r"are on \{.*\}; got lora.targets=\('up_proj',\); fix: lora=None, or the same"
    ):
        load(path, lora={"r": 2, "targets": ["up_proj"]})
