"""Runs that end before their end: what is saved, what is said, and that they go on."""

import os
import signal
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from at_events import fail, on
from plain_envs import Plain
from run_folders import same_weights

import groupwise as gw
from groupwise import run as running
from groupwise.report.folder import RunFolder
from groupwise.run import STOP, finishing_on_signal
from groupwise.training.checkpoint import saved_counts

PPO = gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64)
TINY = {
    "num_envs": 4,
    "total_steps": 192,
    "evaluation": {"interval": 9999, "episodes": 2},
    "logging": {"progress": "none"},
    "checkpoint_interval": 9999,
}


@pytest.fixture(autouse=True)
def _in_a_fresh_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Breaks, "broken", False)


def signals(*numbers):
    """A callback that sends signals to this process while iteration 2 is under way."""

    def send(trainer, *_):
        for number in numbers if trainer.iteration == 1 else ():
            os.kill(os.getpid(), number)

    return on("rollout_end", send)


class Breaks(Plain):
    """Once it is broken it raises errors, also when it is closed."""

    broken = False

    def step(self, action):
        if Breaks.broken:
            raise ZeroDivisionError("the physics broke")
        return super().step(action)

    def close(self):
        if Breaks.broken:
            raise BrokenPipeError("the process is gone")


@pytest.mark.parametrize("number", STOP)
def test_a_signal_lets_the_iteration_finish_and_saves_it(number, capsys):
    with pytest.raises(KeyboardInterrupt) as caught:
        gw.train("CartPole-v1", PPO, run_dir="mine", callbacks=[signals(number)], **TINY)
    assert str(caught.value) == "interrupted; saved after step 128; continue with: groupwise resume mine"
    assert [entry["iteration"] for entry in RunFolder(Path("mine")).read_metrics()] == [1, 2]
    assert "eval/return_mean" not in RunFolder(Path("mine")).read_metrics()[-1]  # who interrupts does not want to wait
    assert RunFolder(Path("mine")).read_summary()["stopped"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    run = gw.resume("mine")
    assert "resuming from step 128 of 192\n" in capsys.readouterr().err
    assert [entry["iteration"] for entry in run.metrics()] == [1, 2, 3]


def test_a_second_signal_stops_at_once(capsys):
    with pytest.raises(KeyboardInterrupt, match=r"nothing was saved yet; begin again with: groupwise resume mine$"):
        gw.train("CartPole-v1", PPO, run_dir="mine", callbacks=[signals(signal.SIGINT, signal.SIGINT)], **TINY)
    assert [entry["iteration"] for entry in RunFolder(Path("mine")).read_metrics()] == [1]
    gw.resume("mine")
    err = capsys.readouterr().err
    assert "resuming from step 0 of 192; no checkpoint was saved, so training begins again\n" in err


def test_a_rollout_of_groups_is_left_at_the_first_signal_and_collected_again():
    def send(trainer, *_):
        if trainer.iteration == 1 and trainer.stop_reason is None:
            os.kill(os.getpid(), signal.SIGTERM)

    grpo = gw.GRPOCfg(num_steps=16, group_size=2, num_epochs=1)
    with pytest.raises(KeyboardInterrupt, match="interrupted; saved after step"):
        gw.train("CartPole-v1", grpo, run_dir="mine", callbacks=[on("step", send)], **TINY)
    assert [entry["iteration"] for entry in RunFolder(Path("mine")).read_metrics()] == [1]
    assert same_weights(gw.resume("mine"), gw.train("CartPole-v1", grpo, run_dir="whole", **TINY))


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (BrokenPipeError("gone"), KeyboardInterrupt, "interrupted (the rollout ended with BrokenPipeError('gone')); saved after step 64"),
        (gw.errors.DataError("nan"), gw.errors.DataError, "nothing was saved yet"),
        (gw.errors.DivergedError("nan"), gw.errors.DivergedError, "nothing was saved yet"),
    ],
)  # fmt: skip
def test_what_ctrl_c_breaks_is_part_of_the_interrupt_and_what_diverged_is_not(error, raised, message):
    def breaks(trainer, *_):
        def collect(*args, **kwargs):
            trainer.interrupt()
            raise error

        trainer.collector.collect = collect

    with pytest.raises(raised) as caught:
        gw.train("CartPole-v1", PPO, run_dir="mine", callbacks=[on("iteration_end", breaks)], **TINY)
    assert message in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_a_signal_in_the_last_iteration_changes_nothing():
    run = gw.train("CartPole-v1", PPO, callbacks=[signals(signal.SIGINT)], **TINY | {"total_steps": 128})
    assert run.summary["stopped"] == "total_steps"


def test_handlers_of_others_and_other_threads_are_left_alone(parts):
    found = []

    def look():
        with finishing_on_signal(parts.trainer()):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    own = lambda number, frame: None  # noqa: E731
    before = signal.signal(signal.SIGINT, own)
    look()
    signal.signal(signal.SIGINT, before)
    assert found == [signal.default_int_handler, own]


@pytest.mark.timeout(0)
def test_an_alarm_that_the_user_has_set_is_left_alone(parts):
    signal.alarm(1000)
    with finishing_on_signal(parts.trainer()):
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.alarm(0) > 900


def train_until_it_breaks(algorithm, event="iteration_end"):
    breaks = on(event, lambda *_: setattr(Breaks, "broken", True))
    with pytest.raises(ZeroDivisionError, match="the physics broke") as caught:
        gw.train(Breaks, algorithm, run_dir="mine", callbacks=[breaks], **TINY)
    summary = RunFolder(Path("mine")).read_summary()
    assert (summary["stopped"], summary["error"]) == ("failed", "ZeroDivisionError: the physics broke")
    return caught.value.__notes__


def test_an_error_of_the_environment_says_what_is_kept_and_how_to_go_on(tmp_path, monkeypatch):
    assert train_until_it_breaks(PPO)[-1] == (
        "groupwise: ZeroDivisionError ended training on Breaks in iteration 2 (step 64); "
        "saved after step 64; the same steps meet the same error: change its cause, or mine/config.json, then continue with: "
        "gw.resume('mine', env=...)"
    )
    Breaks.broken = False
    run = gw.resume("mine", env=Breaks)
    assert [entry["iteration"] for entry in run.metrics()] == [1, 2, 3]
    (tmp_path / "early").mkdir()
    monkeypatch.chdir(tmp_path / "early")
    assert (
        "in iteration 1 (step 0); nothing was saved yet; the same steps meet the same error: change its cause, or "
        "mine/config.json, then begin again with: gw.resume" in train_until_it_breaks(PPO, "training_start")[-1]
    )


def test_groups_could_do_without_the_episode_but_not_without_a_callback():
    algorithm = gw.GRPOCfg(num_steps=16, num_epochs=1, minibatch_size=64, group_size=2, collection={"horizon": 20})
    row, note = train_until_it_breaks(algorithm)
    assert row == "in row 0 of Breaks"
    assert "; if the environment fails now and then: algorithm.collection.on_env_error='retry' or 'drop'" in note
    fails = on("rollout_end", fail(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError) as caught:
        gw.train("CartPole-v1", algorithm, run_dir="other", callbacks=[fails], **TINY)
    [note] = caught.value.__notes__
    assert "after iteration 0 (step 0)" in note
    assert note.endswith("nothing was saved yet; begin again with: groupwise resume other")


def test_an_error_of_the_evaluations_environment_saves_the_iteration_and_its_numbers():
    def breaks(trainer, *_):
        Breaks.broken = trainer.iteration == 1

    settings = TINY | {"evaluation": {"interval": 64, "episodes": 2}}
    with pytest.raises(ZeroDivisionError) as caught:
        gw.train(Breaks, PPO, run_dir="mine", callbacks=[on("rollout_end", breaks)], **settings)
    assert "after iteration 2 (step 128); saved after step 128" in caught.value.__notes__[-1]
    Breaks.broken = False
    run = gw.resume("mine", env=Breaks)
    assert [entry["iteration"] for entry in run.metrics()] == [1, 2, 3]
    assert ["eval/return_mean" in entry for entry in run.metrics()] == [True, True, True]  # made up for
    assert sum(entry["rollout/env_steps"] for entry in run.metrics()) == run.summary["env_steps"]


@pytest.mark.parametrize(
    ("how", "bad"), [("due", np.nan), ("at the end", np.inf), ("on interrupt", np.nan), ("best", np.inf)]
)
def test_weights_that_are_not_finite_never_take_the_place_of_good_ones(how, bad):
    def poison(trainer, *_):
        if trainer.iteration == 2:
            with torch.no_grad():
                next(trainer.algorithm.policy.parameters()).view(-1)[0] = bad
            if how == "on interrupt":
                trainer.interrupt()

    settings = TINY | {"checkpoint_interval": {"due": 64, "best": 64}.get(how, 9999)}
    settings |= {"total_steps": 128 if how == "at the end" else 192}
    settings |= {"evaluation": {"interval": 128 if how == "best" else 9999, "episodes": 2}}
    with pytest.raises(gw.errors.DivergedError, match=r"is not finite after iteration 2; .*fix: lower"):
        gw.train("CartPole-v1", PPO, run_dir="mine", callbacks=[on("iteration_end", poison)], **settings)
    assert saved_counts(Path("mine/checkpoints/latest"))["steps"] == (64 if how in ("due", "best") else 0)
    assert not Path("mine/checkpoints/best").exists()


def test_a_policy_that_diverged_leaves_the_last_checkpoint():
    """Weights beyond all bounds, but finite: what they do is not."""

    def diverges(trainer, *_):
        for parameter in trainer.algorithm.policy.parameters() if trainer.iteration == 3 else ():
            parameter.detach().fill_(3e38)

    algorithm = gw.GRPOCfg(num_steps=16, num_epochs=1, minibatch_size=64, group_size=2, collection={"horizon": 20})
    settings = TINY | {"checkpoint_interval": 160, "total_steps": 999}  # an iteration takes 80 steps
    with pytest.raises(gw.errors.DivergedError, match="is not finite") as caught:
        gw.train("Pendulum-v1", algorithm, run_dir="mine", callbacks=[on("iteration_end", diverges)], **settings)
    assert saved_counts(Path("mine/checkpoints/latest"))["steps"] == 160
    assert "on_env_error" not in caught.value.__notes__[-1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return gw.train("CartPole-v1", PPO, run_dir=tmp_path_factory.mktemp("runs") / "done", **TINY)


def test_resuming_a_finished_run_says_so(finished, capsys):
    gw.resume(finished.path)
    assert capsys.readouterr().err == (
        "resuming from step 192 of 192\nnothing was left to train (total_steps); fix: a larger total_steps\n"
    )


def test_what_cannot_go_on_is_refused_and_changes_nothing(finished):
    def make():
        raise AssertionError  # a taken folder is noticed before

    weights = finished.path / "checkpoints" / "latest" / "policy.safetensors"
    whole = weights.read_bytes()
    before = {path: path.read_bytes() for path in finished.path.rglob("*") if path.is_file()}
    for total_steps in (100, 192):
        with pytest.raises(gw.errors.ConfigError, match=rf"total_steps = {total_steps}, but .*has 192 steps already"):
            gw.resume(finished.path, total_steps=total_steps)
    with pytest.raises(gw.errors.RunFolderError, match="is taken"):
        gw.train(make, PPO, run_dir=finished.path, **TINY)
    weights.write_bytes(whole[:-1])
    with pytest.raises(gw.errors.CheckpointError):
        gw.resume(finished.path, total_steps=1000)
    weights.write_bytes(whole)
    assert {path: path.read_bytes() for path in before} == before


class Hangs(Plain):
    """From step 300 on a step takes a minute; then a signal comes first."""

    count = 0

    def step(self, action):
        Hangs.count += 1
        if Hangs.count > 300:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return super().step(action)


@pytest.mark.timeout(0)  # pytest's own time limit takes SIGALRM
def test_after_a_signal_a_hung_environment_is_left_and_the_last_iteration_is_saved(monkeypatch, tmp_path):
    monkeypatch.setattr(running, "SECONDS_TO_FINISH", 1)
    monkeypatch.setattr(Hangs, "count", 0)
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt, match="saved after step 256"):
        gw.train(
            Hangs, gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64), num_envs=4, total_steps=9999,
            run_dir=tmp_path / "run", evaluation={"interval": 9999, "episodes": 1}, logging={"progress": "none"},
        )  # fmt: skip
    assert time.perf_counter() - start < 20
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.alarm(0) == 0


class SlowUpdateAndSave(gw.Callback):
    """The update after a signal, and what saves then, take longer than a collection may."""

    saved = False

    def on_rollout_end(self, trainer, rollout):
        assert trainer.doing == "updating"
        os.kill(os.getpid(), signal.SIGHUP)
        self._wait()

    def on_interrupt(self, trainer):
        self._wait()
        self.saved = True

    def _wait(self):
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            time.sleep(0.01)


@pytest.mark.timeout(0)
def test_an_update_and_a_checkpoint_may_take_longer(parts, monkeypatch):
    monkeypatch.setattr(running, "SECONDS_TO_FINISH", 1)
    slow = SlowUpdateAndSave()
    trainer = parts.trainer(slow)
    with running.finishing_on_signal(trainer), pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (trainer.iteration, slow.saved) == (1, True)


class Counted(gymnasium.Env):
    """Counts those that are open; its actions have no bounds."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    num_open = 0

    def __init__(self):
        Counted.num_open += 1

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def close(self):
        Counted.num_open -= 1


def test_environments_of_a_run_that_cannot_be_built_are_closed(tmp_path):
    with pytest.raises(gw.errors.ConfigError, match="squash_output"):
        gw.train(Counted, "ppo", policy={"squash_output": True}, num_envs=4, run_dir=tmp_path / "run")
    assert Counted.num_open == 0
