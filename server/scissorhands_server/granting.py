"""Granting what a request asks for: the core's grant, its errors told by the protocol's fields."""

from scissorhands.budget import BudgetRequest, BudgetUnit, Grant, ModelShape
from scissorhands.errors import BudgetTooSmallError, InvalidRequestError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.profile import Profile


def resolve(
    budget: BudgetRequest,
    policy: PolicyRequest,
    shape: ModelShape,
    total_tokens: int,
    profile: Profile | None,
    resident_codec: str,
) -> Grant:
    """Resolve a budget for one sequence; arguments as :func:`scissorhands.grant.grant` takes them.

    Raises:
        InvalidRequestError: Something asked for is unknown, out of range or contradictory.
    """
    # What the core calls by another name than the protocol does.
    names = {"codec": "resident_codec"}
    if budget.unit is BudgetUnit.COMPRESSION:
        names["budget.bytes"] = "budget.compression"
    try:
        return grant(budget, policy, shape, total_tokens, profile, resident_codec)
    except BudgetTooSmallError as error:
        field = names.get(error.field, error.field)
        raise BudgetTooSmallError(field, error.description, error.smallest) from error
    except InvalidRequestError as error:
        raise InvalidRequestError(names.get(error.field, error.field), error.description) from error
