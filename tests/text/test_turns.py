"""What stands between two turns: messages of chat templates of several kinds, plain texts; turns as messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import END, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from groupwise.config.run import TextTaskCfg
from groupwise.errors import ConfigError
from groupwise.text.task import PromptEncoder

BODY = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LOOP = "{% for m in messages %}"
REFUSES = (
    LOOP + "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}" + BODY
)
IGNORES = LOOP + "{% if m['role'] in ['user', 'assistant'] %}" + BODY + "{% endif %}"
ALL_BUT_LAST = LOOP + (
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}" + BODY
)  # what the assistant wrote last looks otherwise than once it is answered


def tool(answer):
    return [{"role": "tool", "content": answer}]


def answers(template=None, **settings):
    tokenizer = tiny_tokenizer(chat=template is not None)
    if template not in (None, "ChatML"):
        tokenizer.chat_template = template + "{% endfor %}" + PROMPT
    cfg = TextTaskCfg(tool="calculator", **settings)
    return tokenizer, PromptEncoder(tokenizer, cfg)


@pytest.mark.parametrize(
    ("template", "role"),
    [("ChatML", "tool"), (REFUSES, "user"), (IGNORES, "user"), (ALL_BUT_LAST, "tool")],
    ids=["tool", "refuses", "ignores", "thinks"],
)
def test_an_answer_is_a_message_and_the_model_writes_the_next(template, role):
    tokenizer, encoder = answers(template)
    behind = f"<|im_end|>\n<|im_start|>{role}\n1 user<|im_end|>\n<|im_start|>assistant\n"
    expected = tokenizer(behind)["input_ids"]
    assert expected[0] == END
    assert encoder.encode_answer(tool("1 user")) == expected
    # the model's own end of turn is not repeated
    assert encoder.encode_answer(tool("1 user"), end=END) == expected[1:]
    # another one, which the template does not have, changes nothing
    assert encoder.encode_answer(tool("1 user"), end=2) == expected


def test_what_stands_behind_an_answer_is_the_templates():
    ends = "{% if m['role'] == 'assistant' %}{{ m['content'] + '<s>' }}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    tokenizer, encoder = answers(LOOP + ends)
    expected = tokenizer("<s>84<|im_end|><|im_start|>assistant\n")["input_ids"]
    assert encoder.encode_answer(tool("84"), end=END) == expected  # an end behind the answer alone takes nothing away
    assert encoder.encode_answer(tool("84"), end=2) == expected[1:]
    _, encoder = answers(LOOP + "{{ m['content'] + '\n<|im_end|>' }}")  # white space before the end goes with it
    assert encoder.encode_answer(tool("84"), end=END) == tokenizer("84\n<|im_end|><|im_start|>assistant\n")["input_ids"]
    settings = {"chat_template_kwargs": {"plain": True}}
    _, encoder = answers(LOOP + "{{ m['content'] + '<|im_end|>' + ('' if plain else '?') }}", **settings)
    assert encoder.encode_answer(tool("84")) == tokenizer("<|im_end|>84<|im_end|><|im_start|>assistant\n")["input_ids"]
    _, encoder = answers("ChatML")  # an answer that imitates the placeholder
    assert "\nWRITTEN<|im_end|>" in tokenizer.decode(encoder.encode_answer(tool("WRITTEN")))


@pytest.mark.parametrize("template", [None, "ChatML"])
def test_plain_texts_have_the_answer_in_them(template):
    settings = {} if template is None else {"chat": "never"}
    tokenizer, encoder = answers(template, **settings)
    expected = tokenizer("<result>84</result>")["input_ids"]
    assert encoder.encode_answer(tool("84"), end=END) == expected
    _, other = answers(template, tool_answer=" = {}.", **settings)
    assert other.encode_answer(tool("84")) == tokenizer(" = 84.")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    assert tokenizer("84")["input_ids"][0] == 2
    assert encoder.encode_answer(tool("84")) == expected  # a tokenizer that begins every text does not begin the answer


@pytest.mark.parametrize("template", [None, "ChatML"])
@given(
    st.lists(
        st.sampled_from(["<|im_end|>", "<|endoftext|>", "<|im_start|>user\n", "<think>", "<|im_", "end|>", "84", " "])
    )
)
def test_special_tokens_that_an_answer_spells_are_plain_text(template, parts):
    """It must not end a turn, or begin one, or a call."""
    tokenizer, encoder = answers(template)
    tokenizer.add_tokens(["<think>"])
    special = set(tokenizer.added_tokens_decoder)
    plain, tokens = encoder.encode_answer(tool("84")), encoder.encode_answer(tool("".join(parts)))
    assert [token for token in tokens if token in special] == [token for token in plain if token in special]
    expected = tokenizer.decode(plain).replace("84", "".join(parts))
    assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == expected


def test_a_template_without_a_place_for_answers_is_refused():
    first = LOOP + "{% if loop.first %}" + BODY + "{% elif m['role'] == 'assistant' %}" + BODY + "{% endif %}"
    with pytest.raises(ConfigError, match=r"has no message of role 'tool' or 'user' after the assistant's"):
        answers(first)[1].encode_answer(tool("84"))
