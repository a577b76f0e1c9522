import ast
import os
import runpy
import subprocess
import sys

import gymnasium
import pytest
import torch
from scripts import ROOT, load

FILE = ROOT / "examples" / "grpo_from_scratch.py"
TINY = ["--total-steps", "300", "--steps", "150"]


scratch = load(FILE)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Two episodes, with rewards 1, 0, 2 and 0, 1; their returns to go are 3, 2, 2 and 1, 1."""
    return torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]]), torch.tensor([[True, True, True], [True, True, False]])


def episodes(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Episodes with a reward of 1 on each step."""
    alive = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return alive.float(), alive


@pytest.mark.slow
def test_script_trains_tests_draws_and_shows(tmp_path):
    environment = {**os.environ, "SDL_VIDEODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
    command = [sys.executable, "-W", "error", FILE, *TINY, "--plot", tmp_path / "curve.png", "--render"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.splitlines()[-1].endswith("over 100 fresh episodes")


# in this process, which has torch imported already; each is the whole script all the same
@pytest.mark.parametrize(
    "choice",
    [*(("--variant", name) for name in scratch.VARIANTS), *(("--algorithm", name) for name in scratch.DEFAULTS)],
)
def test_every_variant_and_algorithm_runs(choice, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(FILE), *TINY, *choice])
    runpy.run_path(str(FILE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step ")
    assert lines[-1].startswith("greedy mean ")


@pytest.mark.parametrize("words", [["--epochs", "0"], ["--group-size", "1"]])
def test_numbers_without_a_meaning_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        scratch.settings(words)
    assert "--group-size must be at least 2; --epochs, " in capsys.readouterr().err


def test_keeps_its_promises_of_size_and_independence():
    source = FILE.read_text()
    assert len(source.splitlines()) <= 255
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    assert others == {"torch", "numpy", "gymnasium", "matplotlib"}


def test_same_seed_same_numbers():
    first, second, other = (
        scratch.train(scratch.settings([*TINY, "--seed", seed, "--kl-coef", "0.1"]))[1] for seed in ("3", "3", "4")
    )
    assert first == second
    assert first != other


def test_learns_within_a_few_thousand_steps():
    _, history = scratch.train(scratch.settings(["--total-steps", "5000"]))
    # a random policy stays up for about 22 steps
    assert history[-1]["return_mean"] > 60


def test_reference_renewed_each_iteration_is_the_behaviour_policy():
    _, history = scratch.train(scratch.settings([*TINY, "--epochs", "1", "--minibatch", "9999"]))
    # the first gradient step of an iteration is taken where the policy still equals the one that played
    assert [row["approx_kl"] for row in history] == pytest.approx([0.0] * len(history), abs=1e-6)
    assert history[-1]["ref_kl"] > 1e-7
    # one full-batch step: the mean of ratio * A at ratio 1 is the mean of A, which is 0, and its gradient is not
    assert all(abs(row["policy_loss"]) < 1e-6 < 1e-2 < row["grad_norm"] for row in history)
    _, renewed = scratch.train(
        scratch.settings([*TINY, "--epochs", "1", "--minibatch", "9999", "--reference-every", "1"])
    )
    assert [row["ref_kl"] for row in renewed] == pytest.approx([0.0] * len(renewed), abs=1e-7)


def test_members_share_the_start_alone_and_ends_of_episodes_are_padded():
    torch.manual_seed(0)
    envs = [gymnasium.make("CartPole-v1", max_episode_steps=12) for _ in range(4)]
    group = scratch.play(envs, [7, 7, 7, 8], scratch.network(4, 2, last_gain=0.01))
    assert torch.equal(group.obs[0, 0], group.obs[1, 0])
    assert torch.equal(group.obs[0, 0], group.obs[2, 0])
    assert not torch.equal(group.obs[0, 0], group.obs[3, 0])
    assert not torch.equal(group.action[0, :8], group.action[1, :8])
    assert group.obs.shape == (4, 13, 4)
    assert torch.equal(group.reward, group.alive.float())
    for obs, alive, terminated in zip(group.obs, group.alive, group.terminated, strict=True):
        length = int(alive.sum())
        assert alive[:length].all()
        # a fall: more than 12 degrees off upright, or 2.4 off the middle; it may happen on the last step allowed
        assert terminated == (obs[length, 2].abs() > 0.20944) | (obs[length, 0].abs() > 2.4)
        assert torch.equal(obs[length:], obs[length].expand_as(obs[length:]))


# ------------------------------------------------------------------------------------------------- the credit


# returns with gamma 0.5: R_2 = 2, R_1 = 0 + 0.5 * 2 = 1, R_0 = 1 + 0.5 * 1 = 1.5; R_1 = 1, R_0 = 0 + 0.5 * 1 = 0.5
# return_to_go: 3, 2, 2, 1, 1: mean 1.8, population deviation sqrt((1.44 + 0.04 + 0.04 + 0.64 + 0.64) / 5) = 0.748331
# per_step: step 0: 3 and 1; step 1: 2 and 1; both one deviation off their mean. Step 2: nobody to be compared with
# leave_one_out: 3 - 1, 2 - 1, 2 - 0 (the member is over); 1 - 3, 1 - 2
@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda: scratch.returns(pair()[0], 0.5), [[1.5, 1.0, 2.0], [0.5, 1.0, 0.0]]),
        (lambda: scratch.return_to_go(*pair(), 1.0), [[1.603567, 0.267261, 0.267261], [-1.069045, -1.069045, 0.0]]),
        (lambda: scratch.per_step(*pair(), 1.0), [[1.0, 1.0, 0.0], [-1.0, -1.0, 0.0]]),
        (lambda: scratch.leave_one_out(*pair(), 1.0), [[2.0, 1.0, 2.0], [-2.0, -1.0, 0.0]]),
    ],
    ids=["returns", "return_to_go", "per_step", "leave_one_out"],
)
def test_credit_by_hand(found, expected):
    torch.testing.assert_close(found(), torch.tensor(expected), atol=1e-3, rtol=0)


def test_outcome_by_hand():
    # scores 1, 0, 0, 1, 0, 0, 0, 0: mean 0.25, population deviation sqrt(0.25 * 0.75) = 0.4330127
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])[:, None] * torch.tensor([0.0, 1.0])
    alive = torch.ones(8, 2, dtype=torch.bool)
    alive[7, 1] = False
    expected = torch.where(reward.sum(dim=1) > 0, 1.732051, -0.577350)[:, None] * alive
    torch.testing.assert_close(scratch.outcome(reward, alive, 1.0), expected, atol=1e-3, rtol=0)


def test_gae_by_hand():
    # gamma 0.5, lambda 0.5. First member, cut by the time limit after two steps, so that V(final) = 4 counts:
    #   A_1 = 1 + 0.5 * 4 - 2 = 1, A_0 = 1 + 0.5 * 2 - 1 + 0.25 * A_1 = 1.25
    # second member, fallen after one step, so that no value counts after it: A_0 = 1 - 3 = -2
    group = scratch.Group(
        obs=torch.zeros(2, 3, 4),
        action=torch.zeros(2, 2),
        log_probs=torch.zeros(2, 2, 2),
        reward=torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        alive=torch.tensor([[True, True], [True, False]]),
        terminated=torch.tensor([False, True]),
    )
    value = torch.tensor([[1.0, 2.0, 4.0], [3.0, 9.0, 9.0]])
    expected = torch.tensor([[1.25, 1.0], [-2.0, 0.0]])
    torch.testing.assert_close(scratch.gae(group, value, 0.5, gae_lambda=0.5), expected)


@pytest.mark.parametrize("name", ["outcome", "per_step", "leave_one_out"])
def test_equal_episodes_teach_nothing(name):
    reward, alive = episodes(30, 30, 30, 30)
    assert torch.equal(scratch.VARIANTS[name](reward, alive, 1.0), torch.zeros(4, 30))


def test_return_to_go_blames_the_clock():
    # four perfect episodes: returns 500 ... 1, mean 250.5, deviation sqrt((500^2 - 1) / 12) = 144.3373
    advantage = scratch.return_to_go(*episodes(500, 500, 500, 500), 1.0)
    torch.testing.assert_close(advantage[:, 0], torch.full((4,), 249.5 / 144.3373), atol=1e-4, rtol=0)
    torch.testing.assert_close(advantage[:, -1], torch.full((4,), -249.5 / 144.3373), atol=1e-4, rtol=0)


def test_the_last_survivor_is_credited_by_leave_one_out_only():
    reward, alive = episodes(10, 10, 10, 50)
    assert torch.equal(scratch.per_step(reward, alive, 1.0)[3, 10:], torch.zeros(40))
    assert torch.equal(scratch.leave_one_out(reward, alive, 1.0)[3, 10:], torch.arange(40.0, 0.0, -1.0))


@pytest.mark.parametrize("name", list(scratch.VARIANTS))
def test_credit_follows_the_member_not_its_place(name):
    reward, alive = episodes(3, 9, 5, 7)
    order = torch.tensor([2, 0, 3, 1])
    credit = scratch.VARIANTS[name]
    torch.testing.assert_close(credit(reward[order], alive[order], 0.9), credit(reward, alive, 0.9)[order])
    assert (credit(reward, alive, 0.9)[~alive] == 0).all()
