"""The settings of the manager."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from scissorhands.errors import InvalidRequestError
from scissorhands.policies import get_policy
from scissorhands_server.manager.space import SpaceLimits
from scissorhands_server.serving import ServingSettings
from scissorhands_server.store.address import Access, StoreAddress

_MIB = 1 << 20


class ManagerSettings(ServingSettings):
    """Everything that can be set. Read once, at start-up, by :func:`~scissorhands_server.settings.load_settings`."""

    model_config = SettingsConfigDict(env_prefix="SCISSORHANDS_MANAGER_")

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=50052, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    metrics_host: str = Field(default="", description="Address of the metrics endpoint; none takes that of --host.")
    metrics_port: int = Field(default=9102, ge=0, le=65535, description="Port of the metrics; 0 takes any free one.")
    log_level: str = Field(default="info", description="Least severe messages to log: debug, info, warning or error.")
    grace: float = Field(default=5.0, ge=0, le=3600, description="How long a stop waits for calls, in seconds.")

    store_url: str = Field(
        default="",
        description="Redis to use: redis://, rediss:// (TLS), unix://, redis+sentinel://HOST,HOST/NAME or "
        "redis+cluster://HOST,HOST, the last two also with rediss; none starts an embedded server.",
    )
    store_user: str = Field(default="", description="ACL user of the store, if the URL names none.")
    store_password: SecretStr = Field(
        default=SecretStr(""),
        description="Password of the store, if the URL has none; others may read a command line, so set the variable.",
    )
    store_password_file: Path | None = Field(default=None, description="File that holds the password instead.")
    store_ca_file: Path | None = Field(
        default=None, description="Certificates to trust of a store with TLS, in PEM; none takes the system's."
    )
    store_certificate: Path | None = Field(
        default=None, description="Certificate to show to a store with TLS, in PEM; none shows none."
    )
    store_key: Path | None = Field(default=None, description="Its key, in PEM, if the certificate's file has it not.")
    store_verify: bool = Field(default=True, description="Whether a store with TLS must show a trusted certificate.")
    store_timeout: float = Field(default=2.0, gt=0, le=60, description="The most one store call may take, in seconds.")
    store_connections: int = Field(default=16, ge=1, le=1024, description="Most connections to the store.")
    embedded_store_bytes: int = Field(
        default=1024 * _MIB, ge=16 * _MIB, description="Most bytes that the embedded server holds."
    )
    tenant_quota_bytes: int = Field(
        default=0,
        ge=0,
        description="Most bytes in the store of one tenant; what was used least lately goes first. 0: no bound.",
    )
    store_high_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes in the store, of all tenants, above which objects are evicted. 0: 80 % of what the store "
        "itself may hold, if that is bounded.",
    )
    store_low_share: float = Field(
        default=0.9, gt=0, le=1, description="Share of a quota, or of --store-high-bytes, that eviction goes down to."
    )
    janitor_interval: float = Field(
        default=10.0, gt=0, le=3600, description="Seconds between two looks for what nothing names in the store."
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
    plan_threads: int = Field(default=1, ge=1, le=256, description="Plans that are computed at once.")
    max_plan_wait: float = Field(
        default=0.2,
        gt=0,
        le=60,
        description="The longest that a plan may have to wait, in seconds; more are turned away.",
    )
    max_plans: int = Field(default=256, ge=1, description="Plans in progress at once; more are turned away.")
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

    @property
    def space_limits(self) -> SpaceLimits:
        """What the store may hold."""
        return SpaceLimits(self.tenant_quota_bytes, self.store_high_bytes, self.store_low_share, self.lease)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        self._check_store()
        name, _, preset = self.policy.partition(":")
        try:
            get_policy(name, preset)
        except InvalidRequestError as error:
            raise ValueError(f"policy: {error.description}") from error
        if self.max_segment_bytes > self.segment_memory_bytes:
            raise ValueError("segment_memory_bytes: must be at least max_segment_bytes")
        return self

    @property
    def store_access(self) -> Access:
        """How connections to the store prove and protect themselves; an embedded one asks for nothing."""
        if not self.store_url:
            return Access()
        password = self.store_password.get_secret_value()
        if self.store_password_file is not None:
            password = self.store_password_file.read_text(encoding="utf-8").strip()
        return Access(
            user=self.store_user,
            password=password,
            ca_file=self.store_ca_file,
            certificate=self.store_certificate,
            key=self.store_key,
            verify=self.store_verify,
        )

    def _check_store(self) -> None:
        """Refuse what cannot be meant; the URL may hold a password, so it is never quoted."""
        tls = False
        if self.store_url:
            try:
                tls = StoreAddress.parse(self.store_url).tls
            except ValueError as error:
                raise ValueError(f"store_url: {error}") from error
        if self.store_password_file is not None and self.store_password.get_secret_value():
            raise ValueError("store_password_file: leave it out when store_password is given")
        if self.store_key is not None and self.store_certificate is None:
            raise ValueError("store_key: needs store_certificate")
        certificates = (self.store_ca_file, self.store_certificate)
        if not tls and (any(certificates) or not self.store_verify):
            raise ValueError("store_url: must begin with rediss for certificates to be used")
        try:
            self.store_access.check()
        except OSError as error:
            raise ValueError(f"store_password_file: {error}") from error
        except ValueError as error:
            raise ValueError(f"store_{error}") from error
