"""A small model in a folder, a task of digits to copy, and what is compared of runs on it."""

import itertools
import json
import random

import torch
from safetensors.torch import load_file
from tiny_tokenizers import character_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import groupwise as gw
from groupwise.text.tools import Tool

DIGITS = "0123456789"
SETTINGS = {"num_prompts": 4, "sampling": {"max_new_tokens": 4}, "total_steps": 100, "logging": {"progress": "none"}}
SETTINGS |= {"evaluation": {"prompts": 8}}  # games have a hundred


def save_model(folder, *, chat=False, positions=64, **sizes):
    """A random Llama and its tokenizer of single characters."""
    tokenizer = character_tokenizer(DIGITS + " ", chat=chat)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | sizes
    config = LlamaConfig(
        vocab_size=len(tokenizer), bos_token_id=2, eos_token_id=3, max_position_embeddings=positions, **shape
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def numbers(seed=0):
    """All numbers of three digits as prompts, shuffled."""
    rows = [{"prompt": "".join(digits)} for digits in itertools.product(DIGITS, repeat=3)]
    random.Random(seed).shuffle(rows)
    return rows


def share_copied(prompts, completions, **columns):
    """Digits in the right place, less a tenth for another length."""
    pairs = zip(prompts, completions, strict=True)
    return [sum(a == b for a, b in zip(p, c, strict=False)) / 3 - 0.1 * (len(c) != 3) for p, c in pairs]


def copying(reward=share_copied, **settings):
    rows = numbers()
    return gw.TextTask(rows[:60], reward=reward, eval_data=rows[60:68], **settings)


def write_settings(folder, model, **task):
    """A file of settings, whose task is in files too; returns its path."""
    rows = [json.dumps(row | {"answer": row["prompt"]}) for row in numbers()]
    for name, part in {"train": rows[:40], "test": rows[40:46]}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(part), encoding="utf-8")
    task |= {"data": f"{folder}/train.jsonl", "eval_data": f"{folder}/test.jsonl", "rewards": [{"name": "exact"}]}
    settings = {"task": task, "model": {"path": str(model)}, "algorithm": {"group_size": 4}} | SETTINGS
    (folder / "text.json").write_text(json.dumps(settings), encoding="utf-8")
    return f"{folder}/text.json"


def train(task, model, run_dir, algorithm=None, **settings):
    cfg = algorithm or gw.GRPOCfg(group_size=4, learning_rate=1e-3)
    return gw.train(task, cfg, model=str(model), run_dir=run_dir, **SETTINGS | settings)


def weights(run):
    return load_file(run.path / "checkpoints" / "latest" / "policy.safetensors")


def same_weights(run, other):
    ours, theirs = weights(run), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def logged(run, *ignored):
    """Metrics without times, and those whose names begin so."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", *ignored))} for row in run.metrics()]


class Count(Tool):
    """Ends turns at some digits, and answers with how many characters they have."""

    stop = ("5", "6", "7")

    def __call__(self, text):
        return str(len(text)) if text.endswith(self.stop) else None
