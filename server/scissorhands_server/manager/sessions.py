"""The life of sessions: grants, leases and their ends, over the ledger."""

from collections.abc import Iterable

from scissorhands.budget import ModelShape
from scissorhands.demand import Demand
from scissorhands.errors import CapacityError, InvalidRequestError, NotFoundError
from scissorhands.formats import EXACT
from scissorhands.grant import PolicyRequest, default_budget
from scissorhands.ledger import Ledger, SessionRecord, SessionState
from scissorhands.profile import Profile
from scissorhands.v1 import budget_pb2, cache_manager_pb2, model_pb2
from scissorhands.wire import budget_request, grant_message, model_shape, policy_request, read_profile
from scissorhands_server.granting import resolve
from scissorhands_server.manager.checks import check_granted, check_session_id, check_spec
from scissorhands_server.manager.metrics import BUDGET_SOURCES, ManagerMetrics
from scissorhands_server.manager.settings import ManagerSettings

MAX_RENEWALS = 1024
MAX_PAGE = 1000
DEFAULT_PAGE = 100


class Sessions:
    """Opens, renews and closes sessions.

    Args:
        ledger: Where they are recorded.
        settings: Defaults and limits.
        metrics: The manager's metrics.
    """

    def __init__(self, ledger: Ledger, settings: ManagerSettings, metrics: ManagerMetrics) -> None:
        self._ledger = ledger
        self._settings = settings
        self._metrics = metrics

    def open(self, spec: cache_manager_pb2.SessionSpec, profile: model_pb2.Profile | None = None) -> SessionRecord:
        """Grant a budget and start a lease; the same arguments again get the same grant and a fresh lease.

        Args:
            spec: The session, without a grant.
            profile: What eviction costs in the model's KV heads; None if that was not measured.

        Raises:
            InvalidRequestError: A field is missing, out of range, or too small a budget.
            CapacityError: The ledger is full of open sessions.
        """
        result = "refused"
        try:
            if spec.HasField("grant"):
                raise InvalidRequestError("session.grant", "must be absent: the manager decides it")
            check_spec(spec, self._settings)
            record = self._ledger.opened(spec)
            if record is not None:
                result = "repeated"
                return record
            granted = cache_manager_pb2.SessionSpec()
            granted.CopyFrom(spec)
            granted.grant.CopyFrom(self._grant(spec, profile))
            result = "full"
            record = self._ledger.open(granted)
            result = "granted"
            self._metrics.budgets.labels(BUDGET_SOURCES[granted.grant.budget_source]).inc()
            return record
        finally:
            self._metrics.grants.labels(result).inc()
            self._metrics.show(self._ledger)

    def recall(self, spec: cache_manager_pb2.SessionSpec) -> SessionRecord | None:
        """Give the session of a call a fresh lease, recreating it if it is unknown.

        Returns:
            The session, or None while the ledger is full: a plan must not fail for want of a record of it.
        """
        try:
            return self._ledger.renew(spec)
        except CapacityError:
            return None

    def renew(self, specs: Iterable[cache_manager_pb2.SessionSpec]) -> list[str]:
        """Extend leases; return the ids of the sessions that now have a fresh one. Closed and malformed ones have not.

        Raises:
            InvalidRequestError: They are too many, or every one of them is malformed.
        """
        specs = list(specs)
        if len(specs) > MAX_RENEWALS:
            raise InvalidRequestError("sessions", f"must be at most {MAX_RENEWALS}, got {len(specs)}")
        records, refusals = [], []
        for spec in specs:
            try:
                check_granted(spec, self._settings)
            except InvalidRequestError as error:  # It must not cost the worker's other sessions their leases.
                refusals.append(error)
            else:
                records.append(self.recall(spec))
        if refusals and not records:
            raise refusals[0]
        return [record.session_id for record in records if record is not None and record.state is SessionState.OPEN]

    def close(self, record: SessionRecord, request: cache_manager_pb2.CloseSessionRequest) -> bool:
        """End a lease; False if it is held by a later turn than the one that ends."""
        if request.fence < record.spec.fence:
            return False
        quality = request.quality if request.HasField("quality") else None
        self._ledger.close(record, discard=request.discard_segments, quality=quality)
        self._metrics.show(self._ledger)
        return True

    def forget_segments(self, session_id: str) -> None:
        """Take note that all segments of a session, if it is known, were deleted."""
        record = self._ledger.find(session_id)
        if record is not None:
            self._ledger.deleted(record, list(record.segments))
            self._metrics.show(self._ledger)

    def adopt(self, session_id: str) -> SessionRecord:
        """Record a session of which only its segments are left.

        Raises:
            CapacityError: The ledger is full of open sessions.
        """
        return self._ledger.adopt(session_id)

    def find(self, session_id: str) -> SessionRecord | None:
        """Return a session, None if it is unknown.

        Raises:
            InvalidRequestError: The id is malformed.
        """
        check_session_id(session_id)
        return self._ledger.find(session_id)

    def measured(self, model: str) -> Demand:
        """Return what the sessions of a model have shown.

        Args:
            model: Name or fingerprint of the model; empty for the one that was measured last.

        Raises:
            NotFoundError: There is no profile of such a model yet.
        """
        known = self._ledger.demands.named(model)
        if known is None:
            raise NotFoundError("model", f"nothing was measured of {f'model {model!r}' if model else 'any model'} yet")
        if known.profile is None:
            raise NotFoundError(
                "model",
                f"{known.pairs} pairs of snapshots of {known.name!r} were compared; "
                f"a profile follows every {self._settings.budgets_renewal}",
            )
        return known

    def page(
        self, request: cache_manager_pb2.ListSessionsRequest, state: SessionState | None, tenant: str | None
    ) -> tuple[list[SessionRecord], str]:
        """Return a page of a tenant's sessions, or of all, newest first, and the next page's token (empty at the end).

        Raises:
            InvalidRequestError: The size or the token is malformed.
        """
        if request.page_size > MAX_PAGE:
            raise InvalidRequestError("page_size", f"must be 0 to {MAX_PAGE}, got {request.page_size}")
        token = request.page_token
        if token and not (token.isascii() and token.isdecimal() and len(token) < MAX_PAGE):
            raise InvalidRequestError("page_token", "must be empty or the token of an earlier page")
        before = int(token) if token else None
        records, more = self._ledger.page(state, before, request.page_size or DEFAULT_PAGE, tenant)
        return records, str(records[-1].serial) if more else ""

    def _grant(self, spec: cache_manager_pb2.SessionSpec, profile: model_pb2.Profile | None) -> budget_pb2.Grant:
        settings = self._settings
        policy = self._policy(spec)
        asked = budget_request(spec.budget) if spec.HasField("budget") else None
        budget = asked or default_budget(policy, settings.budget_fraction)
        shape = model_shape(spec.model)
        given = read_profile(profile, shape) if profile else None
        measured = None if given else self._measured(spec.model.fingerprint, shape)
        total, resident = spec.prompt_tokens + spec.max_new_tokens, spec.resident_codec or EXACT
        granted = resolve(budget, policy, shape, total, given or measured, resident)
        message = grant_message(granted, budget_pb2.GRANT_SOURCE_MANAGER, settings.codec)
        if measured and granted.by_head:
            message.budget_source = budget_pb2.BUDGET_SOURCE_MEASURED
        message.lease.FromNanoseconds(round(settings.lease * 1e9))
        return message

    def _measured(self, model: str, shape: ModelShape) -> Profile | None:
        """Return what the sessions of a model have shown, if grants are to go by it."""
        known = self._ledger.demands.find(model, shape) if self._settings.budgets == "measured" else None
        return known.profile if known else None

    def _policy(self, spec: cache_manager_pb2.SessionSpec) -> PolicyRequest:
        if spec.policy.name:
            return policy_request(spec.policy)
        name, _, preset = self._settings.policy.partition(":")
        return PolicyRequest(name, spec.policy.preset or preset, dict(spec.policy.parameters))
