import pytest
import torch
from tiny_models import EOS, FAMILIES, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.data.rollout import transition_view
from groupwise.data.tokens import TextRow, text_rollout
from groupwise.errors import ConfigError
from groupwise.policies.causal_lm import CausalLM
from groupwise.policies.configs import SamplingCfg

TEXTS = [([5, 6, 7], [8, EOS, EOS]), ([5, 6, 7], [8, 9]), ([5, 6, 7], [4]), ([11], [12, 13, EOS])]
ROWS = [TextRow(p, c, [0.0] * len(c), 1.0, c[-1] == EOS, int(p == [11])) for p, c in TEXTS]


def batch_of(rows, padding="right"):
    return dict(transition_view(text_rollout(rows, padding=padding)).items())


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
@pytest.mark.parametrize("change", ["padding", "order", "alone"])
def test_neither_padding_nor_order_nor_shared_prefixes_change_the_gradient(family, change):
    policy = CausalLM(tiny_model(family))
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0])
    _, expected = scores_and_gradient(policy, batch_of(ROWS), weight)
    order = [2, 3, 0, 1] if change == "order" else [0, 1, 2, 3]
    rows = [ROWS[i] for i in order]
    if change == "alone":  # every row a group of its own: nothing is shared
        rows = [row._replace(group=number) for number, row in enumerate(rows)]
    batch = batch_of(rows, padding="left" if change == "padding" else "right")
    _, gradient = scores_and_gradient(policy, batch, weight[torch.tensor(order)])
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_siblings_read_their_prompt_once():
    policy = CausalLM(tiny_model())
    prompt = list(range(4, 24))
    batch = batch_of([TextRow(prompt, [30 + i, 31], [0.0, 0.0], 1.0, False, 0) for i in range(4)])
    policy.evaluate(batch)  # the first time, prefixes are compared with rows on their own
    read = []
    policy.network.get_input_embeddings().register_forward_hook(lambda layer, args, out: read.append(args[0].numel()))
    policy.evaluate(batch)
    # 20 tokens of the prompt once, and of each row its completion but for the last token, which nothing follows
    assert read == [20, 4]


def test_dropout_of_the_model_is_off():
    model = LlamaForCausalLM(LlamaConfig(**{**tiny_model().config.to_dict(), "attention_dropout": 0.5})).train()
    policy = CausalLM(model)
    first, second = (policy.evaluate(batch_of(ROWS)).log_prob for _ in range(2))
    assert torch.equal(first, second)


def test_tokens_that_end_a_text_are_the_models_own_or_given():
    assert CausalLM(tiny_model()).eos_ids == (EOS,)
    assert CausalLM(tiny_model(), eos_ids=[1, 2]).eos_ids == (1, 2)
    model = tiny_model()
    model.generation_config.eos_token_id = [EOS, 5]
    assert CausalLM(model).eos_ids == (EOS, 5)


def test_logits_that_are_no_plain_product_are_refused():
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda module, args, output: output / 2)
    with pytest.raises(ConfigError, match="not its hidden states times its output embeddings: they differ by"):
        CausalLM(model)


def test_a_clone_shares_nothing_and_a_reference_is_frozen():
    policy = CausalLM(tiny_model("smollm"))
    before = policy.evaluate(batch_of(ROWS)).log_prob
    copy, reference = policy.clone(), policy.make_reference()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    assert torch.equal(copy.evaluate(batch_of(ROWS)).log_prob, before)
    assert torch.equal(reference.evaluate(batch_of(ROWS)).log_prob, before)
    assert not any(p.requires_grad for p in reference.parameters())
    assert copy.model.lm_head.weight is copy.model.model.embed_tokens.weight


def test_acting_and_predicting_say_what_to_use():
    policy = CausalLM(tiny_model())
    for call in (policy.act, policy.predict):
        with pytest.raises(TypeError, match=r"decoding\.complete"):
            call(torch.zeros(1, dtype=torch.long))
