"""``groupwise view``: a local web page that follows runs while they train."""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from secrets import token_urlsafe

from groupwise.cli.parser import Parser
from groupwise.errors import RunFolderError, require_extra
from groupwise.system import show

HELP = """Show the runs of a folder in your browser, and follow them while they train: curves, health, groups.
Only this machine can connect, and only with the address that is printed. Nothing is written or sent anywhere.

Examples:
  groupwise view
  groupwise view runs/<run> --port 8000
"""
HOST = "127.0.0.1"
NICE = 10
"""Training goes first; while it uses all cores, this leaves a tenth of a core."""


def run(parser: Parser, argv: Sequence[str]) -> None:
    """Serve until Ctrl-C."""
    parser.add_argument(
        "runs", type=Path, nargs="?", default=Path("runs"), help="folder of runs, or a run (default: runs)"
    )
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    options = parser.read(argv)
    if not options.runs.is_dir():
        raise RunFolderError(f"there is no folder {str(options.runs)!r}; fix: a folder of runs, or train one first")
    require_extra("starlette", "view")
    require_extra("uvicorn", "view")
    serve(options.runs, options.port)


def serve(root: Path, port: int) -> None:
    """Serve the runs in ``root``, and print the address.

    Raises:
        OSError: the port is taken.
    """
    # what pages need is imported before the priority falls: while training uses all cores they would take a minute
    import matplotlib.backends.backend_svg  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import uvicorn

    from groupwise.report.view import Viewer

    if sys.platform != "win32":
        os.nice(NICE)
    token = token_urlsafe(24)
    with socket.create_server((HOST, port)) as listener:
        show(f"http://{HOST}:{listener.getsockname()[1]}/{token}/", "Ctrl-C ends it.")
        # no access log: it would print the token; open pages do not delay the end
        cfg = uvicorn.Config(Viewer(root, token).app(), log_level="warning", timeout_graceful_shutdown=1)
        uvicorn.Server(cfg).run(sockets=[listener])
