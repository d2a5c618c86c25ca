"""docs/scaling.md: its arithmetic is right, and its bytes are those of grants and of the results that it names."""

import json
import re
from pathlib import Path

import pytest

from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.grant import PolicyRequest, grant

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
# Figures have two or three digits.
ROUNDING = 0.03
UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "ms": 1e-3, "s": 1}
SUM = re.compile(r"(?<![\w.])(\d[\d.,]*(?: ?(?:KB|MB|ms|s)\b)?(?: [x/+] [\d.(][\d.,() x+/]*(?:(?:KB|MB|ms|s)\b)?)+)")
TERM = re.compile(r"(\d[\d.]*) ?(KB|MB|ms|s)?\b")
RESULT = re.compile(r" = ([\d.,]+\d) ?(KB|MB|ms|s)?\b(?!\w)")


def number(digits, unit=""):
    return float(digits.replace(",", "")) * UNITS[unit or ""]


def sums():
    """Return all ``A x B / C = D`` of the page, as the left side, its value and the right side."""
    found = []
    for match in SUM.finditer(PAGE.replace("\n", " ")):
        text = match[0].strip()
        result = RESULT.match(PAGE.replace("\n", " "), match.start() + len(text))
        if result:
            terms = TERM.sub(lambda term: repr(number(term[1], term[2])), text.replace(",", ""))
            found.append((text, eval(terms.replace("x", "*")), number(result[1], result[2])))
    return found


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def by_setting(name, setting, table="rows"):
    return next(row for row in results(name)[table] if row["setting"] == setting)


def test_the_arithmetic_is_right():
    found = sums()
    assert len(found) >= 15
    wrong = [(text, value, said) for text, value, said in found if said != pytest.approx(value, rel=ROUNDING)]
    assert wrong == []


@pytest.mark.parametrize(
    ("codec", "slots", "said"), [("none", 410, "19.2 MB"), ("int4", 410, "3.0 MB"), ("none", 2048, "95.8 MB")]
)
def test_a_row_takes_what_its_grant_says(codec, slots, said):
    shape = ModelShape(layers=30, kv_heads=3, head_dim=64, element_bytes=4, group=3)
    granted = grant(BudgetRequest.tokens(slots), PolicyRequest("scissorhands"), shape, 2048, None, codec)
    assert number(*said.split()) == pytest.approx(granted.bytes, rel=ROUNDING)
    assert f" = {said}" in PAGE
    assert granted.parameters.drop == 16


@pytest.mark.parametrize(
    ("said", "measured"),
    [
        ("93.8 MB", lambda: by_setting("offload", "full")["stored_bytes"]),
        ("18.2 MB", lambda: by_setting("offload", "budget_20")["stored_bytes"]),
        ("2.7 MB", lambda: by_setting("offload", "budget_20_4bit")["stored_bytes"]),
        ("28.1 MB", lambda: by_setting("offload", "budget_20", "prefixes")["stored_bytes"]),
        ("4.1 MB", lambda: by_setting("offload", "budget_20_4bit", "prefixes")["stored_bytes"]),
    ],
)
def test_stored_bytes_are_those_of_the_results(said, measured):
    digits, unit = said.split()
    assert number(digits, unit) == pytest.approx(measured(), rel=ROUNDING)
    assert said in PAGE
