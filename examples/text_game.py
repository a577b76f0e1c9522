"""A language model with random weights learns a game of several turns: to find a number by "higher" and "lower".

    python examples/text_game.py                 one to three minutes on two cores; no download

It ends when each held-out number is found, and writes a page with episodes before and after training.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import groupwise as gw

MOST, GUESSES = 7, 3
NUMBERS = [str(number) for number in range(1, MOST + 1)]
WORDS = [*NUMBERS, "Guess", "a", "number", "from", "to", ".", "higher", "lower", "found"]
NAME = "examples/Number-v0"


@gw.register_text_env(NAME)
class Number(gw.TextEnv):
    """A number from 1 to 7, in three guesses. Who halves what is left finds each; who ignores the answers, three of seven."""

    def reset(self, *, seed=None, options=None):
        self.secret, self.left = int(np.random.default_rng(seed).integers(1, MOST + 1)), GUESSES
        return f"Guess a number from 1 to {MOST} .", {}

    def step(self, text):
        guess = int(text) if text in NUMBERS else 0
        self.left -= 1
        won = guess == self.secret
        observation = "found" if won else "higher" if guess < self.secret else "lower"
        return f" {observation} ", float(won), won or not self.left, False, {"success": won}

    def sample_action(self, rng):
        return str(rng.integers(1, MOST + 1))


def make_model(folder: Path, seed: int) -> None:
    """A Llama of random weights, and a tokenizer with a token for each word."""
    specials = ["<unk>", "<pad>", "<s>", "</s>"]
    vocabulary = {token: number for number, token in enumerate([*specials, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"initializer_range": 0.05, "max_position_embeddings": 32}
    ends = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **sizes, **ends)).save_pretrained(folder)


def learn(model: Path, seed: int, total_iterations: int, run_dir: Path | None) -> gw.Run:
    """The trained run."""
    make_model(model, seed)
    return gw.train(
        gw.TextTask(env=NAME, max_turns=GUESSES, data_size=1000, eval_size=100),
        gw.GRPOCfg(
            group_size=16,
            learning_rate=3e-3,
            ent_coef=0.1,  # with less, a number may die out: it is never tried again, and its games are lost
            credit={"returns": "turn_to_go", "group_key": "group_step"},  # a guess earns what comes after it
        ),
        model=str(model),
        num_prompts=14,
        sampling={"max_new_tokens": 2, "stop": tuple(WORDS)},  # a turn is a word
        total_iterations=total_iterations,
        evaluation={"interval": 8000, "metric": "success_rate"},
        stop={"threshold": 1.0},
        seed=seed,
        run_dir=run_dir,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-iterations", type=int, default=400, help="the most")
    parser.add_argument("--run-dir", type=Path, help="folder of the run (default: a fresh one under runs/)")
    options = parser.parse_args()
    run = learn(Path("models", "text_game"), options.seed, options.total_iterations, options.run_dir)
    greedy, sampled = gw.evaluate(run), gw.evaluate(run, deterministic=False)
    print(f"untrained: {run.metrics()[0]['rollout/success_rate']:.2f} of the games won, words sampled")
    print(f"trained:   {sampled.success_rate:.2f} sampled, {greedy.success_rate:.2f} with the likeliest words")
    print("possible:  1.00")
    print(gw.sample(run, deterministic=True)[0])
    print(f"Episodes before and after: {run.report().absolute().as_uri()}#texts")


if __name__ == "__main__":
    main()
