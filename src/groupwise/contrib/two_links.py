"""The motion of a planar arm of two links, which swings in one task and reaches in another; and how to integrate it."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Pair = Float[Tensor, "2 row"]
"""A number of each link; links come first, so that every operation runs over neighbours in memory."""


class TwoLinks:
    """Equations of motion of two rigid links in a plane, the second one at the end of the first.

    They are the same for both links in absolute angles: with ``p_i`` the angle of link ``i`` from a direction that is
    fixed, ``j`` the other link, ``I`` inertia and ``k`` the coupling,
    ``I_i p_i'' + k cos(p_i - p_j) p_j'' + k sin(p_i - p_j) p_j'^2 = force_i``.

    Args:
        inertia: of each link, in kg m^2. The first one's about its fixed end, with the second's mass at its other end;
            the second one's about the joint between them.
        coupling: mass of the second link times length of the first times distance from the joint to the second's
            centre of mass, in kg m^2.

    Source: Spong, Hutchinson, Vidyasagar, "Robot Modeling and Control", 2006, chapter 7: the planar elbow manipulator
    with remotely driven link, whose angles are absolute.
    """

    def __init__(self, inertia: tuple[float, float], coupling: float, device: torch.device | str = "cpu") -> None:
        first, second = inertia
        self._coupling = coupling
        self._other = torch.tensor([[second], [first]], dtype=torch.float32, device=device)
        self._product = torch.tensor([[first * second]], dtype=torch.float32, device=device)

    def acceleration(self, angle: Pair, rate: Pair, force: Pair) -> Pair:
        """Second derivatives [2, N] of the absolute angles, in rad/s^2.

        Args:
            force: generalised ones on the absolute angles, in N m: the torque of the joint between the links counts
                negatively for the first link.
        """
        lean = angle - angle.flip(0)
        cos = lean.cos()
        force = torch.addcmul(force, lean.sin(), rate.flip(0).square(), value=-self._coupling)
        solved = torch.addcmul(self._other * force, cos, force.flip(0), value=-self._coupling)
        return solved / torch.addcmul(self._product, cos, cos, value=-(self._coupling**2))


def absolute(joint: Pair) -> Pair:
    """Angles (or rates) of the links from those of the joints: the second joint counts from the first link."""
    return joint.cumsum(0)


def relative(link: Pair) -> Pair:
    """Angles (or rates) of the joints from those of the links."""
    first, second = link.unbind(0)
    return torch.stack([first, second - first])


def on_links(torque: Pair) -> Pair:
    """Forces on the absolute angles from torques at the joints: what the second one gives, the first link bears."""
    first, second = torque.unbind(0)
    return torch.stack([first - second, second])


def runge_kutta(
    acceleration: Callable[[Tensor, Tensor], Tensor], angle: Tensor, rate: Tensor, seconds: float
) -> tuple[Tensor, Tensor]:
    """Angles and rates after one step of the classical method of fourth order, for accelerations of (angle, rate).

    It is the usual method for the state (angle, rate). An angle's slope is a rate, which is known; so the stages of the
    angle are written out, and only those of the rate are computed.

    Source: Hairer, Nørsett, Wanner, "Solving Ordinary Differential Equations I", 1993, section II.1, and II.14 for
    equations of second order.
    """
    half = seconds / 2
    middle = torch.add(angle, rate, alpha=half)
    first = acceleration(angle, rate)
    second = acceleration(middle, torch.add(rate, first, alpha=half))
    third = acceleration(torch.add(middle, first, alpha=half * half), torch.add(rate, second, alpha=half))
    end = torch.add(angle, rate, alpha=seconds)
    fourth = acceleration(torch.add(end, second, alpha=half * seconds), torch.add(rate, third, alpha=seconds))
    inner = second + third
    angle = torch.add(end, first + inner, alpha=seconds * seconds / 6)
    rate = torch.add(rate, torch.add(first + fourth, inner, alpha=2), alpha=seconds / 6)
    return angle, rate
