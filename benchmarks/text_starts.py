"""Whether members of a group meet the same game, with equal seeds as they are, and as ``groupwise check-env`` starts them.

    python benchmarks/text_starts.py                    all games: some minutes; writes results/text_starts.json
    python benchmarks/text_starts.py textarena:2048-v0  these alone, the others stay as they were
    python benchmarks/text_starts.py --table            only the table in docs/generated, from the results

In each of ten groups three members with one seed play the same turns, each one turn after the other, as in a rollout. The turns are
those that a member alone has sampled. Needs the extras text, textarena and textworld, and gem-llm.
"""

import argparse
import contextlib
import json
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from groupwise import TextEnv
from groupwise.config.run import TextTaskCfg
from groupwise.errors import EnvError
from groupwise.text.envs import ApartError, TextEnvs, check_text_env, play_samples
from groupwise.text.task import Start
from groupwise.text.tool_env import make_text_env

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "text_starts.json"
TABLE = HERE.parent / "docs" / "generated" / "text_starts.md"
GROUPS, MEMBERS, TURNS = 10, 3, 20

# --- two games as TRL's users write them: nothing is seeded ---


class Words(TextEnv):
    """A word of five letters, drawn by ``random.choice`` when the game begins."""

    words = ("apple", "brick", "cloud", "dance", "eagle", "flame", "grape", "house", "ivory", "jolly")

    def reset(self, *, seed=None, options=None):
        self.word, self.left = random.choice(self.words), 6
        return "Guess a word of five letters.", {}

    def step(self, text):
        self.left -= 1
        won = text == self.word
        marks = "".join(
            "G" if a == b else "Y" if a in self.word else "X" for a, b in zip(text, self.word, strict=False)
        )
        return marks, float(won), won or not self.left, False, {"success": won}

    def sample_action(self, rng):
        return str(rng.choice(self.words))


class Tiles(TextEnv):
    """2048 on four squares in a row, whose tiles are drawn by ``random`` in each turn."""

    def reset(self, *, seed=None, options=None):
        self.row = [0, 0, 0, 0]
        self._add()
        return str(self.row), {}

    def step(self, text):
        row = [tile for tile in (self.row if text == "left" else self.row[::-1]) if tile]
        for i in range(len(row) - 1):
            if row[i] == row[i + 1] != 0:
                row[i], row[i + 1] = 2 * row[i], 0
        row = [tile for tile in row if tile]
        row += [0] * (4 - len(row))
        self.row = row if text == "left" else row[::-1]
        lost = all(self.row)
        if not lost:
            self._add()
        return str(self.row), 0.0, lost, False, {}

    def sample_action(self, rng):
        return str(rng.choice(["left", "right"]))

    def _add(self):
        place = random.choice([i for i, tile in enumerate(self.row) if not tile])
        self.row[place] = random.choice([2, 2, 2, 4])


class Puzzle(TextEnv):
    """A task of reasoning-gym as a game of one turn."""

    def __init__(self, name: str) -> None:
        self.name = name

    def reset(self, *, seed=None, options=None):
        import reasoning_gym

        self.tasks = reasoning_gym.create_dataset(self.name, size=1, seed=seed)
        return self.tasks[0]["question"], {}

    def step(self, text):
        reward = float(self.tasks.score_answer(text, self.tasks[0]))
        return "", reward, True, False, {"success": reward == 1}

    def sample_action(self, rng):
        return str(rng.integers(100))


# --- games ---


def named(name: str, **settings: object) -> Callable[[], TextEnv]:
    return make_text_env(TextTaskCfg(env=name, env_kwargs=settings))


ARENA = (
    *("2048-v0", "Bandit-v0", "Blackjack-v0", "Countdown-v0", "Crosswords-v0", "Cryptarithm-v0", "FifteenPuzzle-v0"),
    *("FrozenLake-v0-random", "GuessTheNumber-v0", "LightsOut-v0", "LogicPuzzle-v0", "Mastermind-v0", "Minesweeper-v0"),
    *("PegJump-v0", "RushHour-v0", "Secretary-v0", "Set-v0", "Slitherlink-v0", "Sokoban-v0", "Sudoku-v0"),
    *("ThreeCardMonte-v0", "TowerOfHanoi-v0"),
)
GEM = ("Game2048", "GuessTheNumber", "Mastermind", "Minesweeper", "Sokoban", "Sudoku", "TowerofHanoi")
GAMES = {
    **{name: named(name) for game in ARENA for name in [f"textarena:{game}"]},
    **{name: named(name) for game in GEM for name in [f"gem:game:{game}-v0-easy"]},
    **{name: named(name) for name in ["textworld:rooms=1,objects=4,quest=2", "textworld:rooms=3,objects=6,quest=3"]},
    **{f"reasoning-gym:{name}": partial(Puzzle, name) for name in ("chain_sum", "countdown")},
    "words, as in TRL": Words,
    "2048 in a row, as in TRL": Tiles,
}

# --- what is measured ---


def parted(make: Callable[[], TextEnv], mode: str, kept: tuple[str, ...]) -> dict:
    """Turns at which groups part, 0 for the first observation, and how many turns were compared."""
    turns, compared = [], 0
    random.seed(0)  # where nothing else seeds it, figures can be repeated
    np.random.seed(0)
    for start in (Start(seed) for seed in range(1000, 1000 + GROUPS)):
        with contextlib.closing(TextEnvs(make, mode, kept)) as envs:
            [alone], [prompt] = envs.open(start, 1)
            played = play_samples(alone, start, prompt, max_turns=TURNS)
            try:
                members, _ = envs.open(start, MEMBERS)
            except ApartError:
                turns.append(0)
                continue
            for number, turn in enumerate(played, 1):
                running = [member for member in members if member.ending is None]
                for member in running:
                    member.step(turn)
                compared += 1
                if len(running) < MEMBERS or any(member.last != members[0].last for member in members):
                    turns.append(number)
                    break
                if members[0].ending is not None:
                    break
    return {"groups": len(turns), "turn": statistics.median(turns) if turns else None, "turns": compared}


def measure(make: Callable[[], TextEnv]) -> dict:
    """A game's row, or the error that it raised."""
    try:
        row = {"as it is": parted(make, "seed", ())}
        report = check_text_env(make, max_turns=TURNS)
        checked = {"mode": report.mode, "kept": report.kept, "turns": report.turns, "varies": report.start_varies}
        return row | {"check": checked, "started so": parted(make, report.mode, report.kept)}
    except EnvError as error:
        return {"error": str(error).splitlines()[0]}


def table(results: dict) -> str:
    """The results in Markdown."""
    lines = [
        "| game | equal seeds, as it is | members of groupwise | the check | turns compared |",
        "|---|---|---|---|---|",
    ]
    for name, row in results["games"].items():
        if "error" in row:
            lines.append(f"| `{name}` | error | error | {row['error'].replace('|', ' ')} | |")
            continue
        kept = " and ".join(f"`{generator}`" for generator in row["check"]["kept"])
        check = f"`{row['check']['mode']}`" + (f", {kept} kept" if kept else "")
        total = row["check"]["turns"] + row["started so"]["turns"]
        lines.append(f"| `{name}` | {said(row['as it is'])} | {said(row['started so'])} | {check} | {total} |")
    return "\n".join(lines) + "\n"


def said(found: dict) -> str:
    """How many groups parted, and when."""
    if not found["groups"]:
        return "alike"
    return f"**{found['groups']} of {GROUPS} part**, turn {found['turn']:g}"


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def main() -> None:
    """Measure what was asked for, and write results and table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("games", nargs="*", metavar="GAME", help="all by default")
    parser.add_argument("--table", action="store_true", help="only the table, from the results")
    parser.add_argument("--out", type=Path, default=RESULTS, help="results; the table is then beside them")
    args = parser.parse_args()
    results = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"games": {}}
    if not args.table:
        known = results.get("versions", {})
        results["versions"] = known | versions(("textarena", "gem-llm", "textworld", "reasoning-gym"))
        for name in args.games or GAMES:
            with contextlib.redirect_stdout(sys.stderr):
                results["games"][name] = measure(GAMES[name])
            print(name, results["games"][name], flush=True)
            results["games"] = {name: results["games"][name] for name in GAMES if name in results["games"]}
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    beside = TABLE if args.out == RESULTS else args.out.with_suffix(".md")
    beside.write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
