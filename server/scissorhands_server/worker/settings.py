"""The worker's settings; see :mod:`scissorhands_server.settings` for where they are read from."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from scissorhands.credentials import Credentials
from scissorhands.errors import InvalidRequestError
from scissorhands_server.serving import ServingSettings

DEFAULT_ROWS = 4
MOST_ROWS = 1024
# On a CPU a token that is read takes about as long as one that is decoded in a batch, so a chunk is felt; a GPU reads
# hundreds in the time of a decode step.
CPU_STEP_TOKENS = 32
GPU_STEP_TOKENS = 512


class WorkerSettings(ServingSettings):
    """Everything that decides how a worker runs."""

    model_config = SettingsConfigDict(env_prefix="SCISSORHANDS_WORKER_")

    model: str = Field(min_length=1, description="Model to serve: a folder, a hub id or a GGUF file.")
    model_name: str = Field(default="", description="Name under which the model is served; none takes the model's own.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=50051, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    metrics_host: str = Field(default="127.0.0.1", description="Address of the metrics endpoint.")
    metrics_port: int = Field(
        default=9101, ge=0, le=65535, description="Port of the metrics endpoint; 0: any free one."
    )
    manager: str = Field(
        default="",
        description="Address of the cache manager, host:port; none plans locally. Calls take turns over all addresses "
        "of the host, or over those of a list such as ipv4:10.0.0.1:50052,10.0.0.2:50052.",
    )
    manager_ca_file: Path | None = Field(
        default=None,
        description="Certificates of the authorities that vouch for the manager, in PEM; none connects without TLS.",
    )
    manager_certificate: Path | None = Field(
        default=None,
        description="Certificate to show to the manager, in PEM, read again when it changes; none shows none.",
    )
    manager_key: Path | None = Field(default=None, description="Its key, if the certificate's file has it not.")
    manager_server_name: str = Field(
        default="", description="Name that the manager's certificate must have; none takes the host of its address."
    )
    manager_token_file: Path | None = Field(
        default=None,
        description="File with the token to show to the manager, of the role worker; sent only with TLS, or to this "
        "machine itself.",
    )
    worker_id: str = Field(default="", max_length=64, description="Id of this worker; none makes one up.")
    rows: int = Field(
        default=0,
        ge=0,
        le=MOST_ROWS,
        description=f"Requests that decode at once; 0: as many as cache_bytes holds, or {DEFAULT_ROWS} if that is 0.",
    )
    cache_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes that the rows of these requests may take, evidence included; 0: no bound but their number.",
    )
    step_tokens: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="Tokens of one step: one for each request that decodes, the rest for prompts. A chunk of a prompt "
        f"that is larger is read over several steps. 0: {CPU_STEP_TOKENS} on the CPU, {GPU_STEP_TOKENS} elsewhere.",
    )
    priority_aging: float = Field(
        default=30.0,
        gt=0,
        le=86400,
        description="Seconds after which a waiting request counts as one priority higher, up to the highest.",
    )
    queue: int = Field(default=64, ge=0, le=65536, description="Requests that wait when all rows are taken.")
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads for the model.")
    device: str = Field(default="auto", description="Torch device; auto takes the first CUDA device, else the CPU.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Number type of the model; auto: float32 on the CPU, else the checkpoint's own."
    )
    cache_folder: Path = Field(
        default=Path("~/.cache/scissorhands"), description="Folder for models converted from GGUF."
    )
    profile: Path | None = Field(
        default=None,
        description="What eviction costs in the model's heads, a file of scissorhands calibrate; none takes the one in "
        "the model's folder, if there is one.",
    )
    default_budget: float = Field(
        default=0.2, gt=0, le=1, description="Budget of requests that name none while no manager answers, a fraction."
    )
    default_policy: str = Field(default="scissorhands", description="Policy of requests that name none.")
    default_max_new_tokens: int = Field(default=256, ge=1, description="Tokens to generate if a request names none.")
    plan_deadline: float = Field(
        default=0.25, ge=0, le=60, description="How long a prefill chunk waits for the manager's plan, in seconds."
    )
    manager_deadline: float = Field(
        default=1.0, gt=0, le=60, description="Deadline of other calls to the manager, in seconds."
    )
    codec: Literal["int4", "none", ""] = Field(
        default="int4",
        description="Codec of evicted slots while no manager grants one, int4 or none (as they are); empty: dropped.",
    )
    resident_codec: str = Field(
        default="none",
        description="Format of resident slots of requests that name none: none (as they are), the name of one, such as "
        "turboquant:k4v3, or planned (slots and bits of each head by the model's profile).",
    )
    staging_bytes: int = Field(
        default=64 << 20, ge=0, description="Bytes of encoded segments that may wait for the manager."
    )
    suspend_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="Bytes of rows and prefixes on their way to and from the store (what does not fit is read anew), "
        "and of rows put away for more urgent requests (what does not fit stays). 0 keeps none.",
    )
    suspend_deadline: float = Field(
        default=5.0, gt=0, le=300, description="The most that getting or keeping a session's row may take, in seconds."
    )
    session_patience: float = Field(
        default=2.0, ge=0, le=300, description="How long a turn of a session waits for the end of another, in seconds."
    )
    prefix_tokens: int = Field(
        default=256,
        ge=0,
        description="Tokens, about, from one boundary at which a prompt's prefix is stored to the next; prompts that "
        "begin alike are read once. 0 stores and loads none.",
    )
    prefix_advantage: float = Field(
        default=1.0,
        ge=0,
        description="How many times faster than reading a prefix loading it must be, as measured; 0 always loads.",
    )
    recall_deadline: float = Field(
        default=1.0, gt=0, le=60, description="The most that a recall may hold its row, in seconds."
    )
    recall_bytes: int = Field(
        default=256 << 20, ge=1, description="The most bytes of evicted slots that one recall may look at."
    )
    shadow_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of requests whose answers are compared with a full cache's."
    )
    shadow_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="Bytes that full caches to compare with may take; one that does not fit is skipped.",
    )
    shadow_load: float = Field(
        default=0.1, ge=0, le=1, description="Share of the time that comparing may take while requests run."
    )
    shadow_patience: float = Field(
        default=30.0, ge=0, le=3600, description="How long the last message of an answer waits for it, in seconds."
    )
    grace: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="How long a stop waits for answers, in seconds; then those of sessions are suspended as they are.",
    )
    log_level: str = Field(default="info", description="Least severe messages to log: debug, info, warning or error.")

    @property
    def manager_credentials(self) -> Credentials:
        """How the manager is reached."""
        return Credentials(
            self.manager_ca_file,
            self.manager_certificate,
            self.manager_key,
            self.manager_server_name,
            self.manager_token_file,
        )

    @model_validator(mode="after")
    def _check_manager(self) -> Self:
        try:
            self.manager_credentials.check()
        except InvalidRequestError as error:
            raise ValueError(f"manager_{error}") from error
        return self

    def tokens_of_step(self, device: str) -> int:
        """Return the tokens of one step on a type of device."""
        return self.step_tokens or (CPU_STEP_TOKENS if device == "cpu" else GPU_STEP_TOKENS)

    @property
    def most_rows(self) -> int:
        """Requests that decode at once."""
        return self.rows or (MOST_ROWS if self.cache_bytes else DEFAULT_ROWS)
