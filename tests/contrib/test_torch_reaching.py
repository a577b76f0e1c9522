import math

import numpy as np
import pytest
import torch

from groupwise.contrib.torch_tasks import TorchPointMass, TorchReacher
from groupwise.functional.row_random import RowRandom

PI = math.pi
GOAL = (0.0, 0.0)


def one_step(env, states, actions):
    """Next states, rewards and terminations of single rows."""
    zero = torch.zeros(len(states), dtype=torch.int64)
    return env.transition(torch.tensor(states), torch.tensor(actions), RowRandom(zero, zero))


def starts(ours, count=4000):
    seed = torch.arange(count)
    return ours(count).initial(RowRandom(seed, torch.zeros_like(seed)))


def test_point_mass_by_hand():
    # 1 kg, drag .5, .05 s: velocities keep .975, and 1 N adds .05; the second force is held at -1 N
    # v = (1.025, -.5375), x = .05 v = (.05125, -.026875); the goal is (.3, .4) away: .5; force costs .05 * 2
    states, reward, ended = one_step(TorchPointMass(1), [(0.0, 0.0, 1.0, -0.5, 0.35125, 0.373125)], [(1.0, -3.0)])
    torch.testing.assert_close(states, torch.tensor([[0.05125, -0.026875, 1.025, -0.5375, 0.35125, 0.373125]]))
    torch.testing.assert_close(reward, torch.tensor([-0.6]))
    assert ended.tolist() == [False]
    obs = TorchPointMass(1).observe(states)
    torch.testing.assert_close(obs, torch.tensor([[0.05125, -0.026875, 1.025, -0.5375, -0.3, -0.4]]))


def test_point_mass_coasts_to_a_halt():
    # .975 of the velocity is left each time; the way is .05 * .975 * (1 + .975 + ...) = 1.95 m for 1 m/s
    env, state = TorchPointMass(1), [(0.0, 0.0, 1.0, 0.0, *GOAL)]
    for _ in range(20):
        state = one_step(env, state, [(0.0, 0.0)])[0].tolist()
    assert state[0][2] == pytest.approx(0.60268, abs=1e-4)  # .975^20
    for _ in range(400):
        state = one_step(env, state, [(0.0, 0.0)])[0].tolist()
    assert state[0][:4] == pytest.approx([1.95, 0.0, 0.0, 0.0], abs=1e-3)


def test_point_mass_is_no_faster_than_its_bound():
    env, state = TorchPointMass(1), [(0.0, 0.0, 0.0, 0.0, *GOAL)]
    speeds = []
    for _ in range(400):
        state = one_step(env, state, [(1.0, -1.0)])[0].tolist()
        speeds.append(state[0][2:4])
    assert speeds[-1] == pytest.approx([2.0, -2.0], abs=1e-3)
    assert np.abs(speeds).max() <= env.observation_space.high[2]


def quarter_turn(pairs):
    """Each pair of columns turned by 90 degrees."""
    x, y = pairs[:, 0::2], pairs[:, 1::2]
    return torch.stack([-y, x], dim=2).flatten(1)


def test_no_direction_is_special_to_the_point_mass():
    random = torch.Generator().manual_seed(0)
    states, force = torch.randn(50, 6, generator=random), torch.randn(50, 2, generator=random)
    zero = torch.zeros(50, dtype=torch.int64)
    here, reward, _ = TorchPointMass(50).transition(states, force, RowRandom(zero, zero))
    there, same, _ = TorchPointMass(50).transition(quarter_turn(states), quarter_turn(force), RowRandom(zero, zero))
    assert torch.equal(quarter_turn(here), there)
    torch.testing.assert_close(reward, same)


def test_point_mass_starts_at_rest_anywhere():
    states = starts(TorchPointMass)
    assert torch.equal(states[:, 2:4], torch.zeros(4000, 2))
    free = states[:, [0, 1, 4, 5]]
    assert free.abs().max() <= 1
    torch.testing.assert_close(free.amin(0), -torch.ones(4), rtol=0, atol=5e-3)
    torch.testing.assert_close(free.amax(0), torch.ones(4), rtol=0, atol=5e-3)
    torch.testing.assert_close(free.T.cov(), torch.eye(4) / 3, rtol=0, atol=0.02)  # independent and uniform


class Gentle(TorchReacher):
    """Without damping, and with steps so short that a rate's change over one is its acceleration."""

    DAMPING = 0.0
    SECONDS = 1e-3


class Damped(TorchReacher):
    SECONDS = 1e-4


def acceleration(env, joints, rates, torque=(0.0, 0.0)):
    """Of both joints, in rad/s^2."""
    states, _, _ = one_step(env, [(*joints, *rates, *GOAL)], [torque])
    return ((states[0, 2:4] - torch.tensor(rates)) / env.SECONDS).tolist()


@pytest.mark.parametrize(
    ("joints", "torque", "expected"),
    [
        # rods of .5 m and .5 kg: I_1 = .125 / 3 + .125 = 1/6, I_2 = 1/24, coupling 1/16
        # stretched, the joints' mass matrix is [[1/3, 5/48], [5/48, 1/24]], with determinant 7/2304
        ((0.4, 0.0), (1.0, 0.0), (96 / 7, -240 / 7)),
        ((0.4, 0.0), (0.0, 1.0), (-240 / 7, 768 / 7)),
        # folded back, [[1/12, -1/48], [-1/48, 1/24]], with determinant 7/2304
        ((0.4, PI), (1.0, 0.0), (96 / 7, 48 / 7)),
        # at a right angle, the links do not accelerate each other: 6 rad/s^2 and 24 rad/s^2 for 1 N m on a link
        ((-0.7, PI / 2), (1.0, 0.0), (6.0, -6.0)),
        ((-0.7, -PI / 2), (0.0, 1.0), (-6.0, 30.0)),
    ],
)
def test_reacher_mass_matrix_by_hand(joints, torque, expected):
    assert acceleration(Gentle(1), joints, (0.0, 0.0), torque) == pytest.approx(expected, rel=2e-3, abs=0.05)


@pytest.mark.parametrize(
    ("bend", "expected"),
    [
        # at a right angle and turning at 2 rad/s as one: 1/6 p_1'' = 1/16 * 4 and 1/24 p_2'' = -1/16 * 4 for an elbow
        # bent to the left, which is flung open
        (PI / 2, (1.5, -7.5)),
        (-PI / 2, (-1.5, 7.5)),
        (0.0, (0.0, 0.0)),
    ],
)
def test_reacher_links_are_flung_outwards(bend, expected):
    assert acceleration(Gentle(1), (0.3, bend), (2.0, 0.0)) == pytest.approx(expected, abs=0.05)


def test_reacher_damping_acts_at_the_joints():
    # stretched: the inverse mass matrix is that of above, and .1 N m s takes .1 (0.2) N m at 1 (2) rad/s
    assert acceleration(Damped(1), (0.0, 0.0), (1.0, 0.0)) == pytest.approx([-9.6 / 7, 24 / 7], rel=0.02)
    assert acceleration(Damped(1), (0.0, 0.0), (0.0, 2.0)) == pytest.approx([48 / 7, -153.6 / 7], rel=0.02)


def rods(states, pieces=400):
    """Kinetic energy and angular momentum about the shoulder, summed over pieces of both rods."""
    (angle, bend), (rate, bending) = states.double()[:, :4].T.chunk(2)
    along = ((torch.arange(pieces, dtype=torch.float64) + 0.5) / pieces * 0.5)[:, None]

    def at(turn, speed, distance):
        place = distance * torch.stack([turn.cos(), turn.sin()])[:, None]
        return place, speed * torch.stack([-place[1], place[0]])

    first, first_velocity = at(angle, rate, along)
    elbow, elbow_velocity = at(angle, rate, torch.full((1, 1), 0.5, dtype=torch.float64))
    second, second_velocity = at(angle + bend, rate + bending, along)
    place = torch.cat([first, elbow + second], dim=1)
    velocity = torch.cat([first_velocity, elbow_velocity + second_velocity], dim=1)
    mass = 0.5 / pieces
    energy = 0.5 * mass * velocity.square().sum((0, 1))
    momentum = mass * (place[0] * velocity[1] - place[1] * velocity[0]).sum(0)
    return energy, momentum


def moving(count=300, speed=3.0):
    random = torch.Generator().manual_seed(0)
    states = 2 * torch.rand(count, 6, generator=random) - 1
    return states * torch.tensor([PI, PI, speed, speed, 0.9, 0.9]), random


def steps(env, states, torques):
    """The states before and after each step."""
    zero = torch.zeros(len(states), dtype=torch.int64)
    all_states = [states]
    for torque in torques:
        all_states.append(env.transition(all_states[-1], torque, RowRandom(zero, zero))[0])
    return all_states


class Frictionless(TorchReacher):
    """Without damping, in fifths of a step."""

    DAMPING = 0.0
    SECONDS = 0.01


def test_free_arm_keeps_energy_and_angular_momentum():
    states, _ = moving()
    before, *_, after = [rods(x) for x in steps(Frictionless(300), states, torch.zeros(100, 300, 2))]
    torch.testing.assert_close(after[0], before[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after[1], before[1], rtol=1e-4, atol=1e-5)


def test_torque_at_the_shoulder_is_all_that_changes_the_angular_momentum():
    states, random = moving()
    torques = 2 * torch.rand(100, 300, 2, generator=random) - 1
    first, *_, last = [rods(x)[1] for x in steps(Frictionless(300), states, torques)]
    torch.testing.assert_close(last - first, 0.01 * torques[:, :, 0].sum(0).double(), rtol=0, atol=1e-4)


def test_damping_never_adds_energy():
    states, _ = moving(speed=8.0)
    energies = torch.stack([rods(x)[0] for x in steps(TorchReacher(300), states, torch.zeros(50, 300, 2))])
    assert (energies.diff(dim=0) <= 1e-6).all()
    assert (energies[-1] < 0.4 * energies[0]).all()


def test_stretched_arm_turns_as_one_by_a_twentieth_of_its_rate(monkeypatch):
    monkeypatch.setattr(TorchReacher, "DAMPING", 0.0)
    states, _, _ = one_step(TorchReacher(1), [(0.5, 0.0, 2.0, 0.0, *GOAL)], [(0.0, 0.0)])
    torch.testing.assert_close(states, torch.tensor([[0.6, 0.0, 2.0, 0.0, *GOAL]]))


@pytest.mark.parametrize(
    ("joints", "tip"),
    [
        ((0.0, 0.0), (1.0, 0.0)),
        ((PI / 2, 0.0), (0.0, 1.0)),
        ((PI / 2, -PI / 2), (0.5, 0.5)),
        ((0.0, PI / 2), (0.5, 0.5)),
        ((1.0, PI), (0.0, 0.0)),
        ((PI / 3, PI / 3), (0.0, math.sqrt(0.75))),
    ],
)
def test_reacher_observes_its_joints_the_goal_and_the_tip(joints, tip):
    obs = TorchReacher(1).observe(torch.tensor([[*joints, 3.0, -4.0, 0.2, -0.3]]))
    first, second = joints
    expected = [math.cos(first), math.cos(second), math.sin(first), math.sin(second), 0.2, -0.3, 3.0, -4.0]
    torch.testing.assert_close(obs, torch.tensor([[*expected, tip[0] - 0.2, tip[1] + 0.3]]), rtol=0, atol=1e-6)


def test_reacher_pays_for_distance_and_torque():
    at_rest = (0.0, 0.0, 0.0, 0.0, 0.7, 0.4)  # the tip at (1, 0) is .5 from the goal
    _, reward, ended = one_step(TorchReacher(1), [at_rest], [(0.0, 0.0)])
    torch.testing.assert_close(reward, torch.tensor([-0.5]))
    assert ended.tolist() == [False]
    env = TorchReacher(3)
    states, reward, _ = one_step(env, [at_rest] * 3, [(0.5, -0.5), (1.0, 1.0), (3.0, 9.0)])
    distance = env.observe(states)[:, 8:].norm(dim=1)
    torch.testing.assert_close(reward + distance, torch.tensor([-0.05, -0.2, -0.2]))
    assert torch.equal(states[1], states[2])  # more than 1 N m is not to be had


def test_left_is_no_other_than_right_to_the_reacher():
    states, random = moving()
    torques = 2 * torch.rand(1, 300, 2, generator=random) - 1
    mirror = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, -1.0])
    [_, here], [_, there] = (steps(TorchReacher(300), *x) for x in ((states, torques), (states * mirror, -torques)))
    assert torch.equal(here * mirror, there)


def test_reacher_starts_stretched_with_a_goal_within_reach():
    states = starts(TorchReacher)
    assert torch.equal(states[:, 2:4], torch.zeros(4000, 2))
    torch.testing.assert_close(states[:, :2].amin(0), torch.full((2,), -0.1), rtol=0, atol=1e-3)
    torch.testing.assert_close(states[:, :2].amax(0), torch.full((2,), 0.1), rtol=0, atol=1e-3)
    goal = states[:, 4:]
    distance = goal.norm(dim=1)
    assert 0.895 < distance.max() <= 0.9 + 1e-6
    for part in (0.25, 0.5, 0.75):  # equally likely anywhere: the share within a radius is that of the area
        assert float((distance < 0.9 * math.sqrt(part)).float().mean()) == pytest.approx(part, abs=0.03)
    torch.testing.assert_close(goal.T.cov(), torch.eye(2) * 0.9**2 / 4, rtol=0, atol=0.01)
    torch.testing.assert_close(goal.mean(0), torch.zeros(2), rtol=0, atol=0.03)
