"""The launcher, with a server of a few lines in place of vLLM."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import groupwise as gw
from groupwise import cli
from groupwise.serving import LocalServer, command, free_port, is_healthy

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

args = sys.argv[1:]
with open(args[args.index("--model") + 1] + "/started.json", "w") as file:
    json.dump({"args": args, "dev": os.environ["VLLM_SERVER_DEV_MODE"], "pid": os.getpid()}, file)
print("loading weights", flush=True)
if "--broken" in args:
    sys.exit("RuntimeError: no memory")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


HTTPServer(("127.0.0.1", int(args[args.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path):
    """What runs as the Python of an environment with vLLM."""
    (tmp_path / "server.py").write_text(SERVER)
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/server.py "$@"\n')
    path.chmod(0o755)
    return path


def started(folder):
    return json.loads((folder / "started.json").read_text())


def alive(pid):
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid):
    """A killed process closes its port before it has ended."""
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)


def test_a_server_starts_with_the_flags_of_training_and_ends_with_the_run(python, tmp_path):
    port = free_port()
    started_by = command(python, str(tmp_path), ["--extra"], lora_rank=12)
    server = LocalServer(started_by, tmp_path / "log", port=port)
    server.wait()
    assert is_healthy(server.url)
    args = " ".join(started(tmp_path)["args"])
    assert args.startswith(f"-m vllm.entrypoints.openai.api_server --model {tmp_path} ")
    assert args.endswith(f" --host 127.0.0.1 --port {port}")
    for words in ("--logprobs-mode processed_logprobs", "--generation-config vllm", "--max-lora-rank 16", "--extra"):
        assert words in args
    assert started(tmp_path)["dev"] == "1"
    with pytest.raises(gw.errors.ConfigError, match=f"port {port} cannot be used .*fix: another one"):
        LocalServer(started_by, tmp_path / "log", port=port)
    server.close()
    assert not is_healthy(server.url)
    wait_for_end(started(tmp_path)["pid"])


def test_a_free_port_is_none_that_the_system_gives_to_others():
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10
    system = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, system.read_text().split()) if system.exists() else (32_768, 65_535)
    assert not ports & set(range(first, last + 1))


def test_a_server_that_cannot_start_ends_with_its_last_lines(python, tmp_path, capsys):
    wanted = ["serve", str(tmp_path), "--python", str(python), "--port", str(free_port()), "--", "--broken"]
    assert cli.main(wanted) == 2
    ending = "its errors:\nRuntimeError: no memory\nits last lines:\nloading weights\nRuntimeError: no memory"
    assert f"the server ended with exit code 1; {ending}" in capsys.readouterr().err
    wanted[3] = "no/such/python"
    assert cli.main(wanted) == 2
    assert "python='no/such/python' is no file; fix: the Python of an environment" in capsys.readouterr().err


@pytest.mark.parametrize("with_leader", [False, True], ids=["alone", "with its child"])
def test_a_killed_command_leaves_no_server(python, tmp_path, with_leader):
    command = ["serve", str(tmp_path), "--python", str(python), "--port", str(free_port())]
    words = [sys.executable, "-m", "groupwise", *command]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert any("ready: http://127.0.0.1:" in line for line in process.stdout)
    pid = started(tmp_path)["pid"]
    assert alive(pid)
    if with_leader:  # as Ray kills children of its workers
        process.send_signal(signal.SIGSTOP)
        os.kill(os.getpgid(pid), signal.SIGKILL)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_for_end(pid)
