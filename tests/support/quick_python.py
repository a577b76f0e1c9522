"""An executable that runs Python's command lines in forks of a process that has imported the library: new ones take seconds."""

import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import warnings
from contextlib import contextmanager
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


@contextmanager
def quick_python():
    """Its path. A process ends with the one that was started in its place, and with the block."""
    with tempfile.TemporaryDirectory(prefix="quick-") as folder:
        address, path = f"{folder}/socket", Path(folder, "python")
        path.write_text(CLIENT.format(python=sys.executable, address=address))
        path.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            server = CONTEXT.Process(target=_serve, args=(listener,))
            server.start()
        try:
            yield path
        finally:
            server.kill()
            server.join()


def _serve(listener):
    keepers = 0
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            try:
                _keep(connection)
            finally:
                os._exit(1)
        connection.close()
        keepers += 1
        while keepers and os.waitpid(-1, os.WNOHANG)[0]:
            keepers -= 1


def _keep(connection):
    """Start the process, and say how it ends; kill it where nobody waits for it."""
    size, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    words = json.loads(connection.makefile("rb").read(int.from_bytes(size, "big")))
    process = multiprocessing.get_context("fork").Process(target=_run, args=(connection, descriptors, *words))
    process.start()
    for descriptor in descriptors:  # whoever reads them sees their end
        os.close(descriptor)
    if process.sentinel in wait([process.sentinel, connection]):
        process.join()
        connection.sendall(str(process.exitcode).encode())
        os._exit(0)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _run(connection, descriptors, words, folder, environment):
    connection.close()
    os.setpgrp()  # what is sent to its group is for itself and what it has started
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    streams = (os.fdopen(number, how, closefd=False) for number, how in enumerate("rww"))
    sys.stdin, sys.stdout, sys.stderr = streams
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if words[1:3] == ["-P", "-m"] and words[3] == "pytest":  # it rewrites what it imports
        os.execv(sys.executable, [sys.executable, *words[1:]])
    sys.executable, *words = words
    is_safe = "PYTHONSAFEPATH" in environment
    while words[0] in ("-P", "-W", "-u"):
        option = words.pop(0)
        is_safe |= option == "-P"
        if option == "-W":
            warnings.simplefilter(words.pop(0))
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    how, *sys.argv = words if words[0] in ("-m", "-c") else ["", *words]
    here = "" if how else str(Path(sys.argv[0]).resolve().parent)
    sys.path[:0] = [] if is_safe else [here]
    if how == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        exec(compile(sys.argv[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
