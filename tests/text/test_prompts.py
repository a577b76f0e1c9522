"""Prompts as tokens: with and without a chat template, never cut."""

import time

import pytest
from tiny_tokenizers import END, START, character_tokenizer, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from groupwise.config.run import TextTaskCfg
from groupwise.errors import ConfigError, DataError
from groupwise.text.task import Example, PromptEncoder

CHAT = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
USER = {"role": "user", "content": "1+1="}
SYSTEM = {"role": "system", "content": "Be brief."}


def encoder(tokenizer=None, **settings):
    return PromptEncoder(tokenizer or tiny_tokenizer(), TextTaskCfg(data="a.jsonl", **settings))


def read(encoder, prompt):
    """What the model reads."""
    return tiny_tokenizer().decode(encoder.encode(Example(prompt, {})))


BRIEF = "<|im_start|>system\nBe brief.<|im_end|>\n" + CHAT


def test_texts_and_messages_are_read_as_the_template_has_them():
    chat = encoder()
    assert chat.conversational
    assert read(chat, "1+1=") == read(chat, (USER,)) == CHAT
    assert read(chat, (SYSTEM, USER)) == BRIEF
    assert read(chat, (USER, {"role": "assistant", "content": "It is"})) == CHAT + "It is"  # it is continued
    tokens = chat.encode(Example("1+1=", {}))
    assert tokens[0] == START
    assert END in tokens, "a special token, not the letters of its name"


def test_other_entries_of_messages_go_to_the_template_or_are_named():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}{% for call in messages[0]['tool_calls'] %}<{{ call }}>{% endfor %}"
    )
    message = {"role": "assistant", "content": "", "tool_calls": ["add", "sub"], "name": "ann"}
    with pytest.warns(UserWarning, match="the chat template does not use 'name' of the messages"):
        (prompt,) = encoder(tokenizer).select([Example((message | {"role": "user"},), {})])
    assert tokenizer.decode(prompt.tokens) == "<add><sub>"


def test_a_text_stays_a_text_without_a_template_or_if_asked():
    assert tiny_tokenizer(chat=False).decode(encoder(tiny_tokenizer(chat=False)).encode(Example("1+1=", {}))) == "1+1="
    plain = encoder(chat="never")
    assert not plain.conversational
    assert read(plain, "1+1=") == "1+1="
    characters = encoder(character_tokenizer())
    assert characters.encode(Example("1+1=", {})) == [5, 14, 5, 15]


def test_the_system_prompt_comes_first_unless_there_is_one():
    brief = encoder(system_prompt="Be brief.")
    for prompt in ("1+1=", (USER,), (SYSTEM, USER)):
        assert read(brief, prompt) == BRIEF
    assert read(brief, (SYSTEM | {"content": "Think."}, USER)) == BRIEF.replace("Be brief.", "Think.")


def test_the_template_gets_its_settings_and_is_quoted_if_it_refuses():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if loud %}!{% endif %}"
    assert read(encoder(tokenizer), "a") == "a"
    assert read(encoder(tokenizer, chat_template_kwargs={"loud": True}), "a") == "a!"
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match=r"the chat template refuses .*Be brief.*: no system role; fix: other roles"):
        encoder(tokenizer).encode(Example((SYSTEM,), {}))


@pytest.mark.parametrize(
    "name", ["add_generation_prompt", "continue_final_message", "tools", "tokenize", "return_dict"]
)
def test_what_follows_from_the_prompt_is_no_setting_of_the_template(name):
    with pytest.raises(
        ConfigError, match=f"chat_template_kwargs: {name}=True follows from the prompt; fix: leave it out"
    ):
        encoder(chat_template_kwargs={name: True})


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOPS, "it takes more than 0.2 s of CPU time"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages[9]['content']['x'] }}", "has no element 9"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages + 1 }}", "concatenate"),
        ("{% for %}", "Expected"),
    ],
)
def test_a_template_that_loops_or_fails_is_one_clear_error(template, why, monkeypatch):
    monkeypatch.setattr("groupwise.text.task.SECONDS_OF_TEMPLATE", 0.2)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    begun = time.monotonic()
    with pytest.raises(DataError, match=f"the chat template refuses .*{why}.*; fix: "):
        encoder(tokenizer).encode(Example((USER,), {}))
    assert time.monotonic() - begun < 20


def test_conversations_need_a_template():
    without = tiny_tokenizer(chat=False)
    for tokenizer, settings, message in [
        (without, {}, r"prompts are for conversations, but .* has no chat template; fix: the tokenizer"),
        (None, {"chat": "never"}, r"prompts are for conversations, but chat='never'; fix"),
        (without, {"system_prompt": "Be brief."}, r"system_prompt is for conversations, but .* no chat template"),
        (None, {"system_prompt": "a", "chat": "never"}, "system_prompt is for a conversation"),
        (
            without,
            {"chat_template_kwargs": {"a": 1}},
            r"chat_template_kwargs is for conversations, but .* no chat template",
        ),
        (None, {"chat_template_kwargs": {"a": 1}, "chat": "never"}, "chat_template_kwargs is for a conversation"),
    ]:
        with pytest.raises(ConfigError, match=message):
            encoder(tokenizer, **settings).encode(Example((USER,), {}))


def test_an_empty_prompt_begins_with_the_token_that_texts_begin_with():
    plain = tiny_tokenizer(chat=False)
    assert encoder(plain).encode(Example("", {})) == [plain.bos_token_id]
    plain.bos_token = None
    with pytest.raises(DataError, match="an empty prompt has no tokens"):
        encoder(plain).encode(Example("", {}))


def test_a_prompt_does_not_end_unless_it_says_so():
    ending = tiny_tokenizer(chat=False)
    plain = ending("1+1=")["input_ids"]
    ids = [("<s>", ending.bos_token_id), ("<|endoftext|>", END)]
    ending.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A <|endoftext|>", special_tokens=ids)
    assert ending("1+1=")["input_ids"] == [ending.bos_token_id, *plain, END]
    assert encoder(ending).encode(Example("1+1=", {})) == [ending.bos_token_id, *plain]
    assert encoder(ending).encode(Example("<s>1+1=", {})) == [ending.bos_token_id, *plain]  # one beginning is enough
    assert encoder(ending).encode(Example("<s><s>1+1=", {})) == [ending.bos_token_id] * 3 + plain
    usual = tiny_tokenizer(chat=False)
    assert encoder(usual).encode(Example("1+1=<|endoftext|>", {})) == [*plain, END]


def test_long_prompts_are_refused_or_left_out_and_never_cut():
    tokenizer = character_tokenizer()
    examples = [Example("1" * length, {}) for length in (3, 5, 4)]
    refusing, dropping = (encoder(tokenizer, max_prompt_tokens=4, on_long_prompt=how) for how in ("error", "drop"))
    with pytest.raises(
        DataError, match=r"1 of 3 prompts have more than 4 tokens \(the longest 5\); .*'11111'; .*gw.TextTask\(on_long"
    ):
        refusing.select(examples)
    with pytest.warns(UserWarning, match="1 of 3 prompts have more than 4 tokens .*they are dropped"):
        kept = dropping.select(examples)
    assert [len(prompt.tokens) for prompt in kept] == [3, 4]
    assert [prompt.example for prompt in kept] == [examples[0], examples[2]]
    with pytest.raises(
        DataError, match=r"3 of 3 prompts have more than 2 tokens.*; fix: shorter prompts, a smaller max_new_tokens$"
    ):
        dropping.select(examples, context=2)
    assert [len(prompt.tokens) for prompt in encoder(tokenizer).select(examples)] == [3, 5, 4]
    with pytest.raises(DataError, match="more than 4 tokens"):
        encoder(tokenizer, max_prompt_tokens=9).select(examples, context=4)
