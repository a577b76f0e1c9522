"""Compiled updates are the reference's: the same gradients, metrics and parameters, wherever they are used at all."""

import gc
import logging
import subprocess
import sys
import weakref

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_updates import ACT, OBS, build, make_rollout, parameters

import groupwise as gw
from groupwise.algorithms import compiled_gradient
from groupwise.algorithms.compiled_gradient import WORTH_STEPS, CompiledGradient, GradientCompiler
from groupwise.algorithms.loss import Counts
from groupwise.algorithms.ppo import PPO
from groupwise.algorithms.step_metrics import StepMetrics
from groupwise.errors import ConfigError, SlowPathWarning
from groupwise.functional.reduce import local
from groupwise.policies.actor_critic import ActorCritic

UPDATES = 20
BOX = gym.spaces.Box(-1, 1, (2,), np.float32)
RUNS = {
    "ppo, several minibatches": ("ppo", {}, {"num_epochs": 3, "minibatch_size": 40, "max_grad_norm": 0.5}),
    "ppo, shared trunk, micro-batches": (
        "ppo",
        {"trunk": "shared", "activation": "relu", "hidden_sizes": (20, 5)},
        {"minibatch_size": 40, "micro_batch_size": 7, "ent_coef": 0.01, "clip_value": 0.2},
    ),
    "grpo, scaled observations, reference": (
        "grpo",
        {"normalize_obs": True, "normalize_reward": True, "hidden_sizes": (17,)},
        {"num_epochs": 2, "minibatch_size": 30, "kl_coef": 0.1},
    ),
    "ppo, gaussian": ("ppo", {"log_std_init": -0.5}, {"num_epochs": 2, "minibatch_size": 33, "ent_coef": 0.01}, BOX),
    "grpo, squashed": ("grpo", {"bounded_action": "squash"}, {"num_epochs": 2, "minibatch_size": 50}, BOX),
}


def algorithm_of(kind, network, options, space=ACT, *, kernel):
    torch.manual_seed(1)
    policy = ActorCritic(OBS, space, gw.PolicyCfg(**network, mlp_kernel=kernel), actor_only=kind == "grpo")
    return build(kind, policy=policy, optimizer={"name": "adam"}, learning_rate=1e-3, **options)


@pytest.mark.parametrize("run", RUNS)
def test_parameters_and_metrics_over_many_updates_are_the_references(run):
    """Rollouts differ in length, so that minibatches do; normalisers and parameters change between updates."""
    fast, reference = (algorithm_of(*RUNS[run], kernel=kernel) for kernel in ("compiled", "torch"))
    for seed in range(UPDATES):
        rollout = make_rollout(reference.policy, seed, rows=4 * (1 + seed % 3))
        found, expected = fast.update(rollout), reference.update(rollout)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=f"{name} in update {seed}")
    assert fast.compiler.gradient is not None
    torch.testing.assert_close(parameters(fast), parameters(reference), rtol=0, atol=1e-5)
    assert fast.optimizer_steps == reference.optimizer_steps > UPDATES


SPACES = {
    "multi-discrete": (gym.spaces.MultiDiscrete([3, 2]), {}),
    "multi-binary": (gym.spaces.MultiBinary(3), {}),
    "gaussian": (BOX, {"log_std_init": -0.5}),
    "squashed": (BOX, {"bounded_action": "squash"}),
}


def random_batch(policy, rows, seed):
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(rows, 3, generator=g)
    done = policy.act(obs, generator=g)
    noise = torch.randn(4, rows, generator=g)
    return {
        "obs": obs,
        "action": done.action,
        "old_log_prob": done.log_prob + noise[0] / 5,
        "advantage": noise[1],
        "target": noise[2],
        "old_value": noise[3],
        "weight": torch.rand(rows, generator=g) / rows,
        "share": torch.full((rows,), 1 / rows),
        "loss_mask": torch.ones(rows, dtype=torch.bool),
        "episode_id": torch.zeros(rows, dtype=torch.int64),
    }


def losses_of(space, **network):
    torch.manual_seed(0)
    policy = ActorCritic(OBS, space, gw.PolicyCfg(hidden_sizes=(9, 5), mlp_kernel="compiled", **network))
    algorithm = build("ppo", policy=policy, ent_coef=0.1)
    algorithm.counts = Counts(1, 0)
    return policy, algorithm


def reference_gradient(policy, algorithm, batch):
    loss, sums = algorithm._losses(dict(batch))
    gradients = torch.autograd.grad(loss, algorithm.trained.parameters)
    return torch.cat([gradient.flatten() for gradient in gradients]), sums


@pytest.mark.parametrize("name", SPACES)
def test_every_head_and_every_number_of_rows(name):
    space, network = SPACES[name]
    policy, algorithm = losses_of(space, **network)
    compiled = CompiledGradient(policy, algorithm.trained, algorithm._losses, random_batch(policy, 9, 0))

    @given(rows=st.integers(1, 300), seed=st.integers(0, 2**20), shift=st.floats(-0.5, 0.5))
    @settings(max_examples=40, deadline=None)
    def holds(rows, seed, shift):
        with torch.no_grad():  # parameters change in place, as an optimiser changes them
            algorithm.trained.tensors[0].add_(shift * torch.randn(algorithm.trained.tensors[0].shape))
        batch = random_batch(policy, rows, seed)
        gradient, sums = compiled(batch)
        expected, expected_sums = reference_gradient(policy, algorithm, batch)
        scale = 1 + float(expected.abs().max())
        torch.testing.assert_close(gradient / scale, expected / scale, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(sums, expected_sums, rtol=1e-3, atol=1e-4)

    holds()


class OwnTerms(PPO):
    def terms(self, batch, evaluation):
        return super().terms(batch, evaluation)


class OwnEvaluate(ActorCritic):
    def evaluate(self, batch):
        return super().evaluate(batch)


def with_hook():
    algorithm = build("ppo", policy=of_policy())
    algorithm.policy.actor.register_forward_hook(lambda *_: None)
    return algorithm


def of_policy(cls=ActorCritic, **network):
    return cls(OBS, ACT, gw.PolicyCfg(**{"mlp_kernel": "compiled"} | network))


def with_parts():
    space = gym.spaces.Dict({"a": OBS, "b": OBS})
    policy = ActorCritic(space, ACT, gw.PolicyCfg(mlp_kernel="compiled"))
    assert policy.compiles == "never"
    return build("ppo", policy=of_policy(mlp_kernel="by_hand"))


def with_parameter_hook():
    algorithm = build("ppo", policy=of_policy())
    algorithm.policy.actor.hidden[0].weight.register_hook(lambda grad: grad * 0)
    return algorithm


def with_backward_hook():
    algorithm = build("ppo", policy=of_policy())
    algorithm.policy.actor.register_full_backward_pre_hook(lambda *_: None)
    return algorithm


def with_frozen_layer():
    algorithm = build("ppo", policy=of_policy())
    algorithm.policy.actor.hidden[0].requires_grad_(False)
    return algorithm


NOT_COMPILED = {
    "by hand": lambda: build("ppo", policy=of_policy(mlp_kernel="by_hand")),
    "layer by layer": lambda: build("ppo", policy=of_policy(mlp_kernel="torch")),
    "before anybody knows that it is worth it": lambda: build("ppo", policy=of_policy(mlp_kernel="auto")),
    "observations of several parts": with_parts,
    "another activation": lambda: build("ppo", policy=of_policy(activation="elu")),
    "terms of a subclass": lambda: OwnTerms(gw.PPOCfg(), of_policy()),
    "a subclass's evaluate": lambda: build("ppo", policy=of_policy(OwnEvaluate)),
    "a hook": with_hook,
    "a hook on a gradient": with_parameter_hook,
    "a hook on a backward pass": with_backward_hook,
    "a layer that was frozen meanwhile": with_frozen_layer,
    "ratios of sequences": lambda: build("ppo", policy=of_policy(), objective={"ratio": "sequence"}),
    "an entropy weight that adapts": lambda: build(
        "ppo", policy=of_policy(), objective={"entropy": {"name": "adaptive", "target": 0.5}}
    ),
    "a sampler that is compared": lambda: build("ppo", policy=of_policy(), objective={"old_log_prob": "recomputed"}),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # torch's, of every such hook here
@pytest.mark.parametrize("case", NOT_COMPILED)
def test_what_is_not_compiled(case, monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(GradientCompiler, "leave_gradient", refuse)
    algorithm = NOT_COMPILED[case]()
    frozen = [parameter.detach().clone() for parameter in algorithm.policy.parameters() if not parameter.requires_grad]
    algorithm.update(make_rollout(algorithm.policy))
    for begin, parameter in zip(frozen, (p for p in algorithm.policy.parameters() if not p.requires_grad), strict=True):
        assert torch.equal(begin, parameter)


def test_a_subclass_may_say_that_its_terms_are_pure():
    class Says(OwnTerms):
        pure_terms = OwnTerms.terms

    assert Says(gw.PPOCfg(), of_policy()).compiler.is_on


@pytest.mark.parametrize(
    ("steps", "progress", "on"),
    [
        (0, 0.0, False),
        (WORTH_STEPS, 0.0, False),  # nobody knows how much is ahead
        (100, 100 / (100 + WORTH_STEPS), True),
        (100, 100 / (99 + WORTH_STEPS), False),
        (10 * WORTH_STEPS, 1.0, False),
    ],
)
def test_auto_compiles_where_enough_steps_are_ahead(steps, progress, on):
    algorithm = build("ppo", policy=of_policy(mlp_kernel="auto"))
    algorithm.optimizer_steps = steps
    algorithm.set_progress(progress)
    assert algorithm.compiler.is_on is on


def test_a_resumed_run_compiles_where_the_first_one_did():
    first, second = (build("ppo", policy=of_policy(mlp_kernel="auto")) for _ in range(2))
    first.update(make_rollout(first.policy))
    first.set_progress(1e-9)
    second.load_state_dict(first.state_dict())
    assert second.compiler.is_on
    assert second.optimizer_steps == first.optimizer_steps == 1


def test_without_a_compiler_updates_go_on(monkeypatch, caplog):
    def broken(*_, **__):
        raise OSError("no g++\nand a long story")

    monkeypatch.setattr(compiled_gradient, "compile_function", broken)
    fast, reference = (
        algorithm_of(*RUNS["ppo, several minibatches"], kernel=kernel) for kernel in ("compiled", "by_hand")
    )
    rollout = make_rollout(reference.policy)
    with pytest.warns(SlowPathWarning, match=r"without the compiler \(OSError: no g\+\+\); fix: a C\+\+ compiler"):
        fast.update(rollout)
    reference.update(rollout)
    fast.set_progress(1e-9)  # nobody tries again
    assert not fast.compiler.is_on
    fast.update(rollout)
    reference.update(rollout)
    assert torch.equal(parameters(fast), parameters(reference))
    resumed = algorithm_of(*RUNS["ppo, several minibatches"], kernel="compiled")
    resumed.load_state_dict(fast.state_dict())
    resumed.set_progress(1e-9)  # nor after a resume
    assert not resumed.compiler.is_on


@pytest.mark.parametrize("where", ["everywhere", "for another number of rows"])
def test_a_wrong_gradient_is_not_used(monkeypatch, where):
    def wrong(function, example, **_):
        used = []

        def compiled(inputs):
            gradient, sums = function(*inputs)
            used.append(len(inputs[-1]))
            return gradient * (1 if where != "everywhere" and used[-1] == used[0] else 1.01), sums

        return compiled

    monkeypatch.setattr(compiled_gradient, "compile_function", wrong)
    algorithm = algorithm_of(*RUNS["ppo, several minibatches"], kernel="compiled")
    with pytest.warns(SlowPathWarning, match="differs from the traced one"):
        algorithm.update(make_rollout(algorithm.policy))


def test_rows_that_are_as_many_as_something_else_is_wide():
    """Equal numbers in the example are taken to be equal for ever; observations are 3 wide."""
    policy, algorithm = losses_of(ACT)
    compiled = CompiledGradient(policy, algorithm.trained, algorithm._losses, random_batch(policy, 3, 0))
    for rows in (2, 3, 11):
        batch = random_batch(policy, rows, rows)
        torch.testing.assert_close(
            compiled(batch).gradient, reference_gradient(policy, algorithm, batch)[0], rtol=1e-4, atol=1e-5
        )


def test_a_single_row_is_not_given_to_what_was_traced_for_several(monkeypatch):
    monkeypatch.setattr(
        compiled_gradient, "compile_function", lambda function, _, **__: lambda inputs: function(*inputs)
    )
    policy, algorithm = losses_of(ACT)
    compiled = CompiledGradient(policy, algorithm.trained, algorithm._losses, random_batch(policy, 3, 0))
    monkeypatch.setattr(compiled, "_compiled", None)
    batch = random_batch(policy, 1, 0)
    torch.testing.assert_close(compiled(batch).gradient, reference_gradient(policy, algorithm, batch)[0])


def test_other_data_is_compiled_anew(monkeypatch):
    compiled = []

    def compile_(function, _, **__):
        compiled.append(function.keys)
        return lambda inputs: function(*inputs)

    monkeypatch.setattr(compiled_gradient, "compile_function", compile_)
    policy, algorithm = losses_of(ACT)
    batch = random_batch(policy, 5, 0)
    for found in (batch, random_batch(policy, 7, 1), batch | {"policy_factor": torch.ones(5)}):
        said = StepMetrics(algorithm.metric_names, algorithm.cfg.objective, torch.device("cpu"), local)
        assert algorithm.compiler.leave_gradient([found], said)
    assert compiled == [[*batch], [*batch, "policy_factor"]]


def test_a_loss_that_reads_another_tensor_is_not_compiled():
    """It would be a constant of the compiled function, whatever becomes of it."""

    class Reads(PPO):
        def terms(self, batch, evaluation):
            terms = super().terms(batch, evaluation)
            return terms._replace(loss=terms.loss * self.weight)

        pure_terms = terms

    algorithm = Reads(gw.PPOCfg(num_epochs=1), of_policy())
    algorithm.weight = torch.tensor(2.0)
    with pytest.warns(SlowPathWarning, match="convert all Tensors to FakeTensors"):
        algorithm.update(make_rollout(algorithm.policy))


def test_a_rank_without_a_share_of_a_step_has_no_gradient():
    """Other ranks have one: it is neither left from the step before, nor an error."""
    _, algorithm = losses_of(ACT)
    said = StepMetrics(algorithm.metric_names, algorithm.cfg.objective, torch.device("cpu"), local)
    assert not algorithm.compiler.leave_gradient([], said)


def test_an_algorithm_that_is_no_longer_used_is_freed(monkeypatch):
    """Without a search for cycles, which may come late or never."""
    monkeypatch.setattr(
        compiled_gradient, "compile_function", lambda function, _, **__: lambda inputs: function(*inputs)
    )
    algorithm = algorithm_of(*RUNS["ppo, several minibatches"], kernel="compiled")
    algorithm.update(make_rollout(algorithm.policy))
    known = weakref.ref(algorithm)
    gc.disable()
    try:
        del algorithm
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "change",
    [
        lambda policy: policy.double().float(),
        lambda policy: policy.critic.double().float(),
        lambda policy: setattr(policy.actor.hidden[1].bias, "data", torch.ones(64)),
    ],
    ids=["the policy converted", "a part converted", "a parameter's data"],
)
def test_other_parameters_than_the_algorithms_are_refused(change):
    """They would never be trained."""
    policy = of_policy()
    algorithm, rollout = build("ppo", policy=policy), make_rollout(policy)
    change(policy)
    with pytest.raises(ConfigError, match="after the algorithm was built; fix: do it before"):
        algorithm.update(rollout)


def test_a_run_says_that_it_compiles(caplog):
    algorithm = algorithm_of(*RUNS["ppo, several minibatches"], kernel="compiled")
    with caplog.at_level(logging.INFO, "groupwise"):
        algorithm.update(make_rollout(algorithm.policy))
        algorithm.update(make_rollout(algorithm.policy, 1))
    assert [record.message for record in caplog.records] == [
        "updates are compiled from here on; policy.mlp_kernel='by_hand' switches that off"
    ]


def test_who_does_not_compile_does_not_import_the_compiler():
    code = (
        "import sys, groupwise.algorithms.ppo;"
        "assert not {'torch._inductor', 'torch._dynamo', 'sympy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
