"""Losses as functions of the tensors that each one reads."""

import torch

from groupwise.algorithms import losses
from groupwise.algorithms.losses import Counts, LossInputs, UpdateStart, policy_ratio
from groupwise.config.algorithm import ObjectiveCfg
from groupwise.functional.reduce import local


def inputs(
    advantage, *, log_prob=None, ratio=None, old=None, sampled=None, mask=None, episode=None, number=1, chosen=None
):
    """Inputs of a trust region; what it does not read is NaN."""
    nan = torch.full_like(advantage, torch.nan)
    mask = torch.ones_like(advantage, dtype=torch.bool) if mask is None else mask
    log_prob, ratio, old, sampled = (nan if x is None else x for x in (log_prob, ratio, old, sampled))
    episode = torch.zeros_like(mask, dtype=torch.int64) if episode is None else episode
    return LossInputs(
        log_prob, old, sampled, ratio, advantage, mask, episode, number, mask if chosen is None else chosen
    )


def ratio_of(level):
    """The ratio of a level."""

    def ratio(log_prob, old, mask=None, ids=None, number=1):
        batch = {"old_log_prob": old, "loss_mask": mask, "episode_id": ids, "turn": ids}
        return policy_ratio(ObjectiveCfg(ratio=level), log_prob, batch, Counts(number, number))

    return ratio


token_ratio, turn_ratio, sequence_ratio, sequence_token_ratio, sequence_product_ratio = map(
    ratio_of, ("token", "turn", "sequence", "sequence_token", "sequence_product")
)


def reads(function, *tensors):
    """A loss of ``LossInputs`` as one of these tensors and its settings."""

    def of(*args):
        given = dict(zip(tensors, args, strict=False))
        return function(inputs(given.pop("advantage"), **given), *args[len(tensors) :])

    return of


clip_loss = reads(losses.clip, "ratio", "advantage")
clip_cov_loss = reads(losses.clip_cov, "ratio", "advantage", "chosen")
dual_clip_loss = reads(losses.dual_clip, "ratio", "advantage")
two_sided_loss = reads(losses.two_sided, "ratio", "advantage")
unclipped_loss = reads(losses.unclipped, "ratio", "advantage")
reinforce_loss = reads(losses.reinforce, "log_prob", "advantage")
cispo_loss = reads(losses.cispo, "log_prob", "ratio", "advantage")
sapo_loss = reads(losses.sapo, "ratio", "advantage")
gmpo_loss = reads(losses.gmpo, "log_prob", "old", "advantage", "mask", "episode", "number")
dppo_keeps = reads(losses.dppo_keeps, "log_prob", "sampled", "advantage")
off_policy_keeps = reads(losses.off_policy_keeps, "log_prob", "sampled", "advantage", "mask", "episode", "number")


def vespo_loss(log_prob, ratio, advantage, *, positive, negative):
    return losses.vespo(inputs(advantage, log_prob=log_prob, ratio=ratio), *positive, *negative)


def kl_cov_loss(log_prob, old, ratio, advantage, chosen, penalty):
    x = inputs(advantage, log_prob=log_prob, old=old, ratio=ratio, chosen=chosen)
    return losses.kl_cov(x, penalty=penalty)


def dppo_loss(log_prob, ratio, advantage, keeps, max_ratio):
    """With a sampler that gives the steps that are not kept another probability than bounds allow."""
    sampled = torch.where(keeps, log_prob.detach(), log_prob.detach() - advantage.sign() * 9)
    return losses.dppo(inputs(advantage, log_prob=log_prob, ratio=ratio, sampled=sampled), max_ratio=max_ratio)


def start_of(old, sampled, mask=None, episode=None, number=1):
    """An update's start ``[1, T]`` for corrections."""
    mask = torch.ones_like(old, dtype=torch.bool) if mask is None else mask
    episode = torch.zeros_like(mask, dtype=torch.int64) if episode is None else episode
    old, sampled, mask, episode = (x[None] for x in (old, sampled, mask, episode))
    batch = {"sample_log_prob": sampled, "episode_id": episode}
    return UpdateStart(batch, torch.ones_like(old), mask, old, number, 0, local)


def corrected(name, *start, **settings):
    """The weights of a correction."""
    return losses.CORRECTIONS[name](start_of(*start), **settings)[0]
