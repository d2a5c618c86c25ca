"""Admission: a request of the protocol is checked and becomes a request of the engine."""

from scissorhands.errors import InvalidRequestError, NotFoundError
from scissorhands.grant import PolicyRequest
from scissorhands.v1 import generation_pb2
from scissorhands.wire import SESSION_ID, policy_request
from scissorhands_server.worker.loading import LoadedModel
from scissorhands_server.worker.prompt import prompt_ids
from scissorhands_server.worker.sampling import validate
from scissorhands_server.worker.scheduler import Priority
from scissorhands_server.worker.task import GenerationRequest
from scissorhands_server.worker.text import check_stops

_PRIORITIES = {
    generation_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    generation_pb2.PRIORITY_LOW: Priority.LOW,
    generation_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    generation_pb2.PRIORITY_HIGH: Priority.HIGH,
}


def check(
    request: generation_pb2.GenerateRequest, loaded: LoadedModel, default_max_new_tokens: int
) -> GenerationRequest:
    """Check a request and build its prompt.

    Raises:
        InvalidRequestError: A field is missing, malformed or out of range.
        NotFoundError: The model is not served here.
    """
    if request.session_id and not SESSION_ID.fullmatch(request.session_id):
        raise InvalidRequestError("session_id", "must be 1 to 64 characters of [A-Za-z0-9_-]")
    info = loaded.info
    if request.model and request.model != info.name:
        raise NotFoundError("model", f"no model {request.model!r} here; this worker serves {info.name!r}")
    prompt = prompt_ids(request, loaded.tokenizer, info)
    room = info.max_positions - len(prompt)
    if request.max_new_tokens > room:
        raise InvalidRequestError(
            "max_new_tokens",
            f"must be at most {room} for a prompt of {len(prompt)} tokens (the model has {info.max_positions} "
            f"positions), got {request.max_new_tokens}",
        )
    return GenerationRequest(
        prompt=tuple(prompt),
        max_new_tokens=request.max_new_tokens or min(default_max_new_tokens, room),
        sampling=validate(request.sampling, info.vocabulary),
        stop=check_stops(request.stop),
        ignore_eos=request.ignore_eos,
        shadow=request.shadow if request.HasField("shadow") else None,
        recall_share=_recall_share(request),
        recall_every=request.recall.every_tokens,
        priority=_priority(request),
    )


def _recall_share(request: generation_pb2.GenerateRequest) -> float:
    """Return the share that may be recalled at once; 0 if nothing is to be."""
    if not request.HasField("recall"):
        return 0.0
    share = request.recall.share
    if not 0 < share <= 1:  # True for NaN too.
        raise InvalidRequestError("recall.share", f"must be above 0 and at most 1, got {share:g}")
    return share


def _priority(request: generation_pb2.GenerateRequest) -> Priority:
    priority = _PRIORITIES.get(request.priority)
    if priority is None:
        allowed = ", ".join(generation_pb2.Priority.Name(number) for number in _PRIORITIES)
        raise InvalidRequestError("priority", f"must be one of {allowed}, got {request.priority}")
    return priority


def requested_policy(request: generation_pb2.GenerateRequest, default: PolicyRequest) -> PolicyRequest:
    """Return the policy asked for; parameters without a name override those of the default policy."""
    if not request.HasField("policy"):
        return default
    policy = policy_request(request.policy)
    return policy if policy.name else PolicyRequest(default.name, policy.preset or default.preset, policy.parameters)
