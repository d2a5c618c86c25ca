"""Dockerfiles, compose file, Prometheus configuration and dashboards: valid, and true to the code."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from scissorhands import __version__
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.settings import variable
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
BIN = Path(sys.executable).parent
DASHBOARDS = sorted((DOCKER / "grafana" / "dashboards").glob("*.json"))
OURS = {"worker": (50051, 9101), "manager": (50052, 9102)}


def run(*command):
    finished = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


@pytest.fixture(scope="module")
def expressions():
    boards = [json.loads(path.read_text())["panels"] for path in DASHBOARDS]
    found = [target["expr"] for panels in boards for panel in panels for target in panel.get("targets", [])]
    assert len(found) > 100
    return found


def test_compose_file_has_the_schema():
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker/compose.yaml")


def test_dockerfiles_are_clean():
    files = sorted(str(path.relative_to(ROOT)) for path in DOCKER.glob("*.Dockerfile"))
    assert files == ["docker/manager.Dockerfile", "docker/worker.Dockerfile"]
    run(BIN / "hadolint", *files)


def test_prometheus_accepts_its_configuration():
    run("promtool", "check", "config", "docker/prometheus/prometheus.yml")


def test_prometheus_scrapes_what_the_services_serve(services):
    jobs = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    found = [source for job in jobs for source in job["dns_sd_configs"]]
    targets = {(name, source["port"]) for source in found for name in source["names"]}
    assert targets == {(name, metrics) for name, (_, metrics) in OURS.items()}
    assert {source["type"] for source in found} == {"A"}
    for name, ports in OURS.items():
        published = {int(port.rsplit(":", 1)[1]) for port in services[name]["ports"]}
        assert published == set(ports)
        exposed = re.search(r"^EXPOSE (.*)$", (DOCKER / f"{name}.Dockerfile").read_text(), re.MULTILINE)
        assert {int(port) for port in exposed[1].split()} == set(ports)


def test_all_of_a_kind_have_one_name_and_ports_of_their_own(services):
    kinds = {"worker": {"worker", "worker-2", "worker-gpu"}, "manager": {"manager", "manager-2"}}
    for name, members in kinds.items():
        assert {each for each, service in services.items() if f"scissorhands-{name}:" in service["image"]} == members
        for each in members:
            assert services[each]["networks"]["serving"]["aliases"] == [name]
    profile = [service for service in services.values() if "two" in service.get("profiles", ["two"])]
    ports = [port.rsplit(":", 1)[0] for service in profile for port in service.get("ports", [])]
    assert len(set(ports)) == len(ports) == 10


def test_nothing_is_published_beyond_this_machine_by_default(services):
    for service in services.values():
        for port in service.get("ports", []):
            assert port.startswith("${SCISSORHANDS_PUBLISH:-127.0.0.1}:")


def test_every_image_has_an_exact_version(services):
    for service in services.values():
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"])


def test_our_images_are_labelled_and_called_by_the_version(services):
    for name in OURS:
        text = (DOCKER / f"{name}.Dockerfile").read_text()
        labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', text))
        assert labels["title"] == f"scissorhands-{name}"
        assert labels["version"] == __version__
        assert {"description", "licenses"} <= set(labels)
        assert services[name]["image"] == f"scissorhands-{name}:{__version__}"


def test_every_service_is_checked_and_waits_for_what_it_needs(services):
    for service in services.values():
        if "build" in service:
            assert "HEALTHCHECK" in (ROOT / service["build"]["dockerfile"]).read_text()
        else:
            assert service["healthcheck"]["test"]
    for name, needed in {"manager": "redis", "worker": "manager", "grafana": "prometheus"}.items():
        assert services[name]["depends_on"] == {needed: {"condition": "service_healthy"}}


def test_every_service_is_bounded_and_confined(services):
    for service in services.values():
        assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        # This driver rotates what it writes.
        assert service["logging"]["driver"] == "local"


def test_one_profile_has_one_kind_of_worker_and_one_is_chosen(services):
    assert {name: service["profiles"] for name, service in services.items() if "profiles" in service} == {
        "worker": ["cpu", "two"],
        "worker-2": ["two"],
        "manager-2": ["two"],
        "worker-gpu": ["gpu"],
    }
    assert "COMPOSE_PROFILES=cpu" in (DOCKER / ".env").read_text().splitlines()


def test_the_password_of_the_store_comes_from_a_file(services):
    known = yaml.safe_load((DOCKER / "compose.yaml").read_text())["secrets"]
    assert set(known) == {"store_password"}
    readers = {name for name, service in services.items() if "secrets" in service}
    assert readers == {"redis", "manager", "manager-2"}
    assert all(services[name]["secrets"] == ["store_password"] for name in readers)
    file = services["manager"]["environment"]["SCISSORHANDS_MANAGER_STORE_PASSWORD_FILE"]
    assert file == "/run/secrets/store_password"
    assert f"requirepass $$(cat {file})" in services["redis"]["command"][-1]


def test_only_managers_reach_the_store(services):
    reach = {name for name, service in services.items() if "store" in service["networks"]}
    assert reach == {"redis", "manager", "manager-2"}


def test_images_are_installed_with_the_constraints_and_run_without_root():
    for path in DOCKER.glob("*.Dockerfile"):
        text = path.read_text()
        for install in re.findall(r"pip install[^\n]*", text):
            assert "-c constraints.txt" in install
        assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)


def test_the_dashboards_are_current_and_made_for_the_grafana_that_shows_it(services):
    run(sys.executable, "scripts/generate_dashboard.py", "--check")
    grafana = services["grafana"]["image"].rsplit(":", 1)[1]
    sdk = version("grafana-foundation-sdk").rsplit("!", 1)[1]
    assert grafana.split(".")[:2] == sdk.split(".")[:2]


def test_the_dashboards_queries_are_promql(expressions, tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(expressions)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in run("promtool", "check", "rules", str(path))


def test_every_metric_of_the_dashboard_exists(expressions):
    registry = CollectorRegistry()
    WorkerMetrics(registry, "model", rows=1, queue=1)
    ManagerMetrics(registry)
    existing = {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}
    for expression in expressions:
        names = re.findall(r"scissorhands_\w+", expression)
        assert names or expression.startswith("up")
        for name in names:
            assert name in existing, expression
            for grouped in re.findall(r"by \(([^)]*)\)", expression):
                assert {label.strip() for label in grouped.split(",")} <= existing[name], expression
        for name, selector in re.findall(r"(scissorhands_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=~", selector)) <= {*existing[name], "instance"}, expression


def test_every_variable_is_defined_and_every_panel_described():
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        defined = {each["name"] for each in board["templating"]["list"]}
        used = set(re.findall(r"\$\{?([a-z]\w*)", path.read_text()))
        assert used == defined
        for panel in board["panels"]:
            assert panel["type"] == "row" or panel["description"], panel["title"]
            assert panel["type"] != "timeseries" or panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_the_containers_set_only_settings_that_exist(services):
    for name, kind in (("worker", WorkerSettings), ("manager", ManagerSettings)):
        known = {variable(kind, field) for field in kind.model_fields}
        image = set(re.findall(r"\bSCISSORHANDS_\w+(?==)", (DOCKER / f"{name}.Dockerfile").read_text()))
        assert f"SCISSORHANDS_{name.upper()}_HOST" in image
        assert image | set(services[name]["environment"]) <= known


def test_the_guide_names_only_settings_that_exist():
    named = set(re.findall(r"SCISSORHANDS_(?:WORKER|MANAGER)_\w+", (ROOT / "docs" / "deployment.md").read_text()))
    known = {variable(kind, field) for kind in (WorkerSettings, ManagerSettings) for field in kind.model_fields}
    assert len(named) >= 8
    assert named <= known


def test_the_dashboard_can_be_provisioned(services):
    provider = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/scissorhands.yaml").read_text())
    (folder,) = [entry["options"]["path"] for entry in provider["providers"]]
    assert f"./grafana/dashboards:{folder}:ro" in services["grafana"]["volumes"]
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert home.name in {path.name for path in DASHBOARDS}
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len(boards) == 5
    for board in boards:
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in board["panels"]:
            letters = [target["refId"] for target in panel.get("targets", [])]
            assert len(set(letters)) == len(letters)
