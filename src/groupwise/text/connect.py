"""From the settings to a collector whose completions come from servers."""

import tempfile
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.config.generation import ServerGenerationCfg
from groupwise.config.run import TextRunCfg
from groupwise.engines.base import Engine
from groupwise.errors import ConfigError
from groupwise.serving.http import HEALTH, HttpClient, RestartedError
from groupwise.serving.launch import LocalServer, command, last_lines
from groupwise.serving.placed import PlacedServer, folder_of_run, give_command, in_folder
from groupwise.serving.vllm import VLLMServer
from groupwise.text.asynchronous import AsyncCollector
from groupwise.text.policy import CausalLM
from groupwise.text.served import ServedCollector, ServedGenerator


def connect(cfg: TextRunCfg, policy: CausalLM, engine: Engine, *parts: Any, **options: Any) -> ServedCollector:
    """The collector of a run on servers: those that the settings name, or one that is started here.

    Args:
        parts, options: what ``TextCollector`` takes besides the policy and the generator.
    """
    how = cfg.generation
    assert isinstance(how, ServerGenerationCfg)
    if engine.world_size > 1 and how.max_staleness:
        raise ConfigError(
            f"generation.max_staleness={how.max_staleness} needs one process, got {engine.world_size}; fix: max_staleness=0"
        )
    if how.in_flight_updates and policy.has_adapters:
        raise ConfigError(
            "generation.in_flight_updates=True with adapters: servers finish a completion by the adapters that began it; fix: "
            "in_flight_updates=False, or lora=None"
        )
    with ExitStack() as stack:
        kind, cleanup = AsyncCollector if how.max_staleness else ServedCollector, ExitStack()
        folder, own, clients = _find(cfg, how, policy, engine, stack)
        kinds = {"adapters": policy.has_adapters, "in_flight_updates": how.in_flight_updates}
        servers = [VLLMServer(client, **kinds) for client in clients]
        generator = ServedGenerator(servers, policy, folder, engine)
        collector = kind(generator, own, cleanup, *parts, **options)
        cleanup.enter_context(stack.pop_all())  # an error before ends the server at once
    return collector


def _find(
    cfg: TextRunCfg, how: ServerGenerationCfg, policy: CausalLM, engine: Engine, stack: ExitStack
) -> tuple[Path, LocalServer | None, list[HttpClient]]:
    """The folder for weights, the server that was started here, and clients of all servers."""
    limits: dict[str, Any] = {"timeout": how.timeout, "retries": how.retries}
    placed = folder_of_run()
    if placed is not None:
        if engine.rank == 0:
            give_command(placed, _command(cfg, how, policy))
        return placed, None, [_client_of(server, limits) for server in in_folder(placed)]
    folder = how.weights_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="groupwise-")))
    folder.mkdir(parents=True, exist_ok=True)
    if how.python is None:
        return folder, None, [HttpClient(url, **limits) for url in how.urls]
    if engine.world_size > 1:
        raise ConfigError(
            f"{engine.world_size} processes cannot share a server of one; fix: groupwise serve, and generation.urls"
        )
    own = LocalServer(_command(cfg, how, policy), folder / "server.log", how.timeout)
    stack.callback(own.close)
    own.wait()
    return folder, own, [HttpClient(own.url, **limits, last_lines=partial(last_lines, own.log))]


def _client_of(server: PlacedServer, limits: dict[str, Any]) -> HttpClient:
    url = server.wait(2 * limits["timeout"])
    client = HttpClient(url, **limits, last_lines=partial(last_lines, server.log), locate=server.url)
    with suppress(RestartedError):  # the address was that of an earlier start
        client.get(HEALTH)
    return client


def _command(cfg: TextRunCfg, how: ServerGenerationCfg, policy: CausalLM) -> list[str]:
    """Starts a server of the model that training begins with."""
    model = policy.network.name_or_path
    if not model:
        raise ConfigError("a model made in Python is in no folder that a server could load; fix: model=..., or urls")
    dtype = "float32" if cfg.model.precision == "float32" else "bfloat16"
    rank = policy.model.peft_config["default"].r if policy.has_adapters else None
    assert how.python is not None
    return command(how.python, model, ["--dtype", dtype, *how.args], lora_rank=rank)
