"""The settings of the manager."""

from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from scissorhands.errors import InvalidRequestError
from scissorhands.policies import get_policy
from scissorhands_server.settings import ServerSettings

_MIB = 1 << 20
_STORE_SCHEMES = ("redis://", "rediss://", "unix://")


class ManagerSettings(ServerSettings):
    """Everything that can be set. Read once, at start-up, by :func:`~scissorhands_server.settings.load_settings`."""

    model_config = SettingsConfigDict(env_prefix="SCISSORHANDS_MANAGER_")

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=50052, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    metrics_host: str = Field(default="", description="Address of the metrics endpoint; none takes that of --host.")
    metrics_port: int = Field(default=9102, ge=0, le=65535, description="Port of the metrics; 0 takes any free one.")
    log_level: str = Field(default="info", description="Least severe messages to log: debug, info, warning or error.")
    grace: float = Field(default=5.0, ge=0, le=3600, description="How long a stop waits for calls, in seconds.")

    store_url: str = Field(
        default="", description="Redis to use: redis://, rediss:// or unix://; none starts an embedded server."
    )
    store_timeout: float = Field(default=2.0, gt=0, le=60, description="The most one store call may take, in seconds.")
    store_connections: int = Field(default=16, ge=1, le=1024, description="Most connections to the store.")
    embedded_store_bytes: int = Field(
        default=1024 * _MIB, ge=16 * _MIB, description="Most bytes that the embedded server holds."
    )
    segment_ttl: float = Field(default=600.0, gt=0, description="How long a segment stays in the store, in seconds.")

    suspend_ttl: float = Field(
        default=3600.0, gt=0, description="How long a suspended session stays in the store, in seconds."
    )
    prefix_ttl: float = Field(
        default=3600.0, gt=0, description="How long a shared prefix stays in the store after its last use, in seconds."
    )
    max_suspended_bytes: int = Field(default=4096 * _MIB, ge=1024, description="Most bytes of one suspended row.")
    suspend_memory_bytes: int = Field(
        default=256 * _MIB,
        ge=16 * _MIB,
        description="Most bytes of suspended rows on their way in and out; more are turned away.",
    )

    lease: float = Field(default=30.0, ge=1, description="How long a session lives without a call, in seconds.")
    retention: float = Field(
        default=600.0, ge=0, description="How long a closed or expired session is remembered, in seconds."
    )
    max_sessions: int = Field(default=4096, ge=1, description="Most sessions that are remembered at once.")
    attention_bytes: int = Field(
        default=256 * _MIB, ge=0, description="Most bytes of snapshots kept to measure persistence."
    )

    budget_fraction: float = Field(
        default=0.2, gt=0, le=1, description="Budget of sessions that ask for none, as a share of their length."
    )
    policy: str = Field(
        default="scissorhands", description="Policy of sessions that ask for none, as name or name:preset."
    )
    budgets: Literal["given", "measured"] = Field(
        default="given",
        description="What KV heads share budgets by: given, the profile that a worker sends; measured, if it sends "
        "none, what the sessions of its model have shown.",
    )
    budgets_renewal: int = Field(
        default=256,
        ge=1,
        description="Pairs of snapshots of a model after which measured budgets are there, and are renewed.",
    )
    codec: Literal["int4", "none", ""] = Field(
        default="int4", description="Codec of evicted slots, int4 or none (as they are); empty: they are not stored."
    )

    max_layers: int = Field(default=512, ge=1, le=65535, description="Most layers of a model.")
    max_kv_heads: int = Field(default=512, ge=1, le=65535, description="Most KV heads of a layer.")
    max_head_dim: int = Field(default=2048, ge=1, le=65535, description="Most elements of a key or value.")
    max_positions: int = Field(default=4 * _MIB, ge=1, description="Most tokens of a sequence.")
    max_snapshot_slots: int = Field(
        default=16 * _MIB, ge=1, description="Most slots of a snapshot, over all layers and KV heads."
    )
    plan_threads: int = Field(default=2, ge=1, le=256, description="Plans that are computed at once.")
    max_plans: int = Field(default=64, ge=1, description="Plans in progress at once; more are turned away.")
    plan_memory_bytes: int = Field(
        default=1024 * _MIB, ge=_MIB, description="Most memory of plans in progress; more are turned away."
    )
    max_segment_bytes: int = Field(
        default=256 * _MIB,
        ge=1024,
        le=512 * _MIB,
        description="Most bytes of one segment; a Redis value ends at 512 MiB.",
    )
    segment_memory_bytes: int = Field(
        default=512 * _MIB,
        ge=_MIB,
        description="Most bytes of segments on their way in, and as many on their way out; more are turned away.",
    )
    stream_timeout: float = Field(
        default=10.0, gt=0, le=3600, description="The most a call may wait for its client's next message, in seconds."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.store_url and not self.store_url.startswith(_STORE_SCHEMES):
            # The URL may hold a password, so it is not quoted.
            raise ValueError(f"store_url: must begin with {', '.join(_STORE_SCHEMES)}")
        name, _, preset = self.policy.partition(":")
        try:
            get_policy(name, preset)
        except InvalidRequestError as error:
            raise ValueError(f"policy: {error.description}") from error
        if self.max_segment_bytes > self.segment_memory_bytes:
            raise ValueError("segment_memory_bytes: must be at least max_segment_bytes")
        return self
