"""Tokenizers made in milliseconds: bytes with a few merges, or one token a character.

The first ids are those of ``tiny_models``: 2 begins a text, 3 ends it. None has a pad token, as many real ones.
"""

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

UNKNOWN, START, BEGIN, END = range(4)
_CHAT_ML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SENTENCES = ("What is the sum of two numbers? The answer is in the answer tag.", "user system assistant")


def tiny_tokenizer(chat=True):
    """Byte-level pairs, so that every text survives encoding and decoding; 300 ids at most.

    With ``chat``, a ChatML template, and texts end with ``<|im_end|>``; else no template and ``<|endoftext|>``.
    """
    return _wrapped(Tokenizer.from_str(_trained(_specials(chat))), chat)


def character_tokenizer(characters="0123456789+= ", chat=False):
    """One token for each of the characters, in their order from id 4 on; others are unknown."""
    specials = _specials(chat)
    vocabulary = {token: number for number, token in enumerate([*specials, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=specials[UNKNOWN]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer, chat)


def sentence_tokenizer(characters="0123456789="):
    """As Llama 2's: each character has a token alone and one with a space before it; other texts are bytes, and decoding drops the first
    space.
    """
    specials, others = _specials(chat=False), [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581", *characters, *("\u2581" + one for one in characters)]
    vocabulary = {token: number for number, token in enumerate([*specials, *others, *words])}
    merges = [("\u2581", one) for one in characters]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=specials[UNKNOWN], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    ends = decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), *ends])
    return _wrapped(tokenizer, chat=False)


@functools.cache
def _trained(specials):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return tokenizer.to_str()


def _specials(chat):
    return ("<unk>", "<|im_start|>", "<s>", "<|im_end|>" if chat else "<|endoftext|>")


def _wrapped(tokenizer, chat):
    unknown, _, begin, end = _specials(chat)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unknown,
        bos_token=begin,
        eos_token=end,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_ML if chat else None
    return wrapped
