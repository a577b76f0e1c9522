"""Types in the signatures of recipes. Imports torch, so recipes import it under ``TYPE_CHECKING`` only."""

from torch import Tensor

from groupwise.algorithms.advantages import CreditInput, Scores
from groupwise.algorithms.loss import Counts, UpdateStart
from groupwise.policies.base import Batch, Policy

__all__ = ["Batch", "Counts", "CreditInput", "Policy", "Scores", "Tensor", "UpdateStart"]
