"""The tables of the gateway's database. Times are in seconds since 1970. Paths are relative to the
data directory.

Each change needs a migration in `gateway/storage/migrations/versions` and a test of it."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    TypeDecorator,
    text,
)
from sqlalchemy import String as _String
from sqlalchemy import Text as _Text
from sqlalchemy.engine import Dialect

metadata = MetaData()


class String(TypeDecorator[str]):
    """Text in which U+FFFD replaces U+0000, because PostgreSQL refuses that. PostgreSQL also
    refuses text longer than the column, so the API bounds text from clients."""

    impl = _String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value.replace("\0", "\ufffd") if value else value


class Text(String):
    impl = _Text
    cache_ok = True


models = Table(
    "models",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("path", Text, nullable=False),  # absolute if outside the data directory
    Column("max_length", Integer),
    Column("added_at", Float, nullable=False),
)

# API keys. A row has the hash of the key. The local key has no row.
keys = Table(
    "keys",
    metadata,
    Column("id", String(32), primary_key=True),  # k- and 12 hex digits of `digest`
    Column("digest", LargeBinary, nullable=False),  # SHA-256 of the key
    Column("owner", String(100), nullable=False),
    Column("role", String(16), nullable=False),  # admin, member, reader, metrics
    Column("name", String(100), nullable=False, default=""),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Column("last_used_at", Float),
)

# Browsers that are signed in to the page.
page_sessions = Table(
    "page_sessions",
    metadata,
    Column("id", String(64), primary_key=True),  # SHA-256 of the cookie's token, in hex
    Column("key_id", String(32), nullable=False),
    Column("expires_at", Float, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("state", String(16), nullable=False),  # active, finished, expired
    Column("reason", String(32), nullable=False, default=""),
    Column("detail", Text, nullable=False, default=""),
    Column("display_name", Text),
    Column("user_metadata", JSON),
    Column("tags", JSON),
    Column("project_id", String(200), nullable=False, default=""),
    Column("owner", String(100), nullable=False),
    Column("sdk_version", String(64), nullable=False, default=""),
    Column("engine_ranges", JSON),  # see sessions/registry.py
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),
    Index("sessions_by_state", "state"),
    Index("sessions_by_owner", "owner", "created_at"),
    Index("sessions_by_project", "project_id"),
)

runs = Table(
    "runs",
    metadata,
    Column("id", String(100), primary_key=True),
    Column("session_id", String(64), nullable=False),
    Column("base_model", String(200), nullable=False),
    Column("training", JSON, nullable=False),  # a tandem.protocol.worker.TrainingSpec
    # The RunOptions. None if the run only has a copied checkpoint.
    Column("asks", JSON),
    # The id of the run that started its trainer. LoRA runs may share one.
    Column("host", String(100), nullable=False, default=""),
    Column("owner", String(100), nullable=False),
    Column("project_id", String(200), nullable=False, default=""),
    Column("state", String(16), nullable=False),  # active, ended
    Column("error_type", String(64), nullable=False, default=""),
    Column("reason", Text, nullable=False, default=""),
    # save or discard: the end of an active run was decided, with the error above
    Column("ending", String(8)),
    # The record's identity. `user_metadata` has the other keys.
    Column("name", String(200)),
    Column("tags", JSON),  # a list of text
    Column("config", JSON),  # an object
    # The run whose checkpoint it loaded, and that checkpoint's optimizer step.
    Column("parent_run", String(100)),
    Column("parent_step", BigInteger),
    Column("user_metadata", JSON),
    # The restoration after a gateway's restart uses the next four columns.
    Column("model", JSON),  # the base model when the run was created, as a BaseModelEntry
    Column("parent", String(200), nullable=False, default=""),  # the newest published version
    Column("newest", String(200), nullable=False, default=""),  # the newest version for sampling
    # A replay can repeat only the operations after this `seq_id`.
    Column("replay_after", BigInteger, nullable=False, default=-1),
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),
    Index("runs_by_session", "session_id"),
    Index("runs_by_owner", "owner", "created_at"),
    Index("runs_by_state", "state"),
)

# The operations of all runs. A request's id is RUN:SEQ. `request` is the client's JSON without the
# payload of a forward_backward. `payload` is that payload. A large one is a file in the private
# directory instead. `call` is the message to the trainer. Payload and call stay while a restoration
# may need them. An operation in the state `accepted` can have an error. Then it was refused, and it
# fails when its predecessors have ended.
operations = Table(
    "operations",
    metadata,
    Column("run_id", String(100), primary_key=True),
    Column("seq_id", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(32), nullable=False),
    Column("state", String(16), nullable=False),  # accepted, done, failed
    Column("request", LargeBinary, nullable=False),
    Column("payload", LargeBinary),
    Column("call", LargeBinary),
    Column("digest", LargeBinary, nullable=False),  # the hash of kind and request
    Column("accepted_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("error_type", String(64), nullable=False, default=""),
    Column("error", Text, nullable=False, default=""),
    Column("seconds", Float),  # the trainer's time for this operation
    Column("media", String(16), nullable=False, default=""),  # the result's type: json, protobuf
    Column("result", LargeBinary),  # None if it has expired, or is in a file because it is large
    Index("operations_by_end", "ended_at"),
    Index(
        "operations_with_result",
        "ended_at",
        sqlite_where=text("result IS NOT NULL"),
        postgresql_where=text("result IS NOT NULL"),
    ),
)

# The snapshots of all runs. A snapshot is the trainer's state after the operation `seq_id`.
snapshots = Table(
    "snapshots",
    metadata,
    Column("folder", String(300), primary_key=True),  # relative to the data directory
    Column("run_id", String(100), nullable=False),
    Column("seq_id", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Index("snapshots_by_run", "run_id"),
)

# The optimizer steps of all runs. They are removed with their run. `seconds` is the trainer's time
# for the step and for its batches. `tokens` counts the tokens of its batches.
training_steps = Table(
    "training_steps",
    metadata,
    Column("run_id", String(100), primary_key=True),
    Column("seq_id", BigInteger, primary_key=True, autoincrement=False),  # the optim_step's
    Column("step", BigInteger, nullable=False),
    Column("at", Float, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("weight_version", String(200), nullable=False),  # the newest version before the step
    Column("metrics", JSON, nullable=False),  # a value that is not finite is null
)

# The index of the metrics and rollouts in the files of a run's record. Times are the gateway's. A
# step is the user's, or the optimizer's in a run without rows of the user.
run_records = Table(
    "run_records",
    metadata,
    Column("run_id", String(100), primary_key=True),
    Column("step", BigInteger),  # the largest
    Column("first_step", BigInteger),  # the smallest
    Column("by_user", Boolean, nullable=False, default=False),  # whether steps are the user's
    Column("step_at", Float),  # when `step` arrived
    Column("pace", Float),  # recent seconds per step
    Column("last", JSON, nullable=False),  # the newest value of each name
    Column("rows", BigInteger, nullable=False, default=0),  # of metrics
    Column("rollouts", BigInteger, nullable=False, default=0),
    Column("bytes", BigInteger, nullable=False, default=0),
    Column("dropped", BigInteger, nullable=False, default=0),
    Column("updated_at", Float, nullable=False),
)

# The batches of rollouts in the files of a record. `batch` is the client's key.
rollout_batches = Table(
    "rollout_batches",
    metadata,
    Column("run_id", String(100), primary_key=True),
    Column("batch", String(100), primary_key=True),
    Column("step", BigInteger, nullable=False),
    Column("file", String(100), nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("rated", BigInteger, nullable=False),  # rollouts with a reward
    Column("reward_min", Float),
    Column("reward_mean", Float),
    Column("reward_max", Float),
    Index("rollout_batches_by_step", "run_id", "step"),
)

# Whole trainings of other frameworks. Each is a row of `runs` too. See `gateway.jobs`.
jobs = Table(
    "jobs",
    metadata,
    Column("run_id", String(100), primary_key=True),
    Column("framework", String(64), nullable=False),
    Column("spec", JSON, nullable=False),  # a gateway.jobs.job.JobPlan
    Column("state", String(16), nullable=False),  # queued, running
    Column("attempt", Integer, nullable=False, default=1),  # counts from 1
    Column("restarts", Integer, nullable=False, default=0),  # the attempts that failed
    Column("files_until", Float),  # after the end: when its files go. None if they are gone
    Index("jobs_by_files", "files_until"),
)

sampling_sessions = Table(
    "sampling_sessions",
    metadata,
    Column("id", String(100), primary_key=True),
    Column("session_id", String(64), nullable=False),
    Column("kind", String(16), nullable=False),  # base, named, snapshot, inflight
    Column("base_model", String(200), nullable=False),
    Column("model_path", Text, nullable=False, default=""),  # tinker://…, only for the kind named
    Column("run_id", String(100), nullable=False, default=""),
    Column("version", String(205), nullable=False),  # for a base model: base/NAME
    Column("state", String(16), nullable=False),  # active, ended
    Column("clients", Integer, nullable=False, default=0),  # the number of clients so far
    Column("min_version", BigInteger),  # bounds of the answering weights, see sampling/bounds.py
    Column("max_staleness", BigInteger),
    Column("updates", String(8)),  # wait, keep, abort
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),
    Index("sampling_sessions_by_session", "session_id", "state"),
)

weight_versions = Table(
    "weight_versions",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("run_id", String(100), nullable=False),
    Column("base_model", String(200), nullable=False),
    Column("path", Text, nullable=False),
    Column("parent", String(200), nullable=False, default=""),
    Column("step", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("adapter", Boolean, nullable=False, default=False),
    Column("created_at", Float, nullable=False),
    Column("collected_at", Float),
    Index("weight_versions_by_run", "run_id"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("path", String(300), primary_key=True),  # tinker://RUN/KIND/NAME
    Column("run_id", String(100), nullable=False),
    Column("kind", String(32), nullable=False),  # weights, sampler_weights, external_weights
    Column("base_model", String(200), nullable=False),
    Column("folder", Text, nullable=False, default=""),  # only for the kind weights
    Column("version", String(200), nullable=False, default=""),  # for all other kinds
    Column("step", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("optimizer", Boolean, nullable=False),
    Column("owner", String(100), nullable=False),
    Column("public", Boolean, nullable=False, default=False),
    Column("user_metadata", JSON),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("expired_at", Float),  # when the gateway noticed the expiry
    Index("checkpoints_by_run", "run_id"),
    Index("checkpoints_by_owner", "owner", "created_at"),
    Index("checkpoints_by_expiry", "expires_at"),
    Index("checkpoints_by_expired", "expired_at"),
)

# Folders of deleted, replaced or expired checkpoints. The garbage collector removes them. It does
# not remove folders without a row in any table.
released_folders = Table(
    "released_folders",
    metadata,
    Column("folder", Text, nullable=False),
    Column("run_id", String(100), nullable=False),
    Index("released_folders_by_run", "run_id"),
)

# One row for the gateway that may use a PostgreSQL database (see `leadership`).
# Migrations do not change this table, and its name stays: a standby of an earlier version reads it.
leader = Table(
    "gateway_lease",
    MetaData(),
    Column("only", Boolean, primary_key=True, default=True),
    Column("epoch", BigInteger, nullable=False, default=0),
    Column("beat", BigInteger, nullable=False, default=0),
    Column("holder", Text, nullable=False, default=""),  # empty: no gateway
)

custom_losses = Table(
    "custom_losses",
    metadata,
    Column("id", String(100), primary_key=True),  # SESSION:loss:NUMBER
    Column("session_id", String(64), nullable=False),
    Column("name", String(200), nullable=False),
    Column("definition", LargeBinary, nullable=False),  # the body of create_custom_loss
    Column("created_at", Float, nullable=False),
    Index("custom_losses_by_session", "session_id"),
)

# The workers that should exist. A row is deleted when nothing is left of its worker. See
# `gateway.workers.table.WorkerRow`.
workers = Table(
    "workers",
    metadata,
    # A trainer's key is the id of its first run. An engine's key is SESSION/MODEL/RANK#NUMBER.
    Column("key", String(320), primary_key=True),
    Column("kind", String(16), nullable=False),  # trainer, engine, job
    Column("owner", String(100), nullable=False),
    Column("session_id", String(64), nullable=False),
    Column("request", JSON, nullable=False),  # a gateway.workers.requests.WorkerRequest
    Column("group_name", String(100), nullable=False, default=""),  # empty while it waits
    Column("state", String(16), nullable=False),  # a gateway.workers.table.State
    Column("token", BigInteger, nullable=False, default=0),  # a fencing token
    Column("process", String(400), nullable=False, default=""),  # the id of its process
    Column("reason", Text, nullable=False, default=""),
    Column("since", Float, nullable=False),  # when the state began
    Column("holders", JSON, nullable=False),  # the ids of runs, or a sampler's key
    # The state after the end of its process: placed, waiting, gone.
    Column("ends_as", String(16), nullable=False),
    # The number of younger rows that got a group before it.
    Column("overtaken", Integer, nullable=False, default=0),
)

# The changes of all workers' states. `state` is the new state. `busy_seconds` is the worker's
# computing time in the state before. Rows are removed after some days.
worker_events = Table(
    "worker_events",
    metadata,
    # SQLite numbers rows automatically only in a column of this type.
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("at", Float, nullable=False),
    Column("key", String(320), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("owner", String(100), nullable=False),
    Column("session_id", String(64), nullable=False),
    Column("group_name", String(100), nullable=False, default=""),
    Column("state", String(16), nullable=False),
    Column("busy_seconds", Float, nullable=False, default=0.0),
    Column("reason", Text, nullable=False, default=""),
    Index("worker_events_by_time", "at"),
    Index("worker_events_by_session", "session_id"),
)

# The use of each worker since its first request (see `gateway.workers.worker_use`). Peaks are null
# while unknown. `gpu_seconds` is utilisation (0 to 1) times seconds: in `gpu_measured_seconds` of
# its own processes, and in `gpu_shared_seconds` of all processes on its devices.
worker_use = Table(
    "worker_use",
    metadata,
    Column("key", String(320), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("session_id", String(64), nullable=False),
    Column("queue_seconds", Float, nullable=False),  # without a group, or asleep with calls
    Column("start_seconds", Float, nullable=False),  # of starts and wakes
    Column("run_seconds", Float, nullable=False),  # awake
    Column("measured_seconds", Float, nullable=False),  # with a heartbeat of its process
    Column("cpu_seconds", Float, nullable=False),
    Column("gpu_measured_seconds", Float, nullable=False),
    Column("gpu_shared_seconds", Float, nullable=False),
    Column("gpu_seconds", Float, nullable=False),
    Column("memory_peak", Float),  # bytes, as all peaks of memory
    Column("gpu_peak", Float),
    Column("gpu_memory_peak", Float),
    Index("worker_use_by_session", "session_id"),
)

# Drained device groups, which get no workers.
drained_groups = Table("drained_groups", metadata, Column("name", String(64), primary_key=True))

# The usage of each hour. There is one row for each run or sampling session and each event.
usage = Table(
    "usage",
    metadata,
    Column("hour", BigInteger, primary_key=True, autoincrement=False),  # seconds since 1970
    Column("event", String(32), primary_key=True),
    Column("subject", String(100), primary_key=True),  # a run or a sampling session
    Column("run_id", String(100), nullable=False, default=""),  # it trained the sampled weights
    Column("session_id", String(64), nullable=False),
    # The session's project. It is written when the session's row is deleted.
    Column("project_id", String(200), nullable=False, default=""),
    Column("owner", String(100), nullable=False),
    Column("base_model", String(200), nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("accelerator_seconds", Float, nullable=False),
    Index("usage_by_session", "session_id"),
)

# The limits and budgets that admins gave to single owners. A budget counts the use after `since`.
# The sums in `usage` were then `device_seconds_before` and `tokens_before`.
owner_limits = Table(
    "owner_limits",
    metadata,
    Column("owner", String(100), primary_key=True),
    Column("limits", JSON, nullable=False),  # values by names of LimitSettings
    Column("device_seconds", Float),
    Column("tokens", BigInteger),
    Column("since", Float, nullable=False),
    Column("device_seconds_before", Float, nullable=False),
    Column("tokens_before", BigInteger, nullable=False),
)

# The trials of the playground. A trial's id is the project of its sessions.
trials = Table(
    "trials",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", String(100), nullable=False),
    Column("blueprint", String(200), nullable=False),
    Column("model", String(200), nullable=False),
    Column("values", JSON, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("started_at", Float),
    Column("ends_at", Float),
    Column("ended_at", Float),
    Column("attempt", Integer, nullable=False),
    Column("key_id", String(64), nullable=False),
    Column("numbers", JSON, nullable=False),
    Column("violations", JSON, nullable=False),
    Column("weights", String(400), nullable=False),
    Index("trials_by_state", "state"),
    Index("trials_by_owner", "owner", "created_at"),
)

# It has a row while the playground is closed.
playground_closed = Table(
    "playground_closed",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
)

# Requests that change something, with their actor, address and outcome.
audit = Table(
    "audit",
    metadata,
    # SQLite numbers rows automatically only in a column of this type.
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("at", Float, nullable=False),
    Column("actor", String(100), nullable=False),
    Column("action", String(64), nullable=False),
    Column("target", String(300), nullable=False, default=""),
    Column("address", String(64), nullable=False, default=""),
    Column("status", Integer, nullable=False),
    Column("detail", Text, nullable=False, default=""),
    Index("audit_by_time", "at"),
)
