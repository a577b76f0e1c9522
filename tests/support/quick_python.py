"""An executable that runs Python's command lines in forks of a process that has imported the library: new ones take seconds."""

import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path

import torch
from forked import CONTEXT

CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
words = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(words).to_bytes(8, "big")], [0, 1, 2])
server.sendall(words)
code = int(server.recv(8) or 1)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


TESTS = str(Path(__file__).parents[1])


@contextmanager
def quick_python():
    """Its path. A process ends with the one that was started in its place, and with the block.

    It takes the options ``-P``, ``-u``, ``-W ACTION``, ``-m`` and ``-c``. Before Python 3.12 functions of ``atexit`` are not called.
    """
    with tempfile.TemporaryDirectory(prefix="quick-") as folder:
        address, path = f"{folder}/socket", Path(folder, "python")
        path.write_text(CLIENT.format(python=sys.executable, address=address))
        path.chmod(0o755)
        end, here = CONTEXT.Pipe(duplex=False)  # the end of this process is seen, too, however it comes
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            server = CONTEXT.Process(target=_serve, args=(listener, end))
            server.start()
        end.close()
        try:
            yield path
        finally:
            here.close()
            server.join()


def _serve(listener, end):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group of the tests
    keepers = 0
    while listener in wait([listener, end]):
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            try:
                _keep(connection, end)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        connection.close()
        keepers += 1
        while keepers and os.waitpid(-1, os.WNOHANG)[0]:
            keepers -= 1
    for _ in range(keepers):
        os.wait()


def _keep(connection, end):
    """Start the process, and say how it ends; kill it where nobody waits for it."""
    size, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    words = json.loads(connection.makefile("rb").read(int.from_bytes(size, "big")))
    process = multiprocessing.get_context("fork").Process(target=_run, args=(connection, end, descriptors, *words))
    process.start()
    with suppress(OSError):  # it does so, too
        os.setpgid(process.pid, process.pid)
    for descriptor in descriptors:  # whoever reads them sees their end
        os.close(descriptor)
    ended = process.sentinel in wait([process.sentinel, connection, end])
    if not ended:
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if ended:
        connection.sendall(str(process.exitcode).encode())
        os._exit(0)


def _run(connection, end, descriptors, words, folder, environment):
    connection.close()
    end.close()
    os.setpgid(0, 0)  # what is sent to its group is for itself and what it has started
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    streams = (os.fdopen(number, how, buffering=1, closefd=False) for number, how in enumerate("rww"))
    sys.stdin, sys.stdout, sys.stderr = streams
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if words[1:4] == ["-P", "-m", "pytest"]:  # it rewrites what it imports
        sys.exit(subprocess.call([sys.executable, *words[1:]]))
    sys.executable, *words = words
    is_safe = "PYTHONSAFEPATH" in environment
    while words[0] in ("-P", "-W", "-u"):
        option = words.pop(0)
        is_safe |= option == "-P"
        if option == "-W":
            warnings.simplefilter(words.pop(0))
    how = words[0] if words[0] in ("-m", "-c") else ""
    assert how or not words[0].startswith("-"), words
    places = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = places + [path for path in sys.path if not path.startswith(TESTS)]
    sys.argv = {"-m": words[1:], "-c": ["-c", *words[2:]]}.get(how, words)
    here = "" if how else str(Path(words[0]).resolve().parent)
    sys.path[:0] = [] if is_safe else [here]
    if how == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif how == "-c":
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(words[0], run_name="__main__")
