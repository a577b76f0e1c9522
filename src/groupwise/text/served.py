"""Completions from inference servers, in place of the model's own decoding."""

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers.utils import logging as bars

from groupwise import system as files
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import ServerGenerationCfg
from groupwise.data.rollout import TensorDict
from groupwise.engines import Engine
from groupwise.serving import Answer, GroupRequest, LostWeightsError, VLLMServer
from groupwise.text.collector import TextCollector, Transcript, write, write_turn
from groupwise.text.generation import Completion
from groupwise.text.policy import CausalLM

log = logging.getLogger(__name__)

_SECONDS_TO_LOAD = 10.0
"""A server that is interrupted while it loads weights stays paused until another run uses it."""
_AT_ONCE = 256
"""Calls that wait for answers at the same time. The servers batch them."""


class ServedGenerator:
    """Generates with the weights that the servers were given last.

    A group is one request, so it stays on one server. Policies of all ranks are the same; the first gives it to the servers,
    in its ``folder``, which older weights leave. A server that has lost its weights, as by a restart, gets them again from
    each rank that finds out, and its requests are repeated.
    """

    def __init__(
        self, servers: Sequence[VLLMServer], policy: CausalLM, folder: Path, engine: Engine | None = None
    ) -> None:
        self.servers, self.policy, self.engine = servers, policy, engine or Engine()
        self._loading = Lock()
        self._reloads = Counter[VLLMServer]()
        """How often each server has lost its weights."""
        # the versions of another run on the same servers are others
        self.folder, self._run = self.engine.gather_objects((folder.absolute(), secrets.token_hex(4)))[0]
        self.policy_version = -1
        """Iteration whose policy the servers have; a completion of an earlier one is an error."""
        for server in servers:
            server.check()

    def update(self, iteration: int) -> None:
        """Give all servers the policy's weights."""
        self.save(iteration)
        self.load(iteration)
        self.engine.gather_objects(None)  # the others wait

    def save(self, iteration: int) -> None:
        """Write the policy's weights for the servers to read."""
        if self.engine.rank == 0:
            shown = bars.is_progress_bar_enabled()
            bars.disable_progress_bar()
            try:
                self.policy.save_model(self.folder / self._version(iteration))
            finally:
                if shown:
                    bars.enable_progress_bar()

    def load(self, iteration: int) -> None:
        """Give all servers weights that were saved, unless they have them or later ones."""
        with self._loading:
            if self.engine.rank == 0 and iteration > self.policy_version:
                _at_once(partial(self._load, iteration=iteration), self.servers)
                self._remove_weights(before=iteration)
            self.policy_version = max(iteration, self.policy_version)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Int[Tensor, "prompt member"],
        sampling: SamplingCfg,
        *,
        deterministic: bool = False,
        pasts: object = None,
        alone: bool = False,
        first: int = 0,
    ) -> list[list[Completion]]:
        """Completions of each prompt, as by ``complete``; the first seed of a group stands for all. Servers keep their own cache.

        Args:
            alone: make a request of each completion, with its own seed.
            first: number of the first prompt, which chooses its server.
        """
        if alone:
            size, each = seeds.shape[1], [prompt for prompt in prompts for _ in range(seeds.shape[1])]
            ones = self(each, seeds.reshape(-1, 1), sampling, deterministic=deterministic, first=first)
            return [[one for (one,) in ones[place : place + size]] for place in range(0, len(ones), size)]
        version = self._version(self.policy_version)
        fixed = (sampling, tuple(self.policy.eos_ids), len(self.policy.head), version, deterministic)
        asked = [
            (self.servers[number % len(self.servers)], GroupRequest(prompt, seeds.shape[1], seed, *fixed))
            for number, (prompt, seed) in enumerate(
                zip(prompts, seeds[:, 0].tolist(), strict=True), self.engine.rank + first
            )
        ]
        with self._loading:  # not while a server loads
            before = self._reloads.copy()
        answers = _at_once(_ask, asked, leaves=True)
        lost = [number for number, answer in enumerate(answers) if isinstance(answer, LostWeightsError)]
        if lost:
            with self._loading:  # unless another thread has done it
                servers = {asked[number][0] for number in lost}
                if servers := {server for server in servers if self._reloads[server] == before[server]}:
                    log.warning("%s; it gets the weights again", answers[lost[0]])
                    _at_once(partial(self._load, iteration=self.policy_version), [*servers])
                    self._reloads.update(servers)
            for number, answer in zip(
                lost, _at_once(_ask, [asked[number] for number in lost], leaves=True), strict=True
            ):
                if isinstance(answer, LostWeightsError):
                    raise answer
                answers[number] = answer
        return [
            [Completion(a.tokens, a.log_probs, a.stop, policy_version=[*map(_iteration, a.versions)]) for a in group]
            for group in answers
        ]

    def close(self) -> None:
        """End the calls that run, and remove the weights. Servers that load weights have a moment to finish."""
        is_loaded = self._loading.acquire(timeout=_SECONDS_TO_LOAD)
        for server in self.servers:
            server.close()
        if is_loaded:
            self._loading.release()
        if self.engine.rank == 0:
            self._remove_weights()

    def _version(self, iteration: int) -> str:
        return f"{self._run}-{iteration}"

    def _remove_weights(self, before: int | None = None) -> None:
        for path in self.folder.glob(f"{self._run}-*"):
            if before is None or _iteration(path.name) < before:
                files.remove(path)

    def _load(self, server: VLLMServer, iteration: int) -> None:
        version = self._version(iteration)
        folder = self.folder / version
        with (folder / f"{self.servers.index(server)}.lock").open("wb") as file:
            while not files.lock(file, exclusive=True):  # ranks find out at the same time
                time.sleep(0.1)
            server.update(folder, version)


class ServedCollector(TextCollector):
    """Has completions generated by servers, which get the policy's weights before each rollout. ``cleanup`` is closed with it."""

    def __init__(self, generator: ServedGenerator, cleanup: ExitStack, *args: Any, **options: Any) -> None:
        super().__init__(generator.policy, generator, *args, **options)
        self.generator = generator
        self._cleanup = cleanup
        self._numbers: dict[str, float] = {}
        """Metrics of the servers in this rollout."""

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """The rollout of new groups; a ``ServerError`` if a server failed."""
        self._give_weights()
        rollout = super().collect(num_steps, rollout)
        self._metrics |= self._numbers
        return rollout

    def close(self) -> None:
        """End the run's own server, too."""
        self.generator.close()  # which ends the episodes that still run in threads
        super().close()
        self._cleanup.close()

    def _written(self, count: int, first: int) -> list[list[Transcript]]:
        groups = self._open(count, first)
        self._write([*chain(*groups)])
        return groups

    def _write(self, transcripts: Sequence[Transcript]) -> None:
        """One request for the first turn of a group; after it, each member makes its own.

        Where environments play in threads, no member waits for another: the server batches their requests.
        """
        dialogue, sampling = self._dialogue, self._cfg.sampling
        if dialogue.envs is None:
            write(transcripts, self.generate, sampling, dialogue)
            return
        dialogue.begin(transcripts, sampling.max_new_tokens)
        write_turn(transcripts, self.generate, sampling, dialogue, {})

        def finish(members: Sequence[Transcript], first: int) -> None:
            while members := dialogue.answer(members, sampling.max_new_tokens):
                write_turn(members, partial(self.generate, alone=True, first=first), sampling, dialogue, {})

        if dialogue.envs.threads < 2:
            finish(transcripts, 0)
        else:
            dialogue.envs.each(lambda one: finish([one], one.group), transcripts, _AT_ONCE)

    def _give_weights(self) -> None:
        start = time.perf_counter()
        self.generator.update(self.iteration)
        self._numbers = {"rollout/sync_seconds": time.perf_counter() - start}


def _iteration(version: str) -> int:
    return int(version.rpartition("-")[2])


def _at_once(work: Callable[[Any], Any], items: Sequence[Any], *, leaves: bool = False) -> list[Any]:
    """Results of ``work`` for each item, called in threads, which an interrupt ``leaves`` or waits for."""
    pool, wait = ThreadPoolExecutor(min(len(items), _AT_ONCE)), True
    try:
        return list(pool.map(work, items))
    except KeyboardInterrupt:  # what was trained is saved at once; close() ends the calls
        wait = not leaves
        raise
    finally:
        pool.shutdown(wait, cancel_futures=True)


def _ask(asked: tuple[VLLMServer, GroupRequest]) -> list[Answer] | LostWeightsError:
    server, request = asked
    try:
        return server.generate(request)
    except LostWeightsError as error:
        return error


# Asynchronous collection: servers generate the next rollouts while the learner updates


Written = tuple[list[list[Transcript]], float]
"""The groups of a rollout, and the seconds in which servers got the weights that it begins with."""


class AsyncCollector(ServedCollector):
    """Has rollouts written ahead: with the one that is trained on, at most ``max_staleness + 1`` of them."""

    repeatable = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        how = self._cfg.generation
        assert isinstance(how, ServerGenerationCfg)
        self.max_staleness = how.max_staleness
        at_once = self.max_staleness + 1 if how.in_flight_updates else 1
        self._threads = ThreadPoolExecutor(at_once, "groupwise generation")
        self._queue: deque[Future[Written]] = deque()
        self._last_taken = time.perf_counter()

    def close(self) -> None:
        """Cancel the running requests, and end the threads."""
        for ahead in self._queue:
            ahead.cancel()
        self.generator.close()
        self._threads.shutdown()
        super().close()

    def _give_weights(self) -> None:
        """Save the weights, and queue that the servers load them and write rollouts by them."""
        for ahead in self._queue:
            if ahead.done() and (error := ahead.exception()):
                raise error
        self.generator.save(self.iteration)
        for number in range(len(self._queue), self.max_staleness + 1):
            groups = self._open(self._cfg.num_prompts, ahead=number)
            self._queue.append(self._threads.submit(self._write_ahead, groups, self.iteration))

    def _write_ahead(self, groups: list[list[Transcript]], weights: int) -> Written:
        """The groups, started with these weights or later ones."""
        begun = time.perf_counter()
        self.generator.load(weights)
        seconds = time.perf_counter() - begun
        self._write([*chain(*groups)])
        return groups, seconds

    def _written(self, count: int, first: int) -> list[list[Transcript]]:
        """The oldest rollout of the queue."""
        asked = time.perf_counter()
        groups, seconds = self._queue[0].result()
        self._queue.popleft()
        now = time.perf_counter()
        ages = [
            self.iteration - version for member in chain(*groups) for version in member.policy_version if version >= 0
        ]
        assert 0 <= min(ages) <= max(ages) <= self.max_staleness  # others are an error before
        self._numbers = {"rollout/sync_seconds": seconds, "rollout/staleness": fmean(ages)}
        self._numbers["time/learner_idle_fraction"] = (now - asked) / (now - self._last_taken)
        self._last_taken = now
        return groups
