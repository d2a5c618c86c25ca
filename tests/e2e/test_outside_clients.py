"""Programs that we did not write: buf curl calls both services by reflection, and Prometheus scrapes both processes."""

import asyncio
import json
import subprocess
import urllib.parse
import urllib.request
from contextlib import asynccontextmanager

import pytest
import yaml
from support.processes import ManagerProcess, free_port
from support.tiny_worker import tiny_worker

WAIT_SECONDS = 30


@pytest.fixture
def manager():
    with ManagerProcess() as running:
        yield running


async def run(*command: str) -> str:
    """Run a program and return what it prints; its failure fails the test."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), WAIT_SECONDS)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def buf_curl(address: str, *arguments: str) -> str:
    return await run("buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments, f"http://{address}")


async def test_buf_curl_lists_services_and_gets_a_streamed_answer(manager):
    async with tiny_worker(manager=manager.address) as (worker, _):
        address = f"127.0.0.1:{worker.port}"
        assert "scissorhands.v1.GenerationService" in (await buf_curl(address, "--list-services")).split()
        assert "scissorhands.v1.CacheManagerService" in (await buf_curl(manager.address, "--list-services")).split()
        request = {"text": "a" * 100, "maxNewTokens": 40, "ignoreEos": True, "budget": {"tokens": 32}}
        method = f"{address}/scissorhands.v1.GenerationService/Generate"
        answer = await buf_curl(method, "--data", json.dumps(request))
        decoder, events, rest = json.JSONDecoder(), [], answer.strip()
        while rest:
            event, end = decoder.raw_decode(rest)
            events.append(event)
            rest = rest[end:].strip()
        session = events[0]["accepted"]["sessionId"]
        assert events[0]["accepted"]["grant"]["source"] == "GRANT_SOURCE_MANAGER"
        assert sum(len(event.get("delta", {}).get("tokenIds", [])) for event in events) == 40
        assert events[-1]["finish"]["cache"]["evictions"] > 0
        method = f"{manager.address}/scissorhands.v1.CacheManagerService/GetSession"
        described = json.loads(await buf_curl(method, "--data", json.dumps({"sessionId": session})))
        assert described["session"]["spec"]["promptTokens"] == 100


@asynccontextmanager
async def prometheus(folder, targets: dict[str, int]):
    """Run Debian's Prometheus over the targets and yield its address."""
    scrapes = [
        {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in targets.items()
    ]
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": scrapes}))
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), WAIT_SECONDS)


def query(address: str, expression: str) -> dict[str, float]:
    """Return the value of an instant query, by job."""
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            result = json.load(response)["data"]["result"]
    except OSError:
        return {}
    return {series["metric"].get("job", ""): float(series["value"][1]) for series in result}


async def test_prometheus_scrapes_both(manager, tmp_path):
    async with tiny_worker(manager=manager.address) as (worker, _):
        targets = {"worker": worker.metrics_port, "manager": manager.metrics_port}
        async with prometheus(tmp_path, targets) as address:
            found: dict[str, float] = {}
            for _ in range(WAIT_SECONDS * 5):
                found = await asyncio.to_thread(query, address, "up")
                if found == {"worker": 1, "manager": 1}:
                    break
                await asyncio.sleep(0.2)
            assert found == {"worker": 1, "manager": 1}
            capacity = await asyncio.to_thread(query, address, "scissorhands_worker_rows_capacity")
            assert capacity == {"worker": 4}


async def test_promtool_is_content_with_the_managers_metrics(manager):
    url = f"http://127.0.0.1:{manager.metrics_port}/metrics"
    body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read())
    checked = await asyncio.to_thread(
        subprocess.run, ["promtool", "check", "metrics"], check=False, input=body, capture_output=True, timeout=30
    )
    assert (checked.returncode, checked.stderr) == (0, b"")
