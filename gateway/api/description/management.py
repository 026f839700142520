"""Sessions, checkpoints, usage, keys, and Tandem's own routes."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST

from gateway.api.description import answers as a
from gateway.api.description import records as r
from gateway.api.description.base import NO_CONTENT, Answer, Binary, Described, Header, json
from gateway.api.description.table import Table
from gateway.api.tandem import keys, metrics, status
from gateway.api.tinker import (
    audit,
    auth,
    billing,
    checkpoints,
    downloads,
    service,
    sessions,
    training_runs,
)
from tandem.errors import (
    AddressExpired,
    AddressForged,
    CheckpointDamaged,
    PermissionDenied,
    SessionFinished,
    StorageFull,
    UnknownKey,
    UnknownModel,
    UnknownRun,
    UnknownSession,
    UnknownWeights,
)

_FILE = Binary("application/octet-stream", "The file, or the part that `Range` asks for")
_TRACE = Binary("application/json", "A trace, in the form of the Chrome trace viewer")
_TOKEN = Header("X-Tinker-Weights-Access-Token", "Another key, which may read the source")
_ONCE = Header("X-Idempotency-Key", "The same key again gives the copy of then")

MANAGEMENT: Table = {
    service.create_session: Described(
        takes=((service.CreateSession,),),
        answers=json(a.CreatedSession),
        rules=("The SDK must not be too old.",),
    ),
    service.session_heartbeat: Described(
        takes=((service.Heartbeat,),),
        answers=json(a.Beat),
        errors=(UnknownSession, SessionFinished),
    ),
    service.finish_session: Described(
        takes=((service.Finish,),), answers=NO_CONTENT, errors=(UnknownSession,)
    ),
    service.client_config: Described(
        takes=((service.ClientConfig,),),
        body_needed=False,
        answers=json(a.ConfigOfClient),
        rules=("The SDK must not be too old.",),
    ),
    service.dynamic_config: Described(answers=json(a.DynamicConfig)),
    service.capabilities: Described(answers=json(a.Capabilities)),
    service.healthz: Described(answers=json(a.Health)),
    service.telemetry: Described(takes=((service.TelemetryBatch,),), answers=json(a.Accepted)),
    sessions.list_sessions: Described(queries=(sessions.PageQuery,), answers=json(r.SessionIds)),
    sessions.get_session: Described(
        queries=(sessions.ScopeQuery,), answers=json(r.SessionContents), errors=(UnknownSession,)
    ),
    sessions.search_sessions: Described(
        takes=((sessions.Search,),),
        answers=json(r.SessionPage),
        rules=("A cursor must be that of a page before, for the same filters.",),
    ),
    sessions.assign_session_project: Described(
        takes=((sessions.Project,),), answers=NO_CONTENT, errors=(UnknownSession,)
    ),
    sessions.trace_export: Described(answers=json(r.TraceExport), errors=(UnknownSession,)),
    sessions.trace_file: Described(
        queries=(sessions.TraceQuery,),
        answers={200: Answer(contents=(_TRACE,))},
        errors=(AddressForged, AddressExpired, UnknownWeights),
    ),
    training_runs.training_runs: Described(
        queries=(training_runs.RunsQuery,), answers=json(r.RunPage)
    ),
    training_runs.training_run: Described(
        queries=(sessions.ScopeQuery,), answers=json(r.RunInfoOfList), errors=(UnknownRun,)
    ),
    checkpoints.run_checkpoints: Described(answers=json(r.RunCheckpoints), errors=(UnknownRun,)),
    checkpoints.user_checkpoints: Described(
        queries=(checkpoints.CheckpointsQuery,), answers=json(r.CheckpointPage)
    ),
    checkpoints.delete_checkpoint: Described(
        answers=NO_CONTENT, errors=(UnknownWeights,), rules=("The path must be one.",)
    ),
    checkpoints.publish_checkpoint: Described(
        answers=NO_CONTENT, errors=(UnknownWeights,), rules=("The path must be one.",)
    ),
    checkpoints.unpublish_checkpoint: Described(
        answers=NO_CONTENT, errors=(UnknownWeights,), rules=("The path must be one.",)
    ),
    checkpoints.set_checkpoint_ttl: Described(
        takes=((checkpoints.Ttl,),),
        answers=NO_CONTENT,
        errors=(UnknownWeights,),
        rules=("From an hour to ten years.", "The path must be one."),
    ),
    checkpoints.external_weights_urls: Described(
        answers=json(r.SignedUrls),
        errors=(UnknownWeights,),
        rules=("The checkpoint must be one that was exported.",),
    ),
    checkpoints.checkpoint_files: Described(
        queries=(checkpoints.FilesQuery,),
        answers=json(r.SignedUrls),
        errors=(UnknownWeights,),
        rules=("The path must be one.",),
        tag="Tandem",
    ),
    checkpoints.weights_info: Described(
        takes=((checkpoints.TinkerPath,),),
        answers=json(r.WeightsInfo),
        errors=(UnknownWeights,),
        rules=("The path must be one.",),
    ),
    checkpoints.copy_weights: Described(
        takes=((checkpoints.CopyWeights,),),
        headers=(_TOKEN, _ONCE),
        answers=json(r.Copied),
        errors=(UnknownWeights, UnknownSession, SessionFinished, StorageFull, CheckpointDamaged),
        rules=(
            "A copy needs a `destination_project_id`, or a `session_id` with a `model_seq_id`.",
            "The path must be one, and the time to live from an hour to ten years.",
        ),
    ),
    downloads.download: Described(
        queries=(downloads.DownloadQuery,),
        headers=(Header("Range", "Which part of the file"),),
        answers={200: Answer(contents=(_FILE,)), 206: Answer(contents=(_FILE,))},
        errors=(AddressForged, AddressExpired, UnknownWeights),
    ),
    auth.exchange_token: Described(answers=json(a.Token)),
    auth.own_key: Described(answers=json(a.OwnKey)),
    auth.delete_own_key: Described(answers=NO_CONTENT, errors=(PermissionDenied,)),
    billing.usage_events: Described(
        queries=(billing.UsageQuery,),
        answers=json(r.UsageEvents),
        rules=("The window begins and ends on the hour, and is of 14 days at most.",),
    ),
    billing.checkpoint_storage: Described(
        queries=(billing.StorageQuery,), answers=json(r.CheckpointStorage)
    ),
    audit.audit_log: Described(
        queries=(audit.AuditQuery,),
        answers=json(r.AuditLog),
        errors=(PermissionDenied,),
    ),
    status.status: Described(answers=json(r.Status), tag="Tandem"),
    status.list_models: Described(answers=json(a.ModelList), tag="Tandem"),
    status.add_model: Described(
        takes=((status.AddModel,),),
        answers=json(a.ModelEntry),
        rules=("The path must be the absolute path of a model that can be read.",),
        tag="Tandem",
    ),
    status.remove_model: Described(answers=NO_CONTENT, errors=(UnknownModel,), tag="Tandem"),
    status.config: Described(answers=json(a.Settings), tag="Tandem"),
    status.get_version: Described(answers=json(a.Version), tag="Tandem"),
    keys.list_keys: Described(answers=json(r.KeyList), tag="Tandem"),
    keys.create_key: Described(
        takes=((keys.CreateKey,),),
        answers=json(r.NewKeyInfo),
        rules=("An owner's name is of a-z 0-9 . _ -.",),
        tag="Tandem",
    ),
    keys.revoke_key: Described(answers=json(r.KeyInfo), errors=(UnknownKey,), tag="Tandem"),
    metrics.metrics: Described(
        answers={200: Answer(contents=(Binary(CONTENT_TYPE_LATEST, "Prometheus' text form"),))},
        tag="Tandem",
    ),
}
