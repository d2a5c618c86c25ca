import pytest

from scissorhands.budget import BudgetUnit
from scissorhands_client import Budget, InvalidRequestError, Policy


@pytest.mark.parametrize(
    ("text", "unit", "amount"),
    [
        ("20%", BudgetUnit.FRACTION, 0.2),
        (" 12.5 % ", BudgetUnit.FRACTION, 0.125),
        ("100%", BudgetUnit.FRACTION, 1.0),
        ("0.2", BudgetUnit.FRACTION, 0.2),
        (".5", BudgetUnit.FRACTION, 0.5),
        ("1.0", BudgetUnit.FRACTION, 1.0),
        ("256", BudgetUnit.TOKENS, 256),
        ("1", BudgetUnit.TOKENS, 1),
        ("256 tokens", BudgetUnit.TOKENS, 256),
        ("64MiB", BudgetUnit.BYTES, 64 * 2**20),
        ("1.5 gib", BudgetUnit.BYTES, 3 * 2**29),
        ("10kB", BudgetUnit.BYTES, 10_000),
        ("512B", BudgetUnit.BYTES, 512),
        ("0.3KiB", BudgetUnit.BYTES, 307),
        ("20x", BudgetUnit.COMPRESSION, 20),
        ("2.5 X", BudgetUnit.COMPRESSION, 2.5),
    ],
)
def test_a_budget_is_read(text, unit, amount):
    assert Budget.parse(text) == Budget(unit, amount)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "%",
            "20y",
            "1x",
            "0.5x",
            "x",
            "-1",
            "0",
            "0.0",
            "0%",
            "101%",
            "1.5",
            "nan",
            "inf",
            "1e3",
            "64 Mi B",
            "0.2 tokens",
            "0.1B",
        ),
        *("9" * 400, "9" * 400 + "GiB", "٣"),
    ],
)
def test_no_budget_is_refused_with_what_is_allowed(text):
    with pytest.raises(InvalidRequestError) as raised:
        Budget.parse(text)
    assert raised.value.field.split(".")[0] == "budget"
    assert raised.value.allowed


@pytest.mark.parametrize(
    ("make", "amount"),
    [
        (Budget.tokens, 0),
        (Budget.tokens, 10**400),
        (Budget.bytes, -5),
        (Budget.fraction, 0),
        (Budget.compression, 1),
        (Budget.compression, float("nan")),
        (Budget.fraction, 1.01),
        (Budget.fraction, float("nan")),
        (Budget.fraction, float("inf")),
    ],
)
def test_amounts_out_of_range_are_refused(make, amount):
    with pytest.raises(InvalidRequestError, match=f"budget.{make.__name__}"):
        make(amount)


def test_a_budget_is_told_as_it_was_meant():
    budgets = (Budget.tokens(256), Budget.bytes(1000), Budget.fraction(0.2), Budget.compression(20))
    assert [str(each) for each in budgets] == ["256 tokens", "1000 bytes", "0.2", "20x"]


def test_a_policy_is_read():
    assert Policy.parse("scissorhands:paper", {"recent": 3}) == Policy("scissorhands", "paper", {"recent": 3})
    assert Policy.parse(" h2o ") == Policy("h2o")
    assert str(Policy("h2o")) == "h2o"
    assert str(Policy("scissorhands", "paper")) == "scissorhands:paper"
