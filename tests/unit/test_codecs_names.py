"""Names of formats: what they mean, and what is said of bad ones."""

import pytest
from support.codec_data import ALL, BY_BLOCK

from scissorhands.errors import InvalidRequestError
from scissorhands.formats import FAMILIES, parse, resident


@pytest.mark.parametrize(
    ("name", "full", "bits"),
    [
        ("none", "none", (0, 0)),
        ("int8", "int8", (8, 8)),
        ("int4", "int4", (4, 4)),
        ("int4-hadamard", "int4-hadamard", (4, 4)),
        ("turboquant", "turboquant:k4v4", (4, 4)),
        ("turboquant:3", "turboquant:k3v3", (3, 3)),
        ("turboquant:k4v2", "turboquant:k4v2", (4, 2)),
        ("kivi", "kivi:k4v4", (4, 4)),
        ("kivi:k2v4", "kivi:k2v4", (2, 4)),
        ("block-gtq:3", "block-gtq:k3v3", (3, 3)),
        ("klt:k4.5v2.5", "klt:k4.5v2.5", (4.5, 2.5)),
    ],
)
def test_names_parse_to_full_ones(name, full, bits):
    found = parse(name)
    assert (found.name, (found.key_bits, found.value_bits)) == (full, bits)
    assert parse(full) == found


@pytest.mark.parametrize("name", ALL)
def test_full_names_mean_themselves(name):
    found = parse(name)
    assert parse(found.name) == found
    assert FAMILIES[found.family].independent == found.independent


@pytest.mark.parametrize("name", ["zip", "", ":4", "Int4", "int4 ", "turbo quant"])
def test_an_unknown_family_is_refused(name):
    with pytest.raises(InvalidRequestError, match=r"unknown codec .*; allowed: none, int8, int4, int4-hadamard,"):
        parse(name)


@pytest.mark.parametrize("name", ["int4:4", "none:0", "int8:k8v8", "int4:", "int4-hadamard:3"])
def test_bits_are_refused_where_there_is_no_choice(name):
    with pytest.raises(InvalidRequestError, match="takes no bits"):
        parse(name)


@pytest.mark.parametrize(
    "name",
    [
        "turboquant:",
        "turboquant:5",
        "turboquant:k4",
        "turboquant:v4k4",
        "turboquant:2.5",
        "turboquant:3.0",
        "turboquant:k4v4:3",
    ],
)
def test_bits_that_a_family_lacks_are_refused(name):
    with pytest.raises(InvalidRequestError, match="turboquant takes bits of 2, 3, 4, such as turboquant:k4v4"):
        parse(name)


@pytest.mark.parametrize("name", BY_BLOCK)
def test_only_independent_rows_can_be_resident(name):
    with pytest.raises(InvalidRequestError, match="cannot be resident: its rows are not independent"):
        resident(name)
    assert resident("turboquant:3") == parse("turboquant:3")


@pytest.mark.parametrize(
    ("name", "multiple"), [("int4", 2), ("turboquant", 8), ("kivi", 8), ("klt", 8), ("block-gtq", 8)]
)
def test_a_head_size_that_does_not_fit_is_refused(name, multiple):
    for head_dim in (multiple - 1, multiple + 1):
        with pytest.raises(InvalidRequestError, match=f"multiple of {multiple}, got {head_dim}"):
            parse(name).slot_bytes(head_dim, 2)


def test_bytes_by_hand():
    by_slot = {
        name: (parse(name).key_bytes(64, 2), parse(name).value_bytes(64, 2))
        for name in (
            "none",
            "int8",
            "int4",
            "int4-hadamard",
            "turboquant:k4v3",
            "kivi:2",
            "block-gtq:3",
            "klt:k4.5v2.5",
        )
    }
    assert by_slot == {
        "none": (128, 128),
        "int8": (68, 68),
        "int4": (36, 36),
        "int4-hadamard": (34, 34),
        "turboquant:k4v3": (34, 26),
        # Four bytes a channel, shared by 32 tokens; and four bytes a value.
        "kivi:2": (16 + 8, 16 + 4),
        "block-gtq:3": (26, 26),
        "klt:k4.5v2.5": (38, 22),
    }
