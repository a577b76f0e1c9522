"""Runs ``groupwise check-env`` on many environments, and writes the table in ``docs/generated/environments.md``.

    python docs/check_envs.py                       all of them: some minutes
    python docs/check_envs.py Ant-v5 CartPole-v1    only these, the others stay as they were
    python docs/check_envs.py --page                only the page, from the data

What was found is kept in ``docs/generated/environments.json``, or in another folder (``--out``). Needs the extras atari, box2d, minigrid and mujoco.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "generated"
DATA = FOLDER / "environments.json"
PAGE = FOLDER / "environments.md"

FAMILIES: dict[str, list[str]] = {
    "Classic control": ["CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", "Pendulum-v1"],
    "Toy text": [
        "Blackjack-v1",
        "FrozenLake-v1",
        "FrozenLake8x8-v1",
        "CliffWalking-v1",
        "CliffWalkingSlippery-v1",
        "Taxi-v4",
    ],
    "Box2D": [
        "LunarLander-v3",
        "LunarLanderContinuous-v3",
        "BipedalWalker-v3",
        "BipedalWalkerHardcore-v3",
        "CarRacing-v3",
    ],
    "MuJoCo": [
        f"{name}-v5"
        for name in (
            *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"),
            *("InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"),
        )
    ],
    "MiniGrid": [
        "MiniGrid-Empty-5x5-v0",
        *(
            f"MiniGrid-{name}-v0 (ImgObsWrapper)"
            for name in (
                *("Empty-5x5", "Empty-Random-6x6", "FourRooms", "DoorKey-5x5", "LavaCrossingS9N1", "KeyCorridorS3R1"),
                *("Dynamic-Obstacles-5x5", "MultiRoom-N2-S4", "Unlock", "Fetch-5x5-N2"),
            )
        ),
    ],
    "Atari": [
        *(
            f"ALE/{name}-v5"
            for name in ("Breakout", "Pong", "Seaquest", "SpaceInvaders", "Qbert", "BeamRider", "Enduro", "Freeway")
        ),
        "ALE/Breakout-v5 (AtariPreprocessing, FrameStackObservation)",
    ],
}

NOTE = "<!-- Written by docs/check_envs.py from environments.json. -->"


def main() -> None:
    """Check what was asked for, and write data and page."""
    names = [name for family in FAMILIES.values() for name in family]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help="all by default")
    parser.add_argument("--page", action="store_true", help="only the page, from the data")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of data and page")
    args = parser.parse_args()
    kept, written = args.out / DATA.name, args.out / PAGE.name
    data: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {"found": {}}
    if not args.page:
        from groupwise.check import check_env

        register()
        data["versions"] = {name: version(name) for name in ("gymnasium", "ale-py", "Box2D", "minigrid", "mujoco")}
        for name in args.names or names:
            data["found"][name] = check_env(checked(name)).to_dict()
            print(name, "trains" if data["found"][name]["training"]["value"] else "refused", flush=True)
            data["found"] = {name: data["found"][name] for name in names if name in data["found"]}
            kept.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    written.write_text(page(data), encoding="utf-8")


def register() -> None:
    """Make Atari's and MiniGrid's ids known to Gymnasium."""
    import ale_py
    import gymnasium
    import minigrid

    gymnasium.register_envs(ale_py)
    gymnasium.register_envs(minigrid)


def checked(name: str) -> str | Callable[[], Any]:
    """The environment of a row: an id, or a callable that wraps it as the name says."""
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    env_id, _, wrappers = name.partition(" (")
    if wrappers == "ImgObsWrapper)":
        from minigrid.wrappers import ImgObsWrapper

        return lambda: ImgObsWrapper(gymnasium.make(env_id))
    if wrappers:
        return lambda: FrameStackObservation(AtariPreprocessing(gymnasium.make(env_id, frameskip=1)), 4)
    return env_id


def page(data: dict[str, Any]) -> str:
    """The page: findings, family by family."""
    found = data["found"]
    present = {title: [name for name in names if name in found] for title, names in FAMILIES.items()}
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    distinct = len({name.partition(" (")[0] for name in found})
    return (
        "\n\n".join(
            [
                "# Environments",
                NOTE,
                f"The result of `groupwise check-env` for {distinct} environments, some also with wrappers ({versions}).",
                "- `training uses`: the [start mode](../starts.md) in which a group shares its start, bit for bit, and "
                "`env.vectorization`.\n"
                "- `steps random`: members with their own random numbers drifted apart within some tens of random steps.",
                *(text for title, names in present.items() if names for text in facts(title, names, found)),
            ]
        )
        + "\n"
    )


def facts(title: str, names: list[str], found: dict[str, Any]) -> list[str]:
    """Table of the findings, and the reasons below it."""
    header = ("environment", "observation", "action", "step limit", "start depends on seed", "steps random", "training uses")  # fmt: skip
    rows: list[tuple[str, ...]] = []
    notes: dict[str, list[str]] = {}
    for name in names:
        report = found[name]
        for what, finding in refusals(report).items():
            reason = finding["reason"].replace(f"{report['env_id']} ", "it ")
            if what == "training" and finding["fix"]:
                reason = f"{reason}; fix: {finding['fix']}"
            notes.setdefault(f"{what}: {reason}", []).append(f"`{name}`")
        rows.append(
            (
                f"`{name}`",
                shown(report["observation"]),
                shown(report["action"]),
                shown(report["max_episode_steps"]),
                shown(report["start_varies"]),
                shown(report["noise_varies"]),
                used(report),
            )
        )
    remarks = "\n".join(f"- {', '.join(concerned)}, {note}" for note, concerned in notes.items())
    return [f"## {title}", table(header, rows), *([remarks] if remarks else [])]


def used(report: dict[str, Any]) -> str:
    """What training uses."""
    return shown(report["training"], lambda value: f"{value['start_mode']}, {value['vectorization']}")


def refusals(report: dict[str, Any]) -> dict[str, Any]:
    """Findings that need a reason: only the first one where the others follow from it."""
    if report["observation"]["value"] is None:
        return {"observation": report["observation"]}
    findings = {key: report[key] for key in ("action", "start_varies", "noise_varies", "training")}
    return {what: finding for what, finding in findings.items() if finding["value"] is None}


def shown(finding: dict[str, Any], show: Callable[[Any], str | None] = str) -> str:
    """A finding in a word or two."""
    value = finding["value"]
    if value is None:
        return "no"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{show(value)}"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    header = tuple(header)
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    main()
