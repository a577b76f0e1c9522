"""A tiny random language model and prompts, for measuring the path of a text step."""

import torch


def policy(gw):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate("abcdefghijklmnopqrstuvwxyz ")}}
    tok = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tok.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocab),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
        )
    )
    return gw.CausalLM(model, gw.SamplingCfg(max_new_tokens=8), tokenizer=fast)


def task(gw):
    def reward(completions, **columns):
        return [text.count("a") / 8 for text in completions]

    return gw.TextTask(["abc", "xyz", "hello", "world", "one", "two"], reward=reward, eval_data=["say"])
