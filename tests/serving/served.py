"""A server started by `kvkeep serve`, and a few lines to talk to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from engines import Tokens

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOG_STATS_INTERVAL": "0.1",
    # Scheduler and worker in one process, as on one GPU. Without it each has its own, as with several.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip
FLAGS = (
    "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--max-num-seqs", "16",
)  # fmt: skip


class Server:
    """One running server.

    Args:
        model: folder.
        words: options of `kvkeep serve`.
        flags: of vLLM.
        environment: variables.
    """

    def __init__(self, model: str, words: list[str], *flags: str, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.model = model
        # Short: vLLM makes sockets in it. Our own: whatever is left in it was left by this server.
        self.folder = Path(tempfile.mkdtemp(prefix="kvk", dir="/tmp"))
        self.log = self.folder / "log"
        command = [str(Path(sys.executable).with_name("kvkeep")), "serve", model, *words, "--", *FLAGS, *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **_ENVIRONMENT, "TMPDIR": str(self.folder), **environment},
            )

    @property
    def said(self) -> str:
        """Its output so far."""
        return self.log.read_text()

    @property
    def counters(self) -> list[str]:
        """Names of the files with kvkeep's numbers."""
        return sorted(path.name for path in self.folder.glob("kvkeep-*/*"))

    def wait(self, seconds: float = 240) -> None:
        """Until it serves."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.said[-4000:]}")
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.3)
            else:
                return
        raise RuntimeError(f"the server did not start:\n{self.said[-4000:]}")

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def remove(self) -> None:
        """Stop it if it runs, and remove its folder."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def get(self, path: str) -> str:
        """The body of a page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def post(self, values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """A completion: HTTP status and the answer."""
        body = json.dumps(
            {"model": self.model, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **values}
        )
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", body.encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=200) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def traces(self, requests: list[dict[str, Any]]) -> list[Tokens]:
        """Tokens of completions, all asked for at once."""
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(self.post, requests))
        assert [status for status, _ in answers] == [200] * len(requests), answers
        return [answer["choices"][0]["token_ids"] for _, answer in answers]

    @contextmanager
    def stream(self, prompt: Tokens, length: int) -> Iterator[None]:
        """A completion that has begun; the client hangs up at the end of the block."""
        client = HTTPConnection("127.0.0.1", self.port, timeout=60)
        values = {"model": self.model, "prompt": prompt, "max_tokens": length, "ignore_eos": True, "stream": True}
        client.request("POST", "/v1/completions", json.dumps(values), {"Content-Type": "application/json"})
        answer = client.getresponse()
        assert answer.status == 200
        answer.read(1)
        yield
        answer.close()
        client.close()

    def metrics(self) -> dict[str, float]:
        """kvkeep's numbers on /metrics, summed over engines."""
        found: dict[str, float] = {}
        for name, value in re.findall(r"^kvkeep:(\w+)\{[^}]*\} (\S+)$", self.get("/metrics"), re.M):
            found[name] = found.get(name, 0.0) + float(value)
        return found


@contextmanager
def served(model: str, words: list[str], *flags: str, **environment: str) -> Iterator[Server]:
    """A server that is up, stopped at the end."""
    server = Server(model, words, *flags, **environment)
    try:
        server.wait()
        yield server
    finally:
        server.remove()
