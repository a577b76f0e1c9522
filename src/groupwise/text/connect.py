"""From the settings to a collector whose completions come from servers."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from groupwise.config.generation import ServerGenerationCfg
from groupwise.config.run import TextRunCfg
from groupwise.engines.base import Engine
from groupwise.errors import ConfigError
from groupwise.serving.find import find_server
from groupwise.serving.http import HttpClient
from groupwise.serving.launch import LocalServer, command, free_port
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
    if engine.world_size > 1 and how.python is not None:
        raise ConfigError(
            f"{engine.world_size} processes cannot share a server of one; fix: groupwise serve, and generation.urls"
        )
    with ExitStack() as stack:
        folder = how.weights_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="groupwise-")))
        folder.mkdir(parents=True, exist_ok=True)
        own, urls, more = None, how.urls, {}
        if how.python is not None:
            own = _start(cfg, how, how.python, policy, folder / "server.log")
            stack.callback(own.close)
            own.wait()
            urls, more = (own.url,), {"last_lines": own.last_lines}
        clients = [HttpClient(url, timeout=how.timeout, retries=how.retries, **more) for url in urls]
        servers = [find_server(client, adapters=policy.has_adapters) for client in clients]
        generator = ServedGenerator(servers, policy, folder, engine)
        kind, cleanup = AsyncCollector if how.max_staleness else ServedCollector, ExitStack()
        collector = kind(generator, own, cleanup, *parts, **options)
        cleanup.enter_context(stack.pop_all())  # an error before ends the server at once
    return collector


def _start(cfg: TextRunCfg, how: ServerGenerationCfg, python: Path, policy: CausalLM, log_file: Path) -> LocalServer:
    """A new server of the model that training begins with."""
    model = policy.network.name_or_path
    if not model:
        raise ConfigError("a model made in Python is in no folder that a server could load; fix: model=..., or urls")
    dtype = "float32" if cfg.model.precision == "float32" else "bfloat16"
    rank = policy.model.peft_config["default"].r if policy.has_adapters else None
    port = free_port()
    return LocalServer(
        command(python, model, port, ["--dtype", dtype, *how.args], lora_rank=rank), port, log_file, how.timeout
    )
