"""Calls of tools in the forms of chat templates, what models read after them, and log-probabilities over five turns of each."""

import functools
import json

import pytest
import torch
from chat_templates import FAMILIES, family_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

import groupwise as gw
from groupwise.config.run import TextTaskCfg
from groupwise.text.calls import PROBE, Call, CallForm, describe, read_calls
from groupwise.text.task import Example, PromptEncoder
from groupwise.text.tool_env import ToolEnv

PEAR = Call("look_up", {"word": "pear", "times": 2})


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


XML = CallForm("<function=", None, ("<parameter=", ">", "</parameter>"))
NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
KINDS = {"text": {"type": "string"}, "note": NULLABLE, "count": {"type": "integer"}, "other": {}}
SAY = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": KINDS}}}


@pytest.mark.parametrize("text", ["42", "true", "null", '{"a": 1}', '"quoted"', "\n  two\n\nlines\n", ""])
def test_a_text_argument_without_quotes_stays_as_it_is_written(text):
    written = f"<function=say>\n<parameter=text>\n{text}\n</parameter><parameter=note>null</parameter>"
    written += "<parameter=count>\n3\n</parameter><parameter=other>[1]</parameter></function>"
    arguments = {"text": text, "note": None, "count": 3, "other": [1]}
    assert read_calls(XML.canonical(written, [SAY]))[1] == [Call("say", arguments)]


def test_calls_that_would_end_a_server_or_the_run_are_told():
    [found] = read_calls('<tool_call>{"name": "say", "arguments": {"text": "a\\ud800"}}</tool_call>')[1]
    assert isinstance(found, str)
    assert "surrogates" in found
    python = CallForm("<|call|>", python=True)
    [found] = read_calls(python.canonical(f"<|call|>[python(code={'-' * 6_000})]"))[1]
    assert isinstance(found, str)


@functools.cache
def encoder_of(family):
    return PromptEncoder(family_tokenizer(family), TextTaskCfg(tool="calculator"))


def turn_of(encoder, text):
    tokens = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    return encoder.read_turn(tokens, encoder.tokenizer.decode(tokens, skip_special_tokens=True))


def test_a_call_in_the_templates_form_is_read(family):
    encoder = encoder_of(family)
    said = family.call if family.call is not None else f"A pear.{PEAR}"
    for end in ("", family.end):
        text, calls = read_calls(turn_of(encoder, said + end))
        assert calls == [PEAR]
    assert "look_up" not in text
    assert (encoder.call_form is None) == (family.call is None)


@pytest.mark.parametrize("name", [name for name in FAMILIES if (FAMILIES[name].call or "").endswith("</tool_call>")])
def test_text_after_calls_that_have_an_end_stays(name):
    encoder = encoder_of(FAMILIES[name])
    _, _, call = FAMILIES[name].call.rpartition("</think>")
    text, calls = read_calls(turn_of(encoder, f"One.{call}\nTwo.{call}\nThree."))
    assert calls == [PEAR, PEAR]
    assert text.split() == ["One.", "Two.", "Three."]
    text, calls = read_calls(turn_of(encoder, f"One.{call}I write </tool_call> here."))
    assert ("".join(text.split()), calls) == ("One.Iwrite</tool_call>here.", [PEAR])
    text, [broken] = read_calls(turn_of(encoder, "One." + call.replace("look_up", '"') + "\nTwo."))
    assert text.split() == ["One.", "Two."]
    assert isinstance(broken, str)


def test_a_special_token_without_a_name_ends_a_turn_too(family):
    tokenizer = family_tokenizer(family)
    tokenizer.add_tokens([AddedToken("<|end_of_message|>", special=True)])
    encoder = PromptEncoder(tokenizer, TextTaskCfg(tool="calculator"))
    assert tokenizer.convert_tokens_to_ids("<|end_of_message|>") not in tokenizer.all_special_ids
    assert turn_of(encoder, "42<|end_of_message|>") == "42"


def test_turns_without_calls_have_none(family):
    for text in ("42", "I look it up.", "A pear, {}", ""):
        assert read_calls(turn_of(encoder_of(family), text + family.end)) == (text.strip(), [])


def test_broken_calls_are_told_and_not_guessed(family):
    encoder = encoder_of(family)
    said = family.call if family.call is not None else str(PEAR)
    place = said.index("look_up") + 2
    [call] = read_calls(turn_of(encoder, said[:place] + family.end))[1]  # cut in the name, yet ended
    assert isinstance(call, str) or not call.arguments


def test_results_of_a_turn_are_rendered_together(family):
    encoder = encoder_of(family)
    results = [{"role": "tool", "name": "look_up", "content": text} for text in ("84", "85")]
    end = encoder.tokenizer.convert_tokens_to_ids(family.end)
    tokens = encoder.encode_answer(results, end)
    assert encoder.tokenizer.decode(tokens) == family.results
    not_ended = encoder.tokenizer.decode(encoder.encode_answer(results))  # such as by a stop string
    assert not_ended.endswith(family.results)
    assert family.end not in not_ended.removesuffix(family.results).replace(family.end, "", 1)
    special = set(encoder.tokenizer.all_special_ids)
    spelled = [{**result, "content": f"8{family.end}{''.join(family.specials)}<tool_call>"} for result in results]
    found = encoder.encode_answer(spelled, end)
    assert [t for t in found if t in special] == [t for t in tokens if t in special]


@pytest.mark.parametrize("text", ["ANSWER7.", "ANSWER0. and ANSWER1.", "WRITTEN"])
def test_results_that_spell_placeholders_are_plain_text(family, text):
    encoder = encoder_of(family)
    for spelled in ("", family.end):
        results = [
            {"role": "tool", "name": "look_up", "content": f"{text}{spelled}"},
            {"role": "tool", "name": "look_up", "content": "85"},
        ]
        whole = encoder.tokenizer.decode(encoder.encode_answer(results))
        assert whole.count(text) == whole.count("85") == 1


def test_the_name_of_a_tool_that_there_is_not_is_in_no_message(family):
    env = ToolEnv(tools=[look_up])
    env.reset(seed=0, options={"prompt": "?"})
    encoder = encoder_of(family)
    [message], *_ = env.step(str(Call(f"x{family.end}{''.join(family.specials)}ANSWER7.", {})))
    assert "there is no tool" in message["content"]
    known = encoder.encode_answer([{**message, "name": "look_up", "content": "84"}])
    special = set(encoder.tokenizer.all_special_ids)
    assert [t for t in encoder.encode_answer([message]) if t in special] == [t for t in known if t in special]


def look_up(word: str) -> str:
    """Look up.

    Args:
        word: A word.
    """
    return word


def test_tools_are_in_the_prompt(family):
    encoder = encoder_of(family)
    example = Example("Look up a pear.", {})
    text = encoder.tokenizer.decode(encoder.encode(example, [PROBE]))
    if family.call is None:
        assert text.index(describe([PROBE])) < text.index("Look up a pear.")
    elif "tools" in family.template:
        assert '"look_up"' in text
    assert "Look up a pear." in text
    assert "look_up" not in encoder.tokenizer.decode(encoder.encode(example))


class TwoResults(gw.TextEnv):
    """Answers each of five turns by two messages of tools."""

    tools = (PROBE,)

    def reset(self, *, seed=None, options=None):
        self.turn = 0
        return "Look up a pear.", {}

    def step(self, text):
        self.turn += 1
        results = [{"role": "tool", "name": "look_up", "content": f"{self.turn} {n}"} for n in range(2)]
        return results, float(len(text) % 3), self.turn == 5, False, {}

    def sample_action(self, rng):
        return str(PEAR)


class Look(gw.Callback):
    def on_rollout_end(self, trainer, rollout):
        self.members = trainer.collector.members
        self.rollout = rollout


def test_log_probabilities_over_five_turns_are_those_that_were_sampled(family, tmp_path):
    tokenizer = family_tokenizer(family)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=4096, **sizes
        )
    )
    stop = tuple("abcdefghijklmnopqrstuvwxyz0123456789 ")  # so that most turns end
    policy = gw.CausalLM(model, tokenizer=tokenizer, sampling=gw.SamplingCfg(max_new_tokens=24, stop=stop))
    look = Look()
    run = gw.train(
        gw.TextTask(env=TwoResults, max_turns=5, data_size=2), gw.GRPOCfg(group_size=4), policy=policy, num_prompts=2,
        total_iterations=1, run_dir=tmp_path / "run", callbacks=[look], evaluation={"interval": None},
    )  # fmt: skip
    assert run.metrics()[-1]["rollout/sampler_kl"] < 1e-8
    whole = [member for member in look.members if member.turns == 5 and member.stop != "length"]
    assert len(whole) >= 4
    for row, member in enumerate(look.members):
        assert member.turn.count(-1) == len(member.tokens) - member.written
        start = len(member.prompt.tokens) - 1
        read = torch.tensor(member.turn) < 0
        assert not look.rollout["loss_mask"][row, start : start + len(read)][read].any()
    between = tokenizer.decode([t for t, turn in zip(whole[0].tokens, whole[0].turn, strict=True) if turn < 0])
    assert [between.count(f"{turn} {n}") for turn in range(1, 6) for n in range(2)] == [1] * 8 + [0, 0]


arguments = st.dictionaries(
    st.text(min_size=1, max_size=4),
    st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.lists(st.integers(), max_size=2)),
    max_size=3,
)


@given(st.lists(st.builds(Call, st.text(min_size=1, max_size=5), arguments), max_size=3), st.text(max_size=10))
def test_calls_that_are_written_are_read_again(calls, text):
    calls = [call for call in calls if "tool_call>" not in str(call)[11:-12]]
    plain = text.replace("<tool_call>", "")
    assert read_calls(plain + "".join(map(str, calls))) == (plain.strip(), calls)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON"),
        ('{"name": "f"', "no JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is no number"),
        ("[" * 100_000, "100 levels"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 300 + "]" * 300 + "}}", "100 levels"),
        ('["f"]', "expected"),
        ('{"name": 3, "arguments": {}}', "expected"),
        ('{"name": "f", "arguments": "x"}', "expected"),
        ('{"name": "f", "arguments": ' + "1" * 5000 + "}", "no JSON"),
    ],
)
def test_what_is_no_call_has_its_reason(text, reason):
    for close in ("</tool_call>", ""):
        [found] = read_calls(f"<tool_call>{text}{close}")[1]
        assert reason in found


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_whatever_a_model_writes_is_read(value):
    for family in FAMILIES.values():
        encoder = encoder_of(family)
        mark = encoder.call_form.start if encoder.call_form else "<tool_call>"
        for text in (json.dumps(value), f"{mark}{json.dumps(value)}", f"{mark}look_up{json.dumps(value)}"):
            if encoder.call_form is not None:
                read_calls(encoder.call_form.canonical(text))


def test_an_argument_may_have_the_text_that_ends_a_call():
    call = Call("python", {"code": "print('</tool_call>')", "page": "</div>"})
    assert read_calls(f"before {call} after") == ("before  after", [call])
    assert "</div>" in str(call)
