"""Runs whose processes are workers of Ray Train, and populations whose members are tasks of Ray. Processes and nodes are killed."""

import os
import subprocess
import sys
import threading
import time

import pytest
from ray_kills import Killer, processes
from run_folders import logged
from small_populations import PPO, SMALL, check_same
from text_runs import copying, save_model

import groupwise as gw

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
GRPO = {"name": "grpo", "num_steps": 16, "num_epochs": 1, "minibatch_size": 64, "group_size": 2}
OPTIONS = {
    "num_envs": 2,
    "total_steps": 8_000,
    "checkpoint_interval": 1,
    "evaluation": {"interval": 2560, "episodes": 2},
}


@pytest.fixture
def cluster(ray):
    """Room for two workers on this machine."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_killed_worker_is_replaced_and_the_run_ends_as_without(cluster, tmp_path):
    from groupwise.integrations.ray import Workers, resume_on_ray, train_on_ray

    whole = train_on_ray("CartPole-v1", GRPO, run_dir=tmp_path / "whole", **OPTIONS)
    assert len(whole.metrics()) > 25
    killer = Killer(tmp_path / "killed", 8, lambda: processes(b"RayTrainWorker")[-1])
    killer.start()
    killed = train_on_ray("CartPole-v1", GRPO, run_dir=tmp_path / "killed", **OPTIONS)
    killer.join()
    print(f"from the kill to two further iterations: {killer.seconds:.1f} s")
    assert logged(killed) == logged(whole)  # each iteration once
    with pytest.raises(gw.errors.RunFolderError, match="whole"):
        train_on_ray("CartPole-v1", GRPO, run_dir=tmp_path / "whole", **OPTIONS)
    with pytest.raises(gw.errors.ConfigError, match=r"3 workers .* the Ray cluster has 2 cores and 0 GPUs"):
        train_on_ray("CartPole-v1", GRPO, workers=Workers(3), run_dir=tmp_path / "many", **OPTIONS)
    again = resume_on_ray(whole.path)
    assert logged(again) == logged(whole)


SHORT = "--algorithm ppo --algorithm.num-steps 8 --env.num-envs 2 --launcher ray --workers 1 --run-dir run"
SEARCH = '{"algorithm.learning_rate":[1e-3,2e-3]}'


@pytest.mark.parametrize(
    "words",
    [
        f"train CartPole-v1 {SHORT} --total-steps 16 --evaluation.episodes 1",
        f"evolve CartPole-v1 {SHORT} --population 2 --rounds 1 --round-steps 16 --episodes 1 --search {SEARCH}",
    ],
)
def test_no_module_of_the_current_folder_is_imported_by_workers(ray, tmp_path, words):
    command, folder = tmp_path / "bin" / "groupwise", tmp_path / "hostile"
    command.parent.mkdir()
    command.write_text("import sys\nfrom groupwise.cli import main\nif __name__ == '__main__':\n    sys.exit(main())")
    folder.mkdir()
    for name in ("torch", "numpy", "gymnasium"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__)\nraise SystemExit(7)")
    done = subprocess.run([sys.executable, command, *words.split()], cwd=folder, capture_output=True, check=False)
    assert not (tmp_path / "ran").exists()
    assert done.returncode == 0, done.stderr


def test_an_error_of_the_run_is_raised_at_once(cluster, tmp_path):
    from groupwise.integrations.ray import train_on_ray

    with pytest.raises(gw.errors.ConfigError, match="NoSuchEnv-v0"):
        train_on_ray("NoSuchEnv-v0", GRPO, run_dir=tmp_path / "run", **OPTIONS)


def test_an_error_of_one_worker_ends_all_of_them(ray, monkeypatch, tmp_path):
    from groupwise.integrations.ray import Workers, train_on_ray

    def reward(completions, trainer_state, **columns):
        if os.environ["RANK"] == "1" and trainer_state.global_step == 2:
            raise ValueError("no score")
        return [0.0 if text else 1.0 for text in completions]

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # the reward's module
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    settings = {"num_prompts": 4, "sampling": {"max_new_tokens": 4}, "logging": {"progress": "none"}}
    options = {"model": str(save_model(tmp_path / "model")), "workers": Workers(2), "total_steps": 1000, **settings}
    grpo = gw.GRPOCfg(group_size=4, learning_rate=1e-3)
    with pytest.raises(gw.errors.RewardError, match="no score"):
        train_on_ray(copying(reward), grpo, run_dir=tmp_path / "run", **options)
    ray.shutdown()


def test_a_worker_has_as_many_processes_for_environments_as_cores(cluster, tmp_path):
    from groupwise.integrations.ray import Workers, train_on_ray

    def make(**options):
        from groupwise.system import num_cpus

        raise gw.errors.EnvError(f"environments have {num_cpus()} cores")

    with pytest.raises(gw.errors.EnvError, match="environments have 1 cores"):  # of at least two here
        train_on_ray(make, GRPO, workers=Workers(1, cpus=1), run_dir=tmp_path / "run", **OPTIONS)


def test_a_cluster_that_was_started_here_ends_with_the_run(ray, tmp_path):
    from groupwise.integrations.ray import Workers, train_on_ray

    with pytest.raises(gw.errors.ConfigError, match=r"1 workers with cpus = 1000"):
        train_on_ray("CartPole-v1", GRPO, workers=Workers(1, cpus=1000), run_dir=tmp_path / "run", **OPTIONS)
    assert not ray.is_initialized()
    with pytest.raises(gw.errors.ConfigError, match="no node of the Ray cluster has as many"):
        gw.evolve("CartPole-v1", PPO, run_dir=tmp_path / "search", launcher="ray", cpus=1000.0, **SMALL)
    assert not ray.is_initialized()


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
