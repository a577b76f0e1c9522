"""AgileRL's population of PPO agents, trained by its own ``train_on_policy`` with its tournament and mutations.

Environments are stepped in its process, as in its own example with CartPole; its default, a process for each, took twice the
processor's time.
"""

from typing import Any

from evolution_watch import (
    ENV,
    LEARN_STEP,
    MAX_ROUNDS,
    MEMBERS,
    NUM_ENVS,
    RANGES,
    ROUND_STEPS,
    TOURNAMENT,
    Act,
    Watch,
    parse,
)

args = parse()

import torch
from agilerl.algorithms import PPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.rollouts import collect_rollouts
from agilerl.training.train_on_policy import train_on_policy
from agilerl.utils.utils import make_vect_envs


def greedy(agent: PPO) -> Act:
    """The most probable actions; AgileRL itself samples, also when it evaluates."""

    def act(obs: Any) -> Any:
        with torch.no_grad():
            agent.actor.forward_head(agent.actor.extract_features(agent.preprocess_observation(obs)), sample=False)
        return agent.actor.head_net.dist.logits.argmax(-1).numpy()

    return act


class WatchedTournament(TournamentSelection):
    """Tells the watch of each round."""

    steps = 0

    def select(self, population: list[PPO]) -> Any:
        best = max(population, key=lambda agent: agent.fitness[-1])
        watch.round(lambda: (self.steps, greedy(best)))
        return super().select(population)

    def collect(self, agent: PPO, env: Any, n_steps: int, **state: Any) -> Any:
        """AgileRL's ``collect_rollouts``, whose steps are counted."""
        self.steps += n_steps * NUM_ENVS
        return collect_rollouts(agent, env, n_steps=n_steps, **state)


def mlp() -> dict[str, Any]:
    """Not one object for encoder and head: mutations change its list of layers."""
    return {"hidden_size": [64], "activation": "ReLU", "min_mlp_nodes": 64, "max_mlp_nodes": 500, "layer_norm": True}


def main() -> None:
    members = 2 if args.smallest else MEMBERS
    env = make_vect_envs(ENV, NUM_ENVS, should_async_vector=False)
    env.reset(seed=args.seed)  # AgileRL resets without one
    hp_config = HyperparameterConfig(
        **{name: RLParameter(min=low, max=high, dtype=type(low)) for name, (low, high) in RANGES.items()}
    )
    head = {"min_hidden_layers": 1, "max_hidden_layers": 3, "output_vanish": True}
    mutations = Mutations(
        no_mutation=0.4,
        architecture=0.2,
        new_layer_prob=0.2,
        parameters=0.2,
        activation=0.0,
        rl_hp=0.2,
        mutation_sd=0.1,
        rand_seed=args.seed,
    )
    population = PPO.population(
        size=members,
        observation_space=env.single_observation_space,
        action_space=env.single_action_space,
        hp_config=hp_config,
        net_config={"latent_dim": 64, "encoder_config": mlp(), "head_config": mlp() | head},
        num_envs=NUM_ENVS,
        batch_size=128,
        lr=1e-3,
        learn_step=LEARN_STEP,
        gamma=0.99,
        gae_lambda=0.95,
        clip_coef=0.2,
        ent_coef=0.01,
        vf_coef=0.5,
        max_grad_norm=0.5,
        update_epochs=4,
        share_encoders=True,
    )
    tournament = WatchedTournament(tournament_size=TOURNAMENT, elitism=True, population_size=members)
    train_on_policy(
        env,
        ENV,
        "PPO",
        population,
        max_steps=2 * MAX_ROUNDS * ROUND_STEPS,  # the watch ends it
        evo_steps=LEARN_STEP if args.smallest else ROUND_STEPS,
        eval_loop=1,
        selection_strategy=tournament,
        mutation=mutations,
        collect_rollouts_fn=tournament.collect,
        verbose=False,
    )


if __name__ == "__main__":
    watch = Watch(args)
    main()
