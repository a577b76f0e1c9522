"""``groupwise serve``: a vLLM server on this machine, with the flags that training needs."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from groupwise.cli.parser import Parser, count
from groupwise.system import show

HELP = """Start a vLLM server for training on this machine, until Ctrl-C. vLLM is in a virtual environment of its own.

  python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm
  groupwise serve my_model --python .venv-vllm/bin/python
  groupwise serve my_model --python .venv-vllm/bin/python --lora-rank 16 --port 8001 -- --dtype float32
  groupwise train text.json --generation server --generation.urls http://127.0.0.1:8000

Arguments after -- are vLLM's.
"""


def run(parser: Parser, argv: Sequence[str]) -> None:
    """Serve the model in ``argv``."""
    parser.add_argument("model", help="folder or hub id; with adapters, their base model")
    parser.add_argument("--python", type=Path, required=True, help="Python of the environment that has vLLM")
    parser.add_argument("--port", type=count, default=8000, help="(default: 8000)")
    parser.add_argument("--lora-rank", type=count, help="largest rank of adapters, if adapters are trained")
    parser.add_argument("--log", type=Path, help="file for what the server prints (default: a temporary one)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that the start may take (default: 600)")
    end = [*argv, "--"].index("--")
    ours, theirs = argv[:end], argv[end + 1 :]
    options = parser.read(ours)

    from groupwise.serving import LocalServer, command

    with tempfile.TemporaryDirectory(prefix="groupwise-") as folder:
        log = options.log or Path(folder) / "server.log"
        words = command(options.python, options.model, theirs, lora_rank=options.lora_rank)
        server = LocalServer(words, log, options.timeout, port=options.port)
        try:
            show(f"starting {' '.join(server.words)}", f"log: {log}")
            server.wait()
            show(f"ready: {server.url}")
            server.join()
        finally:
            server.close()
