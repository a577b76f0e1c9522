"""PPO in JAX, environment and all: gymnax' CartPole, and whole iterations compiled into one scan, as PureJaxRL does it.

Written anew, at the settings that PureJaxRL gives for CartPole. Training comes back from the device after every 2,000
steps or so, to be looked at (a rate: after 50,000).
Source: https://github.com/luchris429/purejaxrl (the idea and the settings)
"""

import time
from collections import deque
from functools import partial
from typing import Any

from settings import GOALS, Settings
from worker import Watch, parse

args = parse("cleanrl", rate_steps=1_000_000)

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax

cfg: Settings = args.cfg
ENV, ENV_PARAMS = gymnax.make("CartPole-v1")
RESET = jax.vmap(ENV.reset, in_axes=(0, None))
STEP = jax.vmap(ENV.step, in_axes=(0, 0, 0, None))
MINIBATCHES = max(1, cfg.batch_size // cfg.minibatch_size)
UPDATES = args.steps // cfg.batch_size * cfg.num_epochs * MINIBATCHES
RATE = optax.linear_schedule(cfg.learning_rate, 0.0, UPDATES) if cfg.annealed else cfg.learning_rate
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(RATE, eps=1e-5))


def init(key: jax.Array) -> dict[str, Any]:
    def network(key: jax.Array, num_outputs: int, last_gain: float) -> list[tuple[jax.Array, jax.Array]]:
        sizes = [(4, 64, 2**0.5), (64, 64, 2**0.5), (64, num_outputs, last_gain)]
        keys = jax.random.split(key, 3)
        orthogonal = jax.nn.initializers.orthogonal
        return [(orthogonal(g)(k, (i, o)), jnp.zeros(o)) for k, (i, o, g) in zip(keys, sizes, strict=True)]

    keys = jax.random.split(key, 4)
    params = {"actor": network(keys[0], 2, 0.01), "critic": network(keys[1], 1, 1.0)}
    obs, env = RESET(jax.random.split(keys[2], cfg.num_envs), ENV_PARAMS)
    returns = jnp.zeros(cfg.num_envs)
    return {"params": params, "opt": OPTIMIZER.init(params), "env": env, "obs": obs, "returns": returns, "key": keys[3]}


def forward(layers: Any, x: Any, xp: Any = jnp) -> Any:
    for weight, bias in layers[:-1]:
        x = xp.tanh(x @ weight + bias)
    return x @ layers[-1][0] + layers[-1][1]


def env_step(state: dict[str, Any], key: jax.Array) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    action_key, step_key = jax.random.split(key)
    logits, value = forward(state["params"]["actor"], state["obs"]), forward(state["params"]["critic"], state["obs"])
    action = jax.random.categorical(action_key, logits)
    keys = jax.random.split(step_key, cfg.num_envs)
    obs, env, reward, terminated, truncated, _ = STEP(keys, state["env"], action, ENV_PARAMS)
    done, returns = terminated | truncated, state["returns"] + reward
    seen = {"obs": state["obs"], "action": action, "log_prob": log_prob_of(logits, action), "value": value[:, 0]}
    seen |= {"reward": reward, "done": done, "return": returns}
    return state | {"obs": obs, "env": env, "returns": jnp.where(done, 0.0, returns)}, seen


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]


def loss_of(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    logits, value = forward(params["actor"], batch["obs"]), forward(params["critic"], batch["obs"])[:, 0]
    ratio = jnp.exp(log_prob_of(logits, batch["action"]) - batch["log_prob"])
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
    target, old = batch["advantage"] + batch["value"], batch["value"]
    clipped = old + jnp.clip(value - old, -0.2, 0.2)
    value_loss = 0.5 * jnp.maximum((value - target) ** 2, (clipped - target) ** 2).mean()
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
    return policy_loss + 0.5 * value_loss - cfg.ent_coef * entropy


def update(carry: tuple[Any, Any], batch: dict[str, jax.Array]) -> tuple[tuple[Any, Any], None]:
    params, opt = carry
    changes, opt = OPTIMIZER.update(jax.grad(loss_of)(params, batch), opt)
    return (optax.apply_updates(params, changes), opt), None


def iteration(state: dict[str, Any], _: None) -> tuple[dict[str, Any], tuple[jax.Array, jax.Array]]:
    key, act_key, order_key = jax.random.split(state["key"], 3)
    state, seen = jax.lax.scan(env_step, state | {"key": key}, jax.random.split(act_key, cfg.num_steps))
    last = forward(state["params"]["critic"], state["obs"])[:, 0]

    def backwards(carry: tuple[jax.Array, jax.Array], step: dict[str, jax.Array]) -> Any:
        later, next_value = carry
        goes_on = 1.0 - step["done"]
        delta = step["reward"] + cfg.gamma * next_value * goes_on - step["value"]
        advantage = delta + cfg.gamma * cfg.gae_lambda * goes_on * later
        return (advantage, step["value"]), advantage

    _, advantage = jax.lax.scan(backwards, (jnp.zeros_like(last), last), seen, reverse=True)
    stored = {name: seen[name] for name in ("obs", "action", "log_prob", "value")} | {"advantage": advantage}
    flat = {name: array.reshape(cfg.batch_size, *array.shape[2:]) for name, array in stored.items()}

    def epoch(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], None]:
        order = jax.random.permutation(key, cfg.batch_size)
        split = {n: a[order].reshape(MINIBATCHES, -1, *a.shape[1:]) for n, a in flat.items()}
        return jax.lax.scan(update, carry, split)

    keys = jax.random.split(order_key, cfg.num_epochs)
    (params, opt), _ = jax.lax.scan(epoch, (state["params"], state["opt"]), keys)
    return state | {"params": params, "opt": opt}, (seen["return"], seen["done"])


def main(args: Any) -> None:
    at_once = max(1, -(-(50_000 if args.task == "rate" else GOALS["CartPole-v1"].check_every) // cfg.batch_size))
    state = jax.jit(init)(jax.random.key(args.seed))
    start = time.perf_counter()
    train = jax.jit(partial(jax.lax.scan, iteration, length=at_once)).lower(state, None).compile()
    watch, latest, steps, over = Watch(args), deque(maxlen=100), 0, False
    compile_seconds = time.perf_counter() - start
    while not over:
        state, (returns, dones) = train(state, None)
        latest.extend(np.asarray(returns)[np.asarray(dones)].tolist())
        steps += at_once * cfg.batch_size
        actor = jax.tree.map(np.asarray, state["params"]["actor"])
        over = watch.iteration(steps, latest, lambda obs, actor=actor: forward(actor, obs, np).argmax(-1))
    watch.finish(compile_seconds=compile_seconds)


if __name__ == "__main__":
    main(args)
