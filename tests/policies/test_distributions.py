import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import distributions

from groupwise.config.policy import PolicyCfg
from groupwise.data.rollout import TensorSpec
from groupwise.errors import ConfigError, UnsupportedSpaceError
from groupwise.policies.heads import SquashedGaussian, make_head, unexplored

NVEC = np.array([[2, 5], [3, 1]])
BOX = spaces.Box(np.array([-1.0, -2.0, 0.0], np.float32), np.array([1.0, 2.0, 5.0], np.float32))
SPACES = {
    "discrete": spaces.Discrete(4),
    "discrete_start": spaces.Discrete(4, start=-3),
    "multi_discrete": spaces.MultiDiscrete(NVEC, start=np.array([[1, 0], [-2, 7]])),
    "multi_discrete_equal": spaces.MultiDiscrete([3, 3]),
    "multi_binary": spaces.MultiBinary((2, 2)),
    "box": BOX,
    "box_scalar": spaces.Box(-1, 1, ()),
    "box_matrix": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "squash": BOX,
    "squash_scalar": spaces.Box(3, 4, ()),
}


def head_of(name):
    return make_head(SPACES[name], PolicyCfg(squash_output=name.startswith("squash")))


def params_of(head, *batch, seed=0):
    return torch.randn(*batch, head.num_params, generator=torch.Generator().manual_seed(seed))


def peer(name, params):
    """The same distribution by torch.distributions, over flat actions."""
    if name.startswith("discrete"):
        return distributions.Categorical(logits=params)
    if name == "multi_binary":
        return distributions.Independent(distributions.Bernoulli(logits=params), 1)
    mean, log_std = params.chunk(2, dim=-1)
    return distributions.Independent(distributions.Normal(mean, log_std.exp()), 1)


def splits(params, sizes):
    return [distributions.Categorical(logits=logits) for logits in params.split(sizes, dim=-1)]


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("batch", [(), (7,), (2, 3)])
def test_shapes_dtypes_and_membership(name, batch):
    head = head_of(name)
    params = params_of(head, *batch)
    for action in (head.sample(params), head.mode(params)):
        assert TensorSpec(tuple(action.shape[len(batch) :]), action.dtype) == head.action_spec
        assert head.log_prob(params, action).shape == head.entropy(params).shape == batch
        sent = head.env_action(action).reshape(-1, *SPACES[name].shape).numpy().astype(SPACES[name].dtype)
        assert all(SPACES[name].contains(np.asarray(one)) for one in sent)
    assert head.kl(params, params_of(head, *batch, seed=1)).shape == batch


@pytest.mark.parametrize("name", SPACES)
def test_score_is_log_prob_and_entropy(name):
    head = head_of(name)
    params = params_of(head, 5)
    action = head.sample(params)
    log_prob, entropy = head.score(params, action)
    assert torch.equal(log_prob, head.log_prob(params, action))
    assert torch.equal(entropy, head.entropy(params))


@pytest.mark.parametrize("name", SPACES)
def test_sampling_follows_the_generator_and_has_no_gradient(name):
    head = head_of(name)
    params = params_of(head, 64).requires_grad_()
    a, b = (head.sample(params, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, head.sample(params, torch.Generator().manual_seed(4)))
    assert not a.requires_grad


@pytest.mark.parametrize("name", ["discrete", "discrete_start", "multi_binary", "box", "box_scalar", "box_matrix"])
def test_agrees_with_torch_distributions(name):
    head = head_of(name)
    params, other = params_of(head, 50), params_of(head, 50, seed=1)
    action = head.sample(params)
    flat = action if name.startswith("discrete") else action.reshape(50, -1).float()
    torch.testing.assert_close(head.log_prob(params, action), peer(name, params).log_prob(flat))
    torch.testing.assert_close(head.entropy(params), peer(name, params).entropy())
    torch.testing.assert_close(
        head.kl(params, other), distributions.kl_divergence(peer(name, params), peer(name, other))
    )


@pytest.mark.parametrize("name", ["multi_discrete", "multi_discrete_equal"])
def test_multi_categorical_agrees_with_torch_distributions(name):
    head = head_of(name)
    sizes = SPACES[name].nvec.ravel().tolist()
    params, other = params_of(head, 50), params_of(head, 50, seed=1)
    action = head.sample(params)
    peers, others = splits(params, sizes), splits(other, sizes)
    log_prob = sum(p.log_prob(a) for p, a in zip(peers, action.reshape(50, -1).unbind(-1), strict=True))
    torch.testing.assert_close(head.log_prob(params, action), log_prob)
    torch.testing.assert_close(head.entropy(params), sum(p.entropy() for p in peers))
    kl = sum(distributions.kl_divergence(p, q) for p, q in zip(peers, others, strict=True))
    torch.testing.assert_close(head.kl(params, other), kl)


def test_squashed_log_prob_agrees_with_a_transformed_distribution():
    head = head_of("squash")
    params = params_of(head, 50).double().clamp(-1, 1)
    latent = head.sample(params, torch.Generator().manual_seed(0))
    low, high = (torch.from_numpy(bound).double() for bound in (BOX.low, BOX.high))
    affine = distributions.AffineTransform((low + high) / 2, (high - low) / 2, event_dim=1)
    tanh = distributions.TanhTransform(cache_size=1)
    squashed = distributions.TransformedDistribution(
        peer("box", params), [distributions.IndependentTransform(tanh, 1), affine]
    )
    torch.testing.assert_close(head.log_prob(params, latent), squashed.log_prob(affine(tanh(latent))))
    torch.testing.assert_close(head.env_action(latent.float()), affine(tanh(latent)).float())


@pytest.mark.parametrize(
    ("mean", "log_std", "tolerance"), [(0.0, 0.0, 1e-6), (2.0, -1.0, 1e-6), (-1.0, 0.7, 1e-3), (0.3, 1.5, 2e-2)]
)
def test_squashed_density_integrates_to_one_and_to_its_entropy(mean, log_std, tolerance):
    head = head_of("squash_scalar")
    # a = 3 + (tanh(u) + 1) / 2, so da = du / (2 cosh(u)^2)
    latent = torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    width = 60 / 60_000 / (2 * latent.cosh().square())
    params = torch.tensor([mean, log_std], dtype=torch.float64)
    log_prob = head.log_prob(params.expand(60_001, 2), latent)
    assert (log_prob.exp() * width).sum().item() == pytest.approx(1.0, abs=1e-6)
    entropy = -(log_prob.exp() * log_prob * width).sum().item()
    assert head.double().entropy(params).item() == pytest.approx(entropy, abs=tolerance)


def test_squashed_entropy_has_the_gradient_of_its_value():
    head = head_of("squash").double()
    params = params_of(head, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(head.entropy, params)


def test_squashed_ratio_is_exact_at_saturation():
    # u = 20: tanh is exactly 1 in float32, yet moving the mean by 1 moves the log ratio as in the Gaussian:
    # -((20-1)^2 - (20-0)^2) / 2 = -(361 - 400) / 2 = 19.5
    head = head_of("squash_scalar")
    latent = torch.tensor([20.0])
    assert head.env_action(latent).item() == 4.0
    at_1, at_0 = (head.log_prob(torch.tensor([[mean, 0.0]]), latent) for mean in (1.0, 0.0))
    assert (at_1 - at_0).item() == pytest.approx(19.5)


@settings(deadline=None)
@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3))
def test_squashed_env_action_never_leaves_the_box(u, bound):
    low, high = np.float32(bound), np.float32(bound + 0.3)
    head = make_head(spaces.Box(low, high, (1,), np.float32), PolicyCfg(squash_output=True))
    assert low <= head.env_action(torch.tensor([u])).item() <= high


def test_squashed_kl_is_that_of_the_latent():
    squash, clip = head_of("squash"), head_of("box")
    params, other = params_of(squash, 5), params_of(squash, 5, seed=1)
    assert torch.equal(squash.kl(params, other), clip.kl(params, other))


def test_clip_acts_on_each_bound_by_itself():
    space = spaces.Box(np.array([-1, -np.inf], np.float32), np.array([np.inf, 2], np.float32))
    head = make_head(space, PolicyCfg())
    assert head.env_action(torch.tensor([-5.0, -5.0])).tolist() == [-1.0, -5.0]
    assert head.env_action(torch.tensor([5.0, 5.0])).tolist() == [5.0, 2.0]


def test_clip_stays_inside_bounds_that_float32_cannot_hold():
    # float32(0.1) is 0.10000000149, above the float64 bound; float32(-0.7) is -0.69999998807 and inside already
    head = make_head(spaces.Box(-0.7, 0.1, (1,), np.float64), PolicyCfg())
    assert head.env_action(torch.tensor([-9.0])).item() >= -0.7
    assert head.env_action(torch.tensor([9.0])).item() <= 0.1


def test_unbounded_box_keeps_the_sample():
    action = torch.tensor([1e30])
    assert make_head(spaces.Box(-np.inf, np.inf, (1,)), PolicyCfg()).env_action(action) is action


@pytest.mark.parametrize("name", ["discrete", "multi_discrete", "multi_binary"])
def test_sampling_frequencies(name):
    head = head_of(name)
    params = params_of(head)
    action = head.sample(params.expand(20_000, -1), torch.Generator().manual_seed(0)).reshape(20_000, -1)
    sizes = {"discrete": [4], "multi_discrete": NVEC.ravel().tolist(), "multi_binary": [2] * 4}[name]
    if name == "multi_binary":
        probs = [torch.stack([1 - p, p]) for p in params.sigmoid()]
    else:
        probs = [logits.softmax(-1) for logits in params.split(sizes)]
    for column, prob in zip(action.unbind(-1), probs, strict=True):
        counts = np.bincount(column.numpy(), minlength=len(prob))
        expected = prob.double().numpy() / prob.double().sum().item() * 20_000
        assert len(prob) == 1 or stats.chisquare(counts, expected).pvalue > 1e-3


def test_gaussian_samples_have_the_given_moments():
    head = head_of("box")
    params = torch.tensor([1.0, -2.0, 0.0, 0.0, math.log(2), -1.0])
    sample = head.sample(params.expand(100_000, -1), torch.Generator().manual_seed(0))
    torch.testing.assert_close(sample.mean(0), params[:3], atol=0.03, rtol=0)
    torch.testing.assert_close(sample.std(0), params[3:].exp(), atol=0, rtol=0.01)


def test_forbidden_choice_is_never_taken_and_harms_nothing():
    head = head_of("discrete")
    params = torch.tensor([-math.inf, 0.0, -math.inf, 0.0]).expand(100_000, -1).clone().requires_grad_()
    action = head.sample(params, torch.Generator().manual_seed(0))
    assert set(action.tolist()) == {1, 3}
    log_prob, entropy = head.score(params, action)
    # two equal choices: log 2
    torch.testing.assert_close(entropy, torch.full((100_000,), math.log(2)))
    (log_prob.sum() + entropy.sum() + head.kl(params, params.detach().roll(1, -1).clamp(min=-1)).sum()).backward()
    assert params.grad.isfinite().all()


def test_zero_uniforms_do_not_choose_the_forbidden(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))
    assert head_of("discrete").sample(torch.tensor([-math.inf, -math.inf, 0.0, -math.inf])).item() == 2


def test_env_action_counts_from_start():
    assert head_of("discrete_start").env_action(torch.tensor([0, 3])).tolist() == [-3, 0]
    assert head_of("multi_discrete").env_action(torch.zeros(1, 2, 2, dtype=torch.int64)).tolist() == [[[1, 0], [-2, 7]]]


@pytest.mark.parametrize("name", SPACES)
def test_entropy_is_the_mean_surprise(name):
    head = head_of(name)
    params = params_of(head).clamp(-1, 1)
    log_prob = head.log_prob(params.expand(40_000, -1), head.sample(params.expand(40_000, -1), torch.Generator()))
    assert -log_prob.mean().item() == pytest.approx(head.entropy(params).item(), abs=0.06)


@pytest.mark.parametrize(
    "space", [spaces.Text(3), spaces.Graph(BOX, None), spaces.Sequence(BOX), spaces.Box(0, 5, (2,), np.int64)]
)
def test_unsupported_space_says_what_to_do(space):
    with pytest.raises(UnsupportedSpaceError, match=r"supported: Discrete.*fix: wrap") as error:
        make_head(space, PolicyCfg())
    assert str(space) in str(error.value)


@pytest.mark.parametrize("high", [np.inf, -1.0, 3.4e38])  # the width of the last has no float32
def test_squash_needs_a_real_box(high):
    low = torch.tensor([-1.0, -1.0 if high < 2 else -high]) if np.isfinite(high) else torch.tensor([-1.0, -1.0])
    with pytest.raises(ConfigError, match="fix: squash_output=False"):
        SquashedGaussian(low, torch.tensor([1.0, high]))


@pytest.mark.parametrize(
    ("low", "high", "std", "is_told"),
    [
        (30, 1017, 1.0, True),
        (0, 1017, 1.0, True),
        (0, 0.05, 1.0, True),
        (-2, 2, 1.0, False),
        (-0.4, 0.4, 1.0, False),
        (0, 1, 1.0, False),
        (-10, 10, 1.0, False),
        (30, 1017, 100.0, False),
        (-np.inf, np.inf, 1.0, False),
    ],
)
def test_boxes_that_the_first_gaussian_hardly_explores_are_told(low, high, std, is_told):
    space = spaces.Dict(a=spaces.Box(low, high, (2,)), b=spaces.Discrete(2))
    assert bool(unexplored(space, PolicyCfg(log_std_init=math.log(std)))) is is_told
    assert unexplored(space, PolicyCfg(squash_output=True)) == ""
