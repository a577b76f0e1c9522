"""Does a tiny language model learn to play TextWorld's games? One room and a quest of two commands, by cloning and then GRPO.

    python benchmarks/agents_textworld.py                   every seed that results/agents_textworld.json lacks
    python benchmarks/agents_textworld.py --seed 0          one seed
    python benchmarks/agents_textworld.py --smallest --out FILE
    python benchmarks/agents_textworld.py --report          the table for the docs, from what is there

Needs the extra ``textworld``. Each game has a room, things and a quest of its own, made from its seed. The model reads the
quest and the commands that are possible, not the room's description, and writes a command, word by word. A game has two
turns, as many as its quest needs. The reward is the game's score: 1 for the quest. The model is a Llama of random weights
with a token for each word of TextWorld's grammar and of the games that it clones.

1. Cloning (``bc``) of copies: a list of two to four commands, which the model repeats. It learns to copy names.
2. Cloning of the walkthroughs of ``CLONED`` games, again and again, each time with other names for things.
3. GRPO plays ``GAMES`` other games with their own names, rewarded by the games, without walkthroughs.

Measured, as fixed before the runs: the success rate of the sampled policy on 128 held-out games, one episode each: of the
untrained model, of the clone, and after GRPO. Three seeds, 0 to 2, with the 95 % interval by Student's t over seeds, of the
gain of GRPO over its clone, too. At most 25 CPU minutes a seed. Beside them: commands drawn from the possible ones, and a
few iterations of GRPO from the untrained model. Settings were chosen on the seeds 10 and above.
"""

import argparse
import json
import random
import re
import resource
import statistics
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import textworld
import torch
from agents import Curve, mean_and_ends
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import groupwise as gw
from groupwise.seeding import derive_seed
from groupwise.text.games.textworld import TextWorld
from groupwise.text.task import Example

RESULTS = Path(__file__).parent / "results" / "agents_textworld.json"
WORD = re.compile(r"[a-z0-9][a-z0-9'-]*")
NO_NAMES = {
    *("close", "drop", "eat", "examine", "insert", "inventory", "lock", "look", "open", "put", "take", "unlock"),
    *("a", "and", "from", "into", "of", "on", "with"),
}
"""Words of commands that name no thing."""
ASKS = "\n>"
SIZES = "rooms=1,objects=4,quest=2"
GAMES, CLONED, HELD_OUT = 192, 112, 128
TURNS = 2
EVERY = 20
"""Iterations between evaluations."""
SEEDS = (0, 1, 2)
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
COPIES, COPYING = 16_000, {"num_prompts": 32, "schedule": {"name": "linear", "final": 1.0, "warmup": 0.1}}
TIMES, CLONING = 36, {"num_prompts": 8, "schedule": {"name": "linear", "final": 0.1, "warmup": 0.1}}
"""Walkthroughs of each game, with names of their own."""
CLONE: dict[str, Any] = {
    "name": "bc",
    "learning_rate": 3e-3,
    "minibatch_size": None,
    "optimizer": {"name": "adam", "eps": 1e-8, "betas": (0.9, 0.95)},
}
ALGORITHM: dict[str, Any] = {"group_size": 16, "learning_rate": 5e-4}
PROMPTS = 8
ITERATIONS, UNTRAINED = 80, 3
"""Iterations of GRPO from the clone, and from the untrained model."""


class Quest(TextWorld):
    """A game whose first text is the quest and the commands; ``>`` asks for a command."""

    def __init__(self) -> None:
        super().__init__(SIZES, commands=True)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        text, info = super().reset(seed=seed, options=options)
        lines = text.splitlines()
        return f"{lines[0]}\n{lines[-1]}{ASKS}", info

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        answer, *others = super().step(text)
        return (answer + ASKS, *others)


def play_walkthroughs(seeds: list[int]) -> list[list[str]]:
    """The texts of each game: what is observed and the commands that win, in turn. Lower case, as the model's words are."""
    env, games = Quest(), list[list[str]]()
    for seed in seeds:
        texts = [env.reset(seed=seed)[0]]
        for command in env.walkthrough():
            texts += [command, env.step(command)[0]]
        games.append([text.lower() for text in texts])
    env.close()
    return games


def commands_of(game: list[str]) -> list[str]:
    """The commands that were possible."""
    return [
        command for text in game[:-1:2] for command in text.removesuffix(ASKS).rpartition("commands: ")[2].split("; ")
    ]


def names_of(texts: list[str]) -> list[str]:
    return sorted({word for text in texts for word in WORD.findall(text)} - NO_NAMES)


def renamed(text: str, other: dict[str, str]) -> str:
    return WORD.sub(lambda word: other.get(word[0], word[0]), text)


def copies(games: list[list[str]], count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Rows whose completion is the prompt: a few commands with any names."""
    commands = [*chain(*map(commands_of, games))]
    names = names_of(commands)
    made = list[str]()
    for _ in range(count):
        text = "; ".join(rng.sample(commands, rng.randint(2, 4)))
        made.append(WORD.sub(lambda word: word[0] if word[0] in NO_NAMES else rng.choice(names), text))
    return [{"prompt": text + ASKS, "completion": text} for text in made]


def walkthroughs(games: list[list[str]], times: int, rng: random.Random) -> list[dict[str, Any]]:
    """Rows of the games with exchanged names: the first text, and the commands with the answers between them."""
    names, rows = names_of([*chain(*map(commands_of, games))]), list[dict[str, Any]]()
    for game in games * times:
        own = names_of(commands_of(game))
        other = dict(zip(own, rng.sample(names, len(own)), strict=True))
        first, command, answer, last, _ = (renamed(text, other) for text in game)
        said = [{"role": "assistant", "content": command}, {"role": "user", "content": answer}]
        rows.append({"prompt": first, "completion": [*said, {"role": "assistant", "content": last}]})
    return rows


def random_success(seeds: list[int], seed: int) -> float:
    """The share of games that are won by commands drawn from the possible ones."""
    env, rng = TextWorld(SIZES), np.random.default_rng(seed)
    won = list[bool]()
    for one in seeds:
        env.reset(seed=one)
        won.append(any(env.step(env.sample_action(rng))[2] for _ in range(TURNS)))
    env.close()
    return statistics.fmean(won)


def make_model(folder: Path, texts: list[str], seed: int) -> Path:
    """A Llama of random weights, with a token for each word of TextWorld's grammar and of the texts."""
    split = pre_tokenizers.Split(Regex(r"[.,;:!?\"()=]"), "isolated")
    cut = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    grammar = (Path(textworld.__file__).parent / "generator" / "data" / "text_grammars").glob("house_*.twg")
    words = set(WORD.findall("\n".join(file.read_text() for file in grammar).lower()))
    words |= {word for text in texts for word, _ in cut.pre_tokenize_str(text)}
    specials = ["<unk>", "<pad>", "<s>", "</s>"]
    vocabulary = {token: number for number, token in enumerate([*specials, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), cut
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(seed)
    ends = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    config = LlamaConfig(vocab_size=len(vocabulary), max_position_embeddings=1024, **SHAPE, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def cpu_seconds() -> float:
    """Of this process and those that it has waited for, which make games."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def seeds_of(examples: list[Example]) -> list[int]:
    return [one.start.seed for one in examples if one.start]


class Games:
    """The games that all seeds play, made once."""

    def __init__(self, *, smallest: bool) -> None:
        train, cloned, held_out = (4, 4, 4) if smallest else (GAMES, CLONED, HELD_OUT)
        self.task = gw.TextTask(env=Quest, max_turns=TURNS, data_size=train, eval_size=held_out)
        more = gw.TextTask(env=Quest, data_size=train + cloned)
        self.cloned = play_walkthroughs(seeds_of(more.load()[0]))[train:]
        self.random = random_success(seeds_of(self.task.held_out()), derive_seed(0, "random commands"))


def learn(games: Games, seed: int, *, smallest: bool) -> dict[str, Any]:
    """What one seed reaches."""
    began = cpu_seconds()
    settings: dict[str, Any] = {
        "sampling": {"max_new_tokens": 16},
        "logging": {"progress": "none"},
        "seed": seed,
    }
    playing: dict[str, Any] = settings | {
        "num_prompts": 2 if smallest else PROMPTS,
        "evaluation": {"interval": 10**9, "deterministic": False, "num_logged_groups": 0, "metric": "success_rate"},
    }
    iterations, untrained = (1, 1) if smallest else (ITERATIONS, UNTRAINED)
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch, "model"), [*chain(*games.cloned)], seed)
        nothing, curve = Curve(EVERY), Curve(EVERY)
        run = gw.train(
            games.task,
            gw.GRPOCfg(**ALGORITHM),
            model=str(model),
            total_iterations=untrained,
            callbacks=[nothing],
            run_dir=Path(scratch, "untrained"),
            **playing,
        )
        earned = [m["rollout/return_mean"] for m in run.metrics()]
        few, rng = 32 if smallest else COPIES, random.Random(seed)
        learned = [(copies(games.cloned, few, rng), COPYING)]
        learned += [(walkthroughs(games.cloned, 1 if smallest else TIMES, rng), CLONING)]
        loss, weights = list[float](), {"path": str(model)}
        for number, (rows, how) in enumerate(learned):
            clone = gw.train(
                gw.TextTask(rows),
                CLONE | {"schedule": how["schedule"]},
                model=weights,
                run_dir=Path(scratch, f"clone{number}"),
                num_prompts=how["num_prompts"],
                total_epochs=1,
                **settings,
            )
            loss += [m["train/loss"] for m in clone.metrics()]
            weights = {"init_from": clone.path}
        cloned = cpu_seconds()
        run = gw.train(
            games.task,
            gw.GRPOCfg(**ALGORITHM),
            model=weights,
            total_iterations=iterations,
            callbacks=[curve],
            run_dir=Path(scratch, "run"),
            **playing,
        )
        cpu = cpu_seconds()
        before = gw.sample(run.cfg, count=5, seed=seed, env=Quest)
        after = gw.sample(run, count=5, seed=seed)
        greedy = gw.evaluate(run, deterministic=True)
        parameters = sum(p.numel() for p in run.policy.parameters())
        return {
            "seed": seed,
            "success": {
                "untrained": nothing.points[0][1],
                "cloned": curve.points[0][1],
                "trained": curve.points[-1][1],
            },
            "greedy": greedy.success_rate,
            "curve": curve.points,
            "training": [m.get("rollout/success_rate", 0.0) for m in run.metrics()],
            "untrained_return": statistics.fmean(earned),
            "cloning_loss": loss,
            "starts_apart": sum(m["rollout/starts_apart"] for m in run.metrics()),
            "episodes": {"cloned": [str(one) for one in before], "trained": [str(one) for one in after]},
            "parameters": parameters,
            "cpu_seconds": {"cloned": cloned - began, "trained": cpu - cloned},
            "seconds": curve.seconds,
            "versions": {"groupwise": gw.__version__, "torch": torch.__version__},
        }


def report(results: dict[str, Any]) -> None:
    """The table for the docs."""
    print("| seed | untrained | cloned | after GRPO | greedy | CPU minutes |\n|---|---|---|---|---|---|")
    for run in results["runs"]:
        shown = [f"{run['success'][name]:.3f}" for name in ("untrained", "cloned", "trained")]
        print(
            f"| {run['seed']} | {' | '.join(shown)} | {run['greedy']:.3f} | {sum(run['cpu_seconds'].values()) / 60:.0f} |"
        )
    found = {name: [run["success"][name] for run in results["runs"]] for name in ("untrained", "cloned", "trained")}
    gains = [after - before for before, after in zip(found["cloned"], found["trained"], strict=True)]
    for name, values in (found | {"trained less cloned": gains}).items():
        print(f"{name}: {mean_and_ends(values)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--smallest", action="store_true", help="four games, an iteration of one seed")
    parser.add_argument("--report", action="store_true", help="only the table, from what there is")
    options = parser.parse_args()
    torch.set_num_threads(1)  # rounding, and so what is learned, is then the same however many cores there are
    results = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"runs": []}
    wanted = (options.seed,) if options.seed is not None else SEEDS[:1] if options.smallest else SEEDS
    missing = [seed for seed in wanted if seed not in {run["seed"] for run in results["runs"]}]
    if missing and not options.report:
        games = Games(smallest=options.smallest)
        cloning = CLONE | {"copies": [COPIES, COPYING], "walkthroughs": [TIMES, CLONING]}
        results |= {"sizes": SIZES, "games": [CLONED, GAMES, HELD_OUT], "shape": SHAPE, "cloning": cloning}
        results |= {"algorithm": ALGORITHM | {"num_prompts": PROMPTS}, "random_commands": games.random}
        for seed in missing:
            found = learn(games, seed, smallest=options.smallest)
            results["runs"] = sorted([*results["runs"], found], key=lambda run: run["seed"])
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"seed {seed}: {found['success']}", flush=True)
    report(results)


if __name__ == "__main__":
    main()
