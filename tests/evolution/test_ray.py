"""Populations whose members are tasks of a Ray cluster of two nodes on this machine."""

import threading
import time

import pytest
from small_populations import PPO, SMALL, check_same

import groupwise as gw

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def nodes(ray):
    """A cluster with room for one member on each of two nodes, and the second node."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def holding(folder):
    """Makes CartPole that waits at its fifth step while there is the file ``hold``, and names its process."""

    def make(**options):
        import os
        import time

        import gymnasium
        import ray

        class Holding(gymnasium.Wrapper):
            count = 0

            def step(self, action):
                self.count += 1
                while self.count >= 5 and (folder / "hold").exists():
                    (folder / f"{ray.get_runtime_context().get_node_id()}-{os.getpid()}").touch()
                    time.sleep(0.02)
                return self.env.step(action)

        return Holding(gymnasium.make("CartPole-v1", **options))

    return make


def test_with_a_node_lost_in_mid_round_the_search_ends_as_on_this_machine(ray, nodes, tmp_path, caplog):
    cluster, second = nodes
    with pytest.raises(gw.errors.ConfigError, match=r"gpus = 0\.5: no node of the Ray cluster has as many"):
        gw.evolve("CartPole-v1", PPO, run_dir=tmp_path / "gpu", launcher="ray", gpus=0.5, **SMALL)
    (tmp_path / "seen").mkdir()
    env, hold = holding(tmp_path / "seen"), tmp_path / "seen/hold"
    whole = gw.evolve(env, PPO, run_dir=tmp_path / "whole", on_mutation=lambda *_: None, **SMALL)

    def lose_a_node():
        while len({path.name.partition("-")[0] for path in hold.parent.glob("*-*")}) < 2:
            time.sleep(0.02)
        cluster.remove_node(second, allow_graceful=False)
        hold.unlink()

    thread = threading.Thread(target=lose_a_node, daemon=True)
    thread.start()
    hook = lambda *_: hold.touch()  # noqa: E731 (round 1 is about to begin)
    gw.evolve(env, PPO, run_dir=tmp_path / "ray", launcher="ray", on_mutation=hook, **SMALL)
    thread.join()
    assert "NodeDiedError" in caplog.text
    assert ray.is_initialized()
    check_same(tmp_path / "ray", whole.path)
