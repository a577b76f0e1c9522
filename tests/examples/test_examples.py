"""Every example runs, with a small budget and without warnings, and says what it promises."""

import json
import re
from pathlib import Path

import pytest
from forked import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
ELSEWHERE = {"flow_policy", "grpo_from_scratch", "mujoco_warp_push", "ray_tune_search", "text_copy", "text_game"}
"""Tested in files of their own."""
NUMBER = r"(-?\d+(?:\.\d+)?)"


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def check_python_api(out: str, run_dir: Path) -> None:
    low, high = map(float, re.search(rf"over 20 fresh episodes: .* \[{NUMBER}, {NUMBER}\]", out).groups())
    assert 0 < low <= high <= 500
    # 300 steps of 8 environments x 32 steps are two iterations; one of GRPO takes about 1,000
    assert re.search(rf"PPO from parts: 2 iterations, return {NUMBER}, entropy 0\.\d+", out)
    assert re.search(rf"GRPO from parts: 1 iterations, return {NUMBER}, entropy 0\.\d+", out)


def check_custom_environment(out: str, run_dir: Path) -> None:
    start, later = (line.split("[")[1].rstrip("]").split() for line in out.splitlines() if line.startswith("offsets"))
    assert len(set(start)) == 1
    assert len(set(later)) == 4
    assert 0 < float(re.search(rf"trained: {NUMBER} of at most 100", out)[1]) <= 100
    assert re.search(rf"loaded again: {NUMBER} over 10 fresh episodes", out)


def check_torch_native(out: str, run_dir: Path) -> None:
    check_custom_environment(out, run_dir)
    assert float(re.search(rf"{NUMBER} million steps a second", out)[1]) > 0


def check_custom_algorithm(out: str, run_dir: Path) -> None:
    assert re.search(rf"half way: {NUMBER}", out)
    assert re.search(rf"imitate_best with elite 0\.5: {NUMBER} in the end", out)
    metrics = metrics_of(run_dir)
    assert [entry["iteration"] for entry in metrics] == [1, 2]  # the second after the resume
    assert all(0 < entry["train/elite_share"] < 1 for entry in metrics)


def check_custom_credit(out: str, run_dir: Path) -> None:
    # of its three members, the worst beats none and the next one: (0 - 3) / 3 and (1 - 2) / 3
    assert "returns 1, 2, 3, 1000 are worth [-1.   -0.33  0.33  1.  ]" in out
    assert re.search(rf"trained with the credit rule 'wins': {NUMBER}", out)


def check_callbacks(out: str, run_dir: Path) -> None:
    assert "stopped by solved: 1 or more, 2 times in a row, after 4,096 steps" in out
    assert [entry["rollout/cart_distance"] > 0 for entry in metrics_of(run_dir)] == [True, True]


def check_continuous_control(out: str, run_dir: Path) -> None:
    for algorithm in ("ppo", "grpo"):
        score, low, high = map(float, re.search(rf"{algorithm}: {NUMBER} \[{NUMBER}, {NUMBER}\]", out).groups())
        assert -2000 < low < score < high < 0
        assert abs(float(re.search(rf"{algorithm}: first torque {NUMBER}, of Box\(-2\.0, 2\.0", out)[1])) <= 2
        assert metrics_of(run_dir / algorithm)


def check_pixels(out: str, run_dir: Path) -> None:
    assert 0 <= int(re.search(r"catches (\d+)% of 20 balls", out)[1]) <= 100


def check_distributed(out: str, run_dir: Path) -> None:
    # one iteration: 2 processes x 32 environments x 64 steps; only one of them speaks
    assert re.search(rf"^2 process\(es\), 4,096 steps in all: {NUMBER}\n$", out)


def check_sb3_grpo(out: str, run_dir: Path) -> None:
    steps, mean = re.search(rf"after (\d+) steps: {NUMBER} \+- {NUMBER} over 20 fresh episodes", out).groups()[:2]
    assert 1000 <= int(steps) < 2024  # the last rollout may take 2 x 512 steps more
    assert 0 < float(mean) <= 500
    assert (run_dir / "model.zip").exists()


def check_optuna_search(out: str, run_dir: Path) -> None:
    best, count, score = re.search(rf"trial (\d) of (\d) is the best, {NUMBER}: {{'learning_rate'", out).groups()
    assert int(count) == 4
    finals = [metrics_of(run_dir / f"trial-{trial}")[-1]["eval/return_mean"] for trial in range(4)]
    assert finals[int(best)] == pytest.approx(float(score), abs=0.06)


ROW_OF_ARM = rf"^(clone|after GRPO) +{NUMBER}% +{NUMBER}% to +{NUMBER}%   "


def check_robot_arm(out: str, run_dir: Path) -> None:
    rows = re.findall(ROW_OF_ARM + "none", out, re.MULTILINE)
    assert [name for name, *_ in rows] == ["clone", "after GRPO"]
    for _, *shares in rows:
        success, low, high = map(float, shares)
        assert 0 <= low <= success <= high <= 100
    assert (run_dir / "demos" / "meta" / "info.json").exists()
    assert all(0 <= entry["rollout/success_rate"] <= 1 for entry in metrics_of(run_dir / "grpo"))


CASES = {
    "python_api": (["--total-steps", "300"], check_python_api),
    "custom_environment": (["--total-steps", "200"], check_custom_environment),
    "torch_native": (["--total-steps", "200"], check_torch_native),
    "custom_algorithm": (["--total-steps", "4000"], check_custom_algorithm),
    "custom_credit": (["--total-steps", "200"], check_custom_credit),
    "callbacks": (["--total-steps", "6000", "--score", "1"], check_callbacks),
    "continuous_control": (["--total-steps", "200"], check_continuous_control),
    "pixels": (["--total-steps", "200"], check_pixels),
    "robot_arm": (
        ["--demos=1", "--clone-steps=200", "--total-steps=1", "--num-envs=8", "--episodes=1"],
        check_robot_arm,
    ),
    "optuna_search": (["--trials", "4", "--total-steps", "1000"], check_optuna_search),
    "distributed": (["--total-steps", "200"], check_distributed),
    "sb3_grpo": (["--total-steps", "1000"], check_sb3_grpo),
}


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*CASES, *ELSEWHERE}


@pytest.mark.parametrize("name", CASES)
def test_example(name: str, tmp_path: Path):
    arguments, check = CASES[name]
    run_dir = tmp_path / "run"
    script, ranks = EXAMPLES / f"{name}.py", 2 if name == "distributed" else 1
    two = name == "robot_arm"  # whose environments take longest to make
    out = run_script(script, *arguments, "--run-dir", run_dir, folder=tmp_path, ranks=ranks, two_episodes=two)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    check(out, run_dir)


@pytest.mark.learn
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [100, 101, 102])
def test_the_robot_arm_learns_from_success(seed: int, tmp_path: Path):
    words = ["--seed", seed, "--run-dir", tmp_path / "run"]
    out = run_script(EXAMPLES / "robot_arm.py", *words, folder=tmp_path, seconds=3500)
    clone, trained = (float(success) for _, success, *_ in re.findall(ROW_OF_ARM, out, re.MULTILINE))
    assert trained >= 70
    assert trained >= clone + 20


def test_a_budget_of_one_iteration_needs_no_second_half(tmp_path: Path):
    run_script(EXAMPLES / "custom_algorithm.py", "--total-steps", "2000", "--run-dir", tmp_path / "run")
    assert len(metrics_of(tmp_path / "run")) == 1


def test_a_search_with_optuna_continues(tmp_path: Path):
    script, words = (
        EXAMPLES / "optuna_search.py",
        ("--trials", "1", "--total-steps", "300", "--run-dir", tmp_path / "run"),
    )
    outputs = [run_script(script, *words, folder=tmp_path) for _ in range(2)]
    assert [re.search(r"trial \d of (\d) is the best", out)[1] for out in outputs] == ["1", "2"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"study.db", "trial-0", "trial-1"}
