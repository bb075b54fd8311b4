"""outpace serve --ray: two replicas on one machine. Ray is not among the packages for development: it has 640 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.serving import live
from tests.tiny_tokenizers import random_model

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'outpace[ray]'")

ASKED = 24  # conversations

PROGRAM = """
import json, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import httpx2, ray
from outpace.serve.replicas.on_ray import FrontServer, RayPool, ReplicaPlan
from outpace.serve.settings import ServeSettings
from tests.serving import free_port, until
from tests.test_replicas_on_ray import ASKED, CHAT, body
from tests.tiny_tokenizers import random_model

folder = Path(sys.argv[1])
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)

def load():
    (folder / f"pid-{os.getpid()}").touch()
    return random_model("tiktoken"), ServeSettings(("tiny",), "tiny", method="suffix")

def pids():
    return [int(path.name.removeprefix("pid-")) for path in sorted(folder.glob("pid-*"))]

settings = ServeSettings(("tiny",), "tiny", port=free_port(), keys={"ann": "key"})
pool = RayPool(load, settings, ReplicaPlan(2, 2, ongoing=8, cpus=0.5))
server = FrontServer(pool, settings)
thread = threading.Thread(target=server.run, daemon=True)
thread.start()
until(lambda: server.started)
client = httpx2.Client(
    base_url=f"http://127.0.0.1:{settings.port}", timeout=300, headers={"Authorization": "Bearer key"}
)

def whole(i):
    reply = client.post(CHAT, json=body(i)).json()
    return reply["choices"][0]["message"]["content"] if "choices" in reply else reply

def streamed(i):
    text = ""
    with client.stream("POST", CHAT, json=body(i, stream=True)) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += event["choices"][0]["delta"].get("content") or "" if "choices" in event else line
    return text

def under_load(happens):
    with ThreadPoolExecutor(12) as threads:
        jobs = [threads.submit((whole, streamed)[i % 2], i // 2 % ASKED) for i in range(4 * ASKED)]
        until(lambda: sum(job.done() for job in jobs) > ASKED)
        happens()
        return [job.result() for job in jobs]

def ended():
    text = client.get("/metrics").text
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith("outpace:request_success_total")]

def one_is_killed():
    os.kill(pids()[0], signal.SIGKILL)

told = {"first": [whole(i) for i in range(ASKED)]}
until(lambda: len(ended()) == 2 and sum(ended()) == ASKED)
told["shares"] = ended()
told["refused"] = client.post(CHAT, json=body(0), headers={"Authorization": "Bearer other"}).status_code
told["killed"] = under_load(one_is_killed)
until(lambda: len(pids()) == 3)
told["updated"] = under_load(pool.deploy)
told["replicas"] = len(pids())
(folder / "told.json").write_text(json.dumps(told))
server.should_exit = True
thread.join()
pool.close()
"""
CHAT = "/v1/chat/completions"


def body(i: int, **given: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Question {i}"}], "max_tokens": 40, "seed": i, **given}


def test_replicas_give_the_texts_of_one_server_and_lose_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    with live(random_model("tiktoken"), method="suffix") as server:
        wanted = [server.post(CHAT, body(i)).json()["choices"][0]["message"]["content"] for i in range(ASKED)]
    assert told["first"] == wanted and told["refused"] == 401
    assert len(told["shares"]) == 2 and all(told["shares"]), "conversations are spread"
    for name in ("killed", "updated"):
        assert told[name] == [wanted[i // 2 % ASKED] for i in range(4 * ASKED)], name
    assert told["replicas"] == 5, "one for the lost one, and two new ones"
