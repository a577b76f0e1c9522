import copy
import warnings
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from text_updates import batch_of
from tiny_models import EOS, FAMILIES, moved, tiny_model
from tiny_tokenizers import character_tokenizer, tiny_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, LlamaForCausalLM

from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.ppo import PPO
from groupwise.config.algorithm import GRPOCfg, PPOCfg
from groupwise.config.policy import LoRACfg, SamplingCfg
from groupwise.errors import CheckpointError, ConfigError, DataError, SlowPathWarning
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.generation import complete
from groupwise.text.load import with_adapters
from groupwise.text.policy import CausalLM
from groupwise.training.checkpoint import (
    Checkpoint,
    Identity,
    load_checkpoint,
    load_policy,
    serialize,
    write_checkpoint,
)

TEXTS = [([5, 6, 7], [8, EOS, EOS]), ([5, 6, 7], [8, 9]), ([5, 6, 7], [4]), ([11], [12, 13, EOS])]
ROWS = [TextRow(p, c, [0.0] * len(c), 1.0, c[-1] == EOS, int(p == [11])) for p, c in TEXTS]


def make_policy(kind="plain", family="llama", **settings):
    model = tiny_model(family)
    return CausalLM(with_adapters(model, LoRACfg(r=2)) if kind == "adapted" else model, **settings)


def scores_and_gradient(policy, batch, weight):
    policy.zero_grad()
    scores = policy.evaluate(batch)
    ((scores.log_prob + 0.3 * scores.entropy).sum(dim=1) * weight).sum().backward()
    return scores, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_models_own_logits_row_by_row(family):
    model = tiny_model(family)
    policy = CausalLM(model, SamplingCfg(temperature=0.7))
    batch = batch_of(ROWS)
    scores = policy.evaluate(batch)
    for row, (prompt, completion) in enumerate(TEXTS):
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.7
        dist = torch.distributions.Categorical(logits=logits)
        chosen = batch["loss_mask"][row]
        torch.testing.assert_close(scores.log_prob[row][chosen], dist.log_prob(torch.tensor(completion)))
        torch.testing.assert_close(scores.entropy[row][chosen], dist.entropy())
    assert (scores.log_prob[~batch["loss_mask"]] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", ["order", "alone"])
def test_neither_order_nor_shared_prefixes_change_the_gradient(family, change):
    policy, weight = CausalLM(tiny_model(family)), torch.tensor([1.0, -2.0, 0.5, 3.0])
    _, expected = scores_and_gradient(policy, batch_of(ROWS), weight)
    order = [2, 3, 0, 1] if change == "order" else [0, 1, 2, 3]
    rows = [ROWS[i] for i in order]
    if change == "alone":  # every row a group of its own: nothing is shared
        rows = [row._replace(group=number) for number, row in enumerate(rows)]
    _, gradient = scores_and_gradient(policy, batch_of(rows), weight[order])
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_members_read_their_prompt_once_in_every_family_and_precision(family, autocast):
    policy, read = CausalLM(tiny_model(family), autocast=autocast), []
    assert policy.shares_prefixes
    batch = batch_of([TextRow(list(range(4, 24)), [30 + i, 31], [0.0, 0.0], 1.0, False, 0) for i in range(4)])
    policy.network.get_input_embeddings().register_forward_hook(lambda layer, args, out: read.append(args[0].numel()))
    policy.evaluate(batch)
    # 20 tokens of the prompt once, and of each row its completion but for the last token, which nothing follows
    assert read == [20, 4]


def test_ends_of_texts_and_the_context_are_those_of_the_model_and_its_tokenizer():
    assert CausalLM(tiny_model()).eos_ids == (EOS,)
    assert CausalLM(tiny_model(), eos_ids=[1, 2]).eos_ids == (1, 2)
    for wrong in (-1, 40):
        with pytest.raises(ConfigError, match=f"eos_token_id = {wrong} is no token of the model, which has 40; fix: "):
            CausalLM(tiny_model(), eos_ids=[1, wrong])
    model = tiny_model()
    model.generation_config.eos_token_id = [EOS, 5]
    assert CausalLM(model).eos_ids == (EOS, 5)
    model.generation_config.eos_token_id = 5
    assert CausalLM(model, tokenizer=character_tokenizer("abc")).eos_ids == (5, EOS)
    assert CausalLM(model).context_length == 2048
    assert CausalLM(tiny_model("gpt2")).context_length == 1024  # GPT-2 calls it n_positions


def test_models_that_cannot_be_trained_are_refused():
    scaled, biased, flat = (tiny_model() for _ in range(3))
    scaled.lm_head.register_forward_hook(lambda module, args, output: output / 2)
    biased.lm_head = nn.Linear(32, 40)
    biased.lm_head.bias.data.zero_()  # no difference yet; but it would be trained, and never looked at
    flat.model.layers = nn.ModuleList()
    with warnings.catch_warnings(action="ignore"):
        adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
        prompted = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    bart = AutoConfig.for_model("bart", vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, **heads)
    gemma = AutoConfig.for_model(
        "gemma2", vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8
    )
    many = character_tokenizer("".join(map(chr, range(48, 87))))
    t5 = AutoConfig.for_model("t5", vocab_size=40, d_model=16, d_ff=16, num_layers=1, num_heads=2)
    for model, settings, message in [
        (scaled, {}, "not its hidden states times its output embeddings"),
        (
            AutoModelForCausalLM.from_config(gemma),
            {},
            "has final_logit_softcapping=30",
        ),  # of which small logits show nothing
        (biased, {}, r"output embeddings of LlamaForCausalLM are \['weight', 'bias'\]"),
        (adapted, {}, "lora_A"),
        (prompted, {}, "type PROMPT_TUNING are tokens before the prompt"),
        (AutoModelForSeq2SeqLM.from_config(bart), {}, "BartForConditionalGeneration is no causal language model"),
        (AutoModelForSeq2SeqLM.from_config(t5), {}, "T5ForConditionalGeneration is no causal language model"),
        (tiny_model(), {"tokenizer": many}, "has 43 tokens, and .* 40"),
        (flat, {"gradient_checkpointing": True}, "LlamaForCausalLM has no layers for gradient checkpointing"),
    ]:
        with pytest.raises(ConfigError, match=message):
            CausalLM(model, **settings)
    with pytest.raises(TypeError, match="actor_only=False"):
        CausalLM(tiny_model()).values(text_rollout(ROWS))


@pytest.mark.parametrize("kind", ["plain", "adapted"])
def test_a_clone_shares_nothing_and_scores_alike(kind):
    policy = make_policy(kind, "smollm", actor_only=False, autocast=torch.bfloat16, gradient_checkpointing=True)
    before = policy.evaluate(batch_of(ROWS)).log_prob
    clone = copy.deepcopy(policy)
    assert not {t.data_ptr() for t in policy.parameters()} & {t.data_ptr() for t in clone.parameters()}
    assert not torch.equal(moved(policy).evaluate(batch_of(ROWS)).log_prob, before)
    scores = clone.evaluate(batch_of(ROWS))
    assert torch.equal(scores.log_prob, before)
    scores.log_prob.sum().backward()  # layers that are computed again are the copy's
    assert all(p.grad is None for p in policy.parameters())
    assert clone.network.lm_head.weight is clone.network.model.embed_tokens.weight
    assert list(clone.state_dict()) == list(policy.state_dict())


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (lambda: CausalLM(tiny_model("smollm")), 20),
        (lambda: make_policy("adapted"), 28),
        (lambda: make_policy("plain", "smollm", actor_only=False), 22),
    ],
    ids=["tied", "adapted", "value"],
)
def test_what_is_trained_is_saved_once(make, number):
    # llama's two layers have 9 weights each, embeddings and norm 2, a head that is not tied 1; adapters: 2 layers x 7 x 2
    policy = make()
    saved = {t.data_ptr() for t in policy.state_dict().values()}
    assert len(policy.state_dict()) == len(saved) == number
    assert saved == {p.data_ptr() for p in policy.parameters() if p.requires_grad}
    assert len(CausalLM(tiny_model().requires_grad_(False)).state_dict()) == 21  # of a model that nobody trains


@pytest.mark.parametrize("kind", ["plain", "adapted"])
def test_a_checkpoint_brings_everything_back(kind, tmp_path):
    policy, again = (make_policy(kind, "smollm", actor_only=False) for _ in range(2))
    moved(policy, 0.1)
    expected = policy.evaluate(batch_of(ROWS))
    algorithm, renewed = (GRPO(GRPOCfg(kl_coef=0.1), one) for one in (policy, again))
    identity = Identity("text", "tokens", "tokens")
    saved = Checkpoint(policy.state_dict(), {"algorithm": algorithm.state_dict()})
    write_checkpoint(tmp_path / "latest", serialize(saved), identity)
    checkpoint = load_checkpoint(tmp_path / "latest", identity)
    load_policy(again, checkpoint.policy, tmp_path)
    assert torch.equal(again.evaluate(batch_of(ROWS)).log_prob, expected.log_prob)
    assert torch.equal(again.evaluate(batch_of(ROWS)).value, expected.value)
    if kind == "plain":
        renewed.load_state_dict(checkpoint.state["algorithm"])
        assert torch.equal(renewed.reference.evaluate(batch_of(ROWS)).log_prob, expected.log_prob)
    del checkpoint.policy["value_head.bias"]
    with pytest.raises(CheckpointError, match=r"value_head\.bias"):
        load_policy(again, checkpoint.policy, tmp_path)
    with pytest.raises(RuntimeError, match=r"value_head\.bias"):
        again.load_state_dict(checkpoint.policy)


@pytest.mark.parametrize("family", ["gpt2", "smollm"])
def test_saved_folders_are_transformers_and_pefts(family, tmp_path):
    batch, tokens = batch_of(ROWS), torch.tensor([[5, 6, 7]])
    for kind in ("plain", "adapted"):
        policy = make_policy(kind, family, tokenizer=character_tokenizer("abc"))
        moved(policy, 0.1)
        with torch.no_grad():
            expected = policy.network(input_ids=tokens).logits
        policy.save_pretrained(tmp_path / kind)
        if kind == "plain":
            model = AutoModelForCausalLM.from_pretrained(tmp_path / kind)
        else:
            with warnings.catch_warnings(action="ignore"):
                model = PeftModel.from_pretrained(tiny_model(family), tmp_path / kind)
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=0, atol=0)
        torch.testing.assert_close(CausalLM(model).evaluate(batch).log_prob, policy.evaluate(batch).log_prob)
        assert AutoTokenizer.from_pretrained(tmp_path / kind).decode([4, 5, 6]) == "abc"


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
@pytest.mark.parametrize("kind", ["plain", "adapted"])
def test_layers_computed_again_give_the_same_gradient_with_fewer_saved_tensors(family, kind):
    results = []
    for again in (False, True):
        policy, kept = moved(make_policy(kind, family, gradient_checkpointing=again), 0.1), []
        assert policy.shares_prefixes
        keep = partial(lambda kept, tensor: kept.append(tensor.numel()) or tensor, kept)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            scores, gradient = scores_and_gradient(policy, batch_of(ROWS), torch.tensor([1.0, -2.0, 0.5, 3.0]))
        results.append((scores.log_prob, gradient, sum(kept)))
    plain, thrifty = results
    torch.testing.assert_close(thrifty[0], plain[0], rtol=0, atol=0)
    torch.testing.assert_close(thrifty[1], plain[1], rtol=1e-5, atol=1e-6)
    assert thrifty[2] < 0.5 * plain[2]


def test_products_in_bfloat16_are_the_same_in_training_and_sampling():
    policy, exact = CausalLM(tiny_model(), autocast=torch.bfloat16), CausalLM(tiny_model())
    ((written,),) = complete(policy, [[5, 6, 7]], torch.tensor([[0]]), SamplingCfg(max_new_tokens=1))
    batch = batch_of([TextRow([5, 6, 7], written.tokens, written.log_probs, 1.0, False, 0)])
    trained, other = (one.evaluate(batch).log_prob[0, 2] for one in (policy, exact))
    torch.testing.assert_close(trained, torch.tensor(written.log_probs[0]), rtol=1e-6, atol=0)
    assert 0 < (trained - other).abs() < 0.02
    assert all(p.dtype == torch.float32 for p in policy.parameters())


class Broken(LlamaForCausalLM):
    """Does not look at what lies in a cache."""

    def __init__(self, config):
        super().__init__(config)
        self.model.register_forward_pre_hook(self._forget, with_kwargs=True)

    @staticmethod
    def _forget(module, args, kwargs):
        past = 0 if kwargs.get("cache") is None else kwargs["cache"].get_seq_length()
        if past:
            kwargs["attention_mask"] = kwargs["attention_mask"].clone()
            kwargs["attention_mask"][:, :past] = 0
        return args, kwargs


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_prefixes_are_shared_only_if_that_changes_nothing(autocast):
    model = Broken(tiny_model().config)
    with torch.no_grad():  # logits as far apart as a trained model's
        model.lm_head.weight.mul_(30)
        model.model.layers[0].self_attn.o_proj.weight.mul_(30)
    policy, batch = CausalLM(model, autocast=autocast), batch_of(ROWS)
    alone = batch_of([row._replace(group=number) for number, row in enumerate(ROWS)])
    with pytest.warns(SlowPathWarning, match=r"Broken encodes each group's prompt once per completion .* differ by \d"):
        scores = policy.evaluate(batch)
    assert torch.equal(scores.log_prob, policy.evaluate(alone).log_prob)
    policy.evaluate(batch)  # warns once


def test_prefixes_are_not_shared_where_the_cache_forgets():
    sliding = {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0, "layer_types": None}
    config = tiny_model("qwen2").config
    policy = CausalLM(AutoModelForCausalLM.from_config(type(config)(**config.to_dict() | sliding)))
    with pytest.warns(SlowPathWarning, match="its cache has a DynamicSlidingWindowLayer, not the keys and values"):
        policy.evaluate(batch_of(ROWS))


@pytest.mark.parametrize("kind", ["plain", "adapted"])
def test_values_are_those_of_the_text_up_to_each_token(kind):
    policy, rollout = make_policy(kind, actor_only=False), text_rollout(ROWS)
    assert (policy.values(rollout) == 0).all()
    values, head = moved(policy, 0.1).values(rollout), policy.value_head
    for row, (prompt, completion) in enumerate(TEXTS):
        text = prompt + completion
        with torch.no_grad():
            hidden = policy.network.base_model(input_ids=torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(values[row, : len(text)], hidden @ head.weight[0] + head.bias, rtol=1e-4, atol=1e-5)
        assert values[row].count_nonzero() == len(text)
    batch = batch_of(ROWS)
    expected = values[:, :-1] * batch["loss_mask"]
    torch.testing.assert_close(policy.evaluate(batch).value, expected, rtol=1e-4, atol=1e-5)


def test_ppo_trains_policy_and_critic_on_texts():
    policy = make_policy("adapted", actor_only=False)
    cfg = PPOCfg(learning_rate=0.02, gae_lambda=1.0, gamma=1.0, minibatch_size=100, normalize_advantage="none")
    ppo, losses, rows = PPO(cfg, policy), [], [row._replace(terminated=True) for row in ROWS]
    for _ in range(5):
        rollout = text_rollout(rows)
        rollout["value"] = policy.values(rollout)
        rollout["next_value"] = rollout["value"].roll(-1, dims=1)
        with torch.no_grad():
            rollout["sample_log_prob"][:, :-1] = policy.evaluate(batch_of(rows)).log_prob
        losses.append(float(ppo.update(rollout)["train/value_loss"]))
    # without discount, every token is worth the 1 that its text gets in the end, and was worth 0 at first
    assert losses[-1] < 0.1 * losses[0]
    values = rollout["value"][:, :-1][batch_of(rows)["loss_mask"]]
    torch.testing.assert_close(values, torch.ones(9), rtol=0, atol=0.4)


def test_acting_is_the_next_token_of_each_context():
    policy = CausalLM(tiny_model(), SamplingCfg(temperature=0.5), actor_only=False)
    contexts = [[5, 6, 7], [9], [5, 6, 7]]
    with torch.no_grad():
        logits = [policy.network(input_ids=torch.tensor([context])).logits[0, -1] for context in contexts]
    expected = (torch.stack(logits) / 0.5).log_softmax(dim=-1)
    drawn = [policy.act(contexts, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert drawn[0].action.equal(drawn[1].action)
    assert not drawn[0].action.equal(drawn[2].action)
    for action in (*drawn, policy.act(contexts, deterministic=True)):
        chosen = expected.gather(1, action.action[:, None])[:, 0]
        torch.testing.assert_close(action.log_prob, chosen, atol=1e-5, rtol=0)
    best = policy.act(torch.tensor([[5, 6, 7]]), deterministic=True)
    assert best.action.tolist() == [int(expected[0].argmax())]
    assert best.value.tolist() == [0.0]  # the value head begins at 0
    assert CausalLM(tiny_model()).act(contexts).value is None
    policy, context = CausalLM(tiny_model(), SamplingCfg(max_new_tokens=6), eos_ids=()), [5, 6]
    for _ in range(6):  # step by step it writes what generation writes
        context.append(int(policy.act([context], deterministic=True).action))
    assert complete(policy, [[5, 6]], torch.tensor([[0]]), deterministic=True)[0][0].tokens == context[2:]


def test_predicting_completes_texts_messages_and_lists_of_them():
    policy = CausalLM(tiny_model(vocab_size=300), SamplingCfg(max_new_tokens=4), tokenizer=tiny_tokenizer())
    messages = [{"role": "user", "content": "two"}]
    one, other = policy.predict(messages), policy.predict("one")
    assert isinstance(one, str)
    assert policy.predict("two") == one  # a text is a user's message to a chat model
    assert policy.predict([messages, "one"]) == [one, other]
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append([policy.predict("one", deterministic=False) for _ in range(3)])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3
    with pytest.raises(ConfigError, match=r"the policy has no tokenizer; fix: CausalLM\(model, tokenizer="):
        CausalLM(tiny_model()).predict("one")
    with pytest.raises(DataError, match=r"prompt 1: prompt = 3"):
        policy.predict(["one", 3])


def test_a_policy_takes_settings_of_sampling_by_name():
    assert CausalLM(tiny_model(), {"temperature": 0.7}).sampling == SamplingCfg(temperature=0.7)
    with pytest.raises(ConfigError, match=r"unknown key 'temprature'; did you mean 'temperature'"):
        CausalLM(tiny_model(), {"temprature": 0.7})
