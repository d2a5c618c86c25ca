"""All cases by name."""

from support.faults import client_cases, held_cases, session_cases

CASES = {case.name: case for part in (held_cases, session_cases, client_cases) for case in part.CASES}
