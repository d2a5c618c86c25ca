"""Calls of any content: every answer is of the tree of errors, and both servers go on."""

import random

import grpc
import pytest
from support.fuzzed_calls import fuzz_calls, fuzzed_services, is_message

pytestmark = pytest.mark.timeout(120)


async def test_calls_of_any_content_are_answered_in_order(redis_server):
    async with fuzzed_services(redis_server) as fuzz:
        findings = await fuzz_calls(fuzz, fuzz.managers, random.Random(1), 400)
        findings += await fuzz_calls(fuzz, fuzz.workers, random.Random(2), 40)
        assert findings == []
        await fuzz.served()
        # Some of what is sent is understood, so that is not refused at once.
        assert {method for method, code in fuzz.answers if code == "OK"} >= {"OpenSession", "PlanEvictions", "Generate"}
        assert {code for _, code in fuzz.answers} >= {"INVALID_ARGUMENT", "NOT_FOUND"}


async def test_bytes_that_are_no_message_are_an_invalid_request(redis_server):
    async with fuzzed_services(redis_server) as fuzz:
        for method in fuzz.managers + fuzz.workers:
            assert not is_message(method, b"\xff\xff")
            assert await fuzz.call(method, [b"\xff\xff"]) == "", method
        assert {code for _, code in fuzz.answers} == {grpc.StatusCode.INVALID_ARGUMENT.name}
        await fuzz.served()
