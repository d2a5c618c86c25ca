"""Some of the faults of ``python tests/faults.py``, on a system of real processes, and the names of all."""

import asyncio
from types import SimpleNamespace

import pytest
from support.faults.injected import FAULTS
from support.faults.questions import solo_questions
from support.faults.stack import Stack
from support.faults.table import CASES
from support.faults.trial import tried

SHORT = [case for case in CASES.values() if case.short]


def test_what_is_promised_holds_in_some_faults(tmp_path):
    async def try_some():
        questions = await solo_questions(tmp_path)
        async with Stack(tmp_path) as stack:
            return [await tried(case, stack, questions) for case in SHORT]

    found = asyncio.run(try_some())
    assert {case["name"]: case["broken"] for case in found} == {case.name: [] for case in SHORT}
    assert all(sum(case["answers"].values()) >= 4 for case in found)


def test_a_fault_is_undone_when_what_it_disturbs_fails():
    jumped = []
    lane = SimpleNamespace(clock=SimpleNamespace(jump=jumped.append))

    async def fail():
        async with FAULTS["clock-a-day-ahead"].hold(None, lane):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        asyncio.run(fail())
    assert jumped == [86_400.0, 0]


def test_every_case_says_what_goes_wrong_and_what_is_promised():
    assert len(CASES) >= 25
    assert all(case.fault and case.promised for case in CASES.values())
    assert len({case.fault for case in CASES.values()}) == len(CASES)
