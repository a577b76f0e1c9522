"""Runs that end before their end: what is saved, what is said, and that they go on."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from at_events import fail, on
from tensordict import TensorDict

import groupwise as gw
from groupwise.report.folder import RunFolder
from groupwise.run import finishing_on_signal
from groupwise.training.checkpoint import saved_counts
from groupwise.training.trainer import STOP

PPO = gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64)
TINY: dict[str, Any] = {
    "num_envs": 4,
    "total_steps": 192,
    "evaluation": {"interval": 9999, "episodes": 2},
    "logging": {"progress": "none"},
    "checkpoint_interval": 9999,
}


@pytest.fixture(autouse=True)
def _in_a_fresh_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Breaks, "broken", False)


def signals(*numbers: int) -> gw.Callback:
    """A callback that sends signals to this process while iteration 2 is under way."""

    def send(trainer: gw.Trainer, *_: Any) -> None:
        for number in numbers if trainer.iteration == 1 else ():
            os.kill(os.getpid(), number)

    return on("rollout_end", send)


class Breaks(gymnasium.Env[Any, Any]):
    """Ends after ten steps. Once it is broken it raises errors, also when it is closed."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    broken = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        if Breaks.broken:
            raise ZeroDivisionError("the physics broke")
        self.steps += 1
        return np.zeros(3, np.float32), float(action), self.steps == 10, False, {}

    def close(self) -> None:
        if Breaks.broken:
            raise BrokenPipeError("the process is gone")


class BreaksIt(gw.Callback):
    """Breaks the environment for iteration 2, or for 1."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_training_start(self, trainer: gw.Trainer) -> None:
        Breaks.broken = self.iteration == 1

    def on_iteration_end(self, trainer: gw.Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        Breaks.broken = True


@pytest.mark.parametrize("number", STOP)
def test_a_signal_lets_the_iteration_finish_and_saves_it(number: int, capsys: pytest.CaptureFixture[str]):
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


def test_a_second_signal_stops_at_once(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(KeyboardInterrupt, match="nothing was saved yet; continue with"):
        gw.train("CartPole-v1", PPO, run_dir="mine", callbacks=[signals(signal.SIGINT, signal.SIGINT)], **TINY)
    assert [entry["iteration"] for entry in RunFolder(Path("mine")).read_metrics()] == [1]
    gw.resume("mine")
    err = capsys.readouterr().err
    assert "resuming from step 0 of 192; no checkpoint was saved, so training begins again\n" in err


def test_a_rollout_of_groups_is_left_at_the_first_signal_and_collected_again():
    def send(trainer: gw.Trainer, *_: Any) -> None:
        if trainer.iteration == 1 and trainer.stop_reason is None:
            os.kill(os.getpid(), signal.SIGTERM)

    grpo = gw.GRPOCfg(num_steps=16, group_size=2, num_epochs=1)
    with pytest.raises(KeyboardInterrupt, match="interrupted; saved after step"):
        gw.train("CartPole-v1", grpo, run_dir="mine", callbacks=[on("step", send)], **TINY)
    assert [entry["iteration"] for entry in RunFolder(Path("mine")).read_metrics()] == [1]
    resumed, whole = gw.resume("mine"), gw.train("CartPole-v1", grpo, run_dir="whole", **TINY)
    pairs = zip(resumed.policy.parameters(), whole.policy.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_what_ctrl_c_breaks_is_part_of_the_interrupt_and_other_errors_are_not():
    def interrupts(trainer: gw.Trainer, *_: Any) -> None:
        trainer.interrupt()
        raise gw.errors.DivergedError("nan")

    with pytest.raises(gw.errors.DivergedError):
        gw.train("CartPole-v1", PPO, callbacks=[on("iteration_end", interrupts)], **TINY)

    class LosesProcesses(BreaksIt):
        def on_rollout_end(self, trainer: gw.Trainer, rollout: TensorDict) -> None:
            collect = trainer.collector.collect

            def interrupted(*args: Any, **kwargs: Any) -> TensorDict:
                trainer.interrupt()
                return collect(*args, **kwargs)

            trainer.collector.collect = interrupted  # type: ignore[method-assign]

    with pytest.raises(KeyboardInterrupt) as caught:
        gw.train(Breaks, PPO, run_dir="mine", callbacks=[LosesProcesses(2)], **TINY)
    assert str(caught.value) == (
        "interrupted (the rollout ended with ZeroDivisionError('the physics broke')); saved after step 64; "
        "continue with: gw.resume('mine', env=...)"
    )


def test_a_policy_that_diverged_while_an_interrupt_waited_is_told_and_not_saved():
    def diverges(trainer: gw.Trainer, *_: Any) -> None:
        def interrupted(*args: Any, **kwargs: Any) -> TensorDict:
            trainer.interrupt()
            raise gw.errors.DataError("the action is not finite")

        trainer.collector.collect = interrupted  # type: ignore[method-assign]

    with pytest.raises(gw.errors.DataError) as caught:
        gw.train("CartPole-v1", PPO, run_dir="mine", callbacks=[on("iteration_end", diverges)], **TINY)
    assert "nothing was saved yet" in caught.value.__notes__[-1]
    assert not Path("mine/checkpoints/latest").exists()


def test_a_signal_in_the_last_iteration_changes_nothing():
    run = gw.train("CartPole-v1", PPO, callbacks=[signals(signal.SIGINT)], **TINY | {"total_steps": 128})
    assert run.summary["stopped"] == "total_steps"


def test_handlers_of_others_and_other_threads_are_left_alone(parts: Any):
    def own(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGINT, own)
    try:
        with finishing_on_signal(parts.trainer()):
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)

    entered: list[bool] = []

    def in_thread() -> None:
        with finishing_on_signal(parts.trainer()):
            entered.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert entered == [True]


def train_until_it_breaks(algorithm: Any, iteration: int = 2) -> list[str]:
    with pytest.raises(ZeroDivisionError, match="the physics broke") as caught:
        gw.train(Breaks, algorithm, run_dir="mine", callbacks=[BreaksIt(iteration)], **TINY)
    assert RunFolder(Path("mine")).read_summary()["stopped"] == "failed"
    return caught.value.__notes__


def test_an_error_of_the_environment_says_what_is_kept_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert train_until_it_breaks(PPO)[-1] == (
        "groupwise: ZeroDivisionError ended training on Breaks in iteration 2 (step 64); "
        "saved after step 64; continue with: gw.resume('mine', env=...); a resumed run takes the same steps and meets the same "
        "error: first change its cause, or mine/config.json"
    )
    Breaks.broken = False
    run = gw.resume("mine", env=Breaks)
    assert [entry["iteration"] for entry in run.metrics()] == [1, 2, 3]
    (tmp_path / "early").mkdir()
    monkeypatch.chdir(tmp_path / "early")
    assert "in iteration 1 (step 0); nothing was saved yet; continue" in train_until_it_breaks(PPO, 1)[-1]


def test_groups_could_do_without_the_episode():
    algorithm = gw.GRPOCfg(num_steps=16, num_epochs=1, minibatch_size=64, group_size=2, collection={"horizon": 20})
    row, note = train_until_it_breaks(algorithm)
    assert row == "in row 0 of Breaks"
    assert "; if the environment fails now and then: algorithm.collection.on_env_error='retry' or 'drop'" in note


def test_an_error_of_the_evaluations_environment_saves_the_iteration_and_its_numbers():
    def breaks(trainer: gw.Trainer, *_: Any) -> None:
        Breaks.broken = trainer.iteration == 1

    settings = TINY | {"evaluation": {"interval": 64, "episodes": 2}}
    with pytest.raises(ZeroDivisionError) as caught:
        gw.train(Breaks, PPO, run_dir="mine", callbacks=[on("rollout_end", breaks)], **settings)
    assert "after iteration 2 (step 128); saved after step 128" in caught.value.__notes__[-1]
    Breaks.broken = False
    run = gw.resume("mine", env=Breaks)
    assert [entry["iteration"] for entry in run.metrics()] == [1, 2, 3]
    assert ["eval/return_mean" in entry for entry in run.metrics()] == [True, False, True]
    assert sum(entry["rollout/env_steps"] for entry in run.metrics()) == run.summary["env_steps"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("how", ["due", "at the end", "on interrupt", "best"])
def test_weights_that_are_not_finite_never_take_the_place_of_good_ones(how: str, bad: float):
    def poison(trainer: gw.Trainer, *_: Any) -> None:
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

    def diverges(trainer: gw.Trainer, *_: Any) -> None:
        for parameter in trainer.algorithm.policy.parameters() if trainer.iteration == 3 else ():
            parameter.detach().fill_(3e38)

    algorithm = gw.GRPOCfg(num_steps=16, num_epochs=1, minibatch_size=64, group_size=2, collection={"horizon": 20})
    settings = TINY | {"checkpoint_interval": 160, "total_steps": 999}  # an iteration takes 80 steps
    with pytest.raises(gw.errors.DataError, match="is not finite") as caught:
        gw.train("Pendulum-v1", algorithm, run_dir="mine", callbacks=[on("iteration_end", diverges)], **settings)
    assert saved_counts(Path("mine/checkpoints/latest"))["steps"] == 160
    assert "on_env_error" not in caught.value.__notes__[-1]


def test_an_error_outside_of_collecting_is_no_failed_episode():
    algorithm = gw.GRPOCfg(num_steps=16, num_epochs=1, minibatch_size=64, group_size=2)
    with pytest.raises(ZeroDivisionError) as caught:
        gw.train(
            "CartPole-v1", algorithm, run_dir="mine", callbacks=[on("rollout_end", fail(ZeroDivisionError()))], **TINY
        )
    [note] = caught.value.__notes__
    assert "after iteration 0 (step 0)" in note
    assert note.endswith("continue with: groupwise resume mine")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> gw.Run:
    return gw.train("CartPole-v1", PPO, run_dir=tmp_path_factory.mktemp("runs") / "done", **TINY)


def test_resuming_a_finished_run_says_so(finished: gw.Run, capsys: pytest.CaptureFixture[str]):
    gw.resume(finished.path)
    assert capsys.readouterr().err == (
        "resuming from step 192 of 192\nnothing was left to train (total_steps); fix: a larger total_steps\n"
    )


@pytest.mark.parametrize("total_steps", [100, 192])
def test_fewer_steps_than_were_taken_are_refused_and_change_nothing(finished: gw.Run, total_steps: int):
    before = {path: path.read_bytes() for path in finished.path.rglob("*") if path.is_file()}
    with pytest.raises(
        gw.errors.ConfigError, match=rf"total_steps = {total_steps}, but .*done has 192 steps already; fix: "
    ):
        gw.resume(finished.path, total_steps=total_steps)
    assert {path: path.read_bytes() for path in before} == before


def test_a_resume_that_fails_leaves_the_config_alone(finished: gw.Run):
    state = finished.path / "checkpoints" / "latest" / "policy.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:-1])
    with pytest.raises(gw.errors.CheckpointError):
        gw.resume(finished.path, total_steps=1000)
    state.write_bytes(whole)
    assert RunFolder(finished.path).read_config()["total_steps"] == 192


def test_a_taken_folder_is_noticed_before_environments_are_made(finished: gw.Run):
    def make() -> gymnasium.Env[Any, Any]:
        raise AssertionError

    with pytest.raises(gw.errors.RunFolderError, match="is taken"):
        gw.train(make, PPO, run_dir=finished.path, **TINY)
