"""The generated reference: complete, and found stale when it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from scissorhands.v1 import (
    budget_pb2,
    cache_manager_pb2,
    generation_pb2,
    model_pb2,
    prefix_pb2,
    quality_pb2,
    recall_pb2,
    store_pb2,
    suspension_pb2,
)
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.settings import variable
from scissorhands_server.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    budget_pb2,
    cache_manager_pb2,
    generation_pb2,
    model_pb2,
    prefix_pb2,
    quality_pb2,
    recall_pb2,
    store_pb2,
    suspension_pb2,
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages as they are generated now, which need not be those that are committed."""
    folder = tmp_path_factory.mktemp("docs")
    code = f"import generate_reference as g, pathlib; g.DOCS = pathlib.Path({str(folder)!r}); g.main()"
    run(code, check=True)
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.md")}


def run(code, *arguments, check=False):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'scripts'); {code}", *arguments]
    return subprocess.run(command, cwd=ROOT, check=check, capture_output=True, text=True, timeout=120)


def cells(line):
    return [cell.strip() for cell in line.replace("\\|", "").strip("|").split("|")]


@pytest.mark.parametrize("kind", [ManagerSettings, WorkerSettings])
def test_every_setting_has_a_row_with_its_variable(pages, kind):
    rows = {cells(line)[1]: cells(line) for line in pages["configuration.md"].splitlines() if line.startswith("| `")}
    for name, field in kind.model_fields.items():
        row = rows[f"`{variable(kind, name)}`"]
        assert row[0].startswith(f"`--{name.replace('_', '-')}")
        assert row[2]
        assert (row[3] == "required") == field.is_required()


def test_bounds_and_types_are_those_that_are_enforced(pages):
    rows = {cells(line)[1]: cells(line) for line in pages["configuration.md"].splitlines() if line.startswith("| `")}
    assert rows["`SCISSORHANDS_WORKER_PORT`"][2:5] == ["integer", "`50051`", "at least 0 and at most 65,535"]
    assert rows["`SCISSORHANDS_MANAGER_BUDGET_FRACTION`"][2:5] == ["number", "`0.2`", "above 0 and at most 1"]
    assert rows["`SCISSORHANDS_MANAGER_STORE_PASSWORD`"][2:4] == ["text, secret", "none"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.__name__.rpartition(".")[2])
def test_every_message_field_and_value_has_a_row(pages, file):
    described = file.DESCRIPTOR
    page = pages[f"api/{Path(described.name).stem}.md"]
    for message in described.message_types_by_name.values():
        section = page.partition(f"\n## {message.name}\n")[2].partition("\n## ")[0]
        assert section.strip()
        fields = {cells(line)[1]: cells(line) for line in section.splitlines() if line.startswith("| ")}
        for field in message.fields:
            number, _, kind, meaning = fields[f"`{field.name}`"]
            assert number == str(field.number)
            assert kind
            assert meaning
    for enum in described.enum_types_by_name.values():
        section = page.partition(f"\n## {enum.name}\n")[2].partition("\n## ")[0]
        assert all(f"| {value.number} | `{value.name}` |" in section for value in enum.values)
    for service in described.services_by_name.values():
        section = pages["api.md"].partition(f"\n## {service.name}\n")[2].partition("\n## ")[0]
        assert all(f"| `{method.name}` |" in section for method in service.methods)


def test_links_lead_to_headings(pages):
    assert "manager" in pages["api.md"]
    for name, page in pages.items():
        folder = Path(name).parent
        for target in page.split("](")[1:]:
            path, _, heading = target.partition(")")[0].partition("#")
            found = pages.get(str(folder / path))
            if found is None:
                assert (ROOT / "docs" / folder / path).exists(), target
            elif heading:
                headings = [line[3:].lower().replace(".", "") for line in found.splitlines() if line.startswith("## ")]
                assert heading in headings, (name, target)


def test_a_stale_page_is_found_and_named(tmp_path):
    code = f"import generate_reference as g, pathlib; g.DOCS = pathlib.Path({str(tmp_path)!r}); g.main()"
    assert run(code).returncode == 0
    assert run(code, "--check").returncode == 0
    page = tmp_path / "configuration.md"
    page.write_text(page.read_text().replace("50051", "50061"))
    checked = run(code, "--check")
    assert checked.returncode == 1
    assert "configuration.md" in checked.stderr
    assert "make reference" in checked.stderr
