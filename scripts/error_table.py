"""Writes docs/design/errors.md: every type of error with one example. `python -m
scripts.error_table`.

The columns follow from the classes. The examples, and the advice about a retry where the class
does not settle it, are the tables below."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gateway.api.errors import UnknownEndpoint
from gateway.api.openai.service import EngineStarting
from tandem import errors
from tandem.errors import ServerError, TandemError, UserError

PAGE = Path(__file__).parents[1] / "docs" / "design" / "errors.md"
_HEAD = """# Errors

`python -m scripts.error_table` writes this page. Each type of error has one example message.

The gateway refuses a request with the status of the table. The body has `error` (the sentence),
`type` and `category` (`user` or `server`). An accepted operation that fails later is answered with
200 and the same fields. Its sentence begins with the type.

The OpenAI-compatible routes have statuses of their own for failures of the platform, see
docs/sampling.md.

The SDK repeats requests with the statuses 408, 429 and 5xx by itself, for five minutes. It never
repeats an accepted operation that failed.
"""
_PARTS = {
    "The request is wrong": (
        "The category is `user`. The same request fails again, so correct it first."
    ),
    "The request was not carried out": "The category is `server`. The request was valid.",
    "At the start, in commands and between processes": (
        "A client of the gateway does not see these types. A process ends with them, a command of "
        "`tandem` prints them, or one process tells another."
    ),
}
_INTERNAL = (
    UserError,
    ServerError,
    errors.UnknownSchema,
    errors.UnknownSetting,
    errors.WorkerMayRun,
    errors.IllegalTransition,
    errors.CannotSleep,
    errors.SuspendFailed,
)
_RETRY: dict[type[TandemError], str] = {
    errors.TokenRefused: "yes, the SDK gets a new token",
    errors.AddressForged: "with a new address",
    errors.AddressExpired: "with a new address",
    errors.SessionFinished: "in a new session",
    errors.LimitExceeded: "after you made room",
    errors.GradientsIncomplete: "after the batches",
    errors.StaleVersion: "after a save of newer weights",
    errors.NoGradients: "after a forward_backward",
    errors.NoRoom: "when others have ended",
    errors.RunStopped: "from its checkpoint, in a new run",
    errors.BudgetExhausted: "with a larger budget",
    errors.DeadlineExceeded: "from its checkpoint, in a new run",
    errors.SequenceGap: "with new operations",
    errors.WorkerDied: "from a checkpoint",
    errors.GatewayRestarted: "from a checkpoint, or at once for a sample",
    errors.JobFailed: "as a new job",
    errors.OutOfMemory: "with shorter sequences",
    errors.OperationTimedOut: "with less work",
    errors.LoadFailed: "no, save again",
    errors.CheckpointDamaged: "no, load another one",
    errors.GradientsNotFinite: "after the batches",
    errors.InternalError: "perhaps once",
}
"""Where it is neither "no" for a user's mistake nor "yes" for the platform's."""
EXAMPLES: dict[type[TandemError], str] = {
    errors.Unauthenticated: "the API key is missing or wrong; `tandem up` prints the local one, "
    "and an admin makes others with `tandem keys create` (TINKER_API_KEY)",
    errors.TokenRefused: "the token has expired; exchange the key for a new one",
    errors.PermissionDenied: "this needs a key with the role admin; k-3fa2 is a key with the role "
    "member (an admin makes keys with `tandem keys create`)",
    errors.UnknownModel: "unknown model 'my/modle'; known: my/model",
    errors.UnknownSession: "there is no session 's-ab12' on this server, or it is another "
    "owner's; make a new ServiceClient",
    errors.UnknownRun: "there is no training run 's-ab12:train:0' on this server, or it is "
    "another owner's; `tandem runs list` shows yours",
    errors.UnknownSampler: "there is no sampling session 's-ab12:sample:0' on this server, or it "
    "is another owner's; make a new SamplingClient",
    errors.UnknownWeights: "there is no checkpoint 'tinker://s-ab12:train:0/weights/best'; it may "
    "be deleted, expired or another owner's. `tandem checkpoints list` shows yours",
    errors.UnknownRequest: "there is no request 's-ab12:train:0:7' on this server, it is "
    "another owner's, or its result is no longer kept; send it again",
    errors.UnknownKey: "there is no key 'k-3fa2'; `tandem keys list` shows them",
    errors.UnknownTrace: "there is no trace 'tr-5a1c0e7b9d3f2468'; it may have been deleted, or "
    "ended long ago",
    errors.UnknownTrial: "there is no trial 'trial-5a1c0e7b9d3f', or it is another owner's",
    errors.TraceEnded: "the trace tr-5a1c0e7b9d3f2468 has expired; create another one",
    errors.UnknownGroup: "there is no group 'trian'; known: train, sample-1",
    errors.UnknownOwner: "there is no owner 'anm'; `tandem owners list` shows them. The first key "
    "of an owner makes it known (`tandem keys create --owner NAME`)",
    UnknownEndpoint: "this server does not answer GET /models; /v1/models is there",
    errors.AddressForged: "the download address was not signed here, or was altered; ask for a new "
    "one with get_external_weights_urls",
    errors.AddressExpired: "the download address has expired; ask for a new one with "
    "get_external_weights_urls",
    errors.SessionFinished: "session s-ab12 has ended (expired: no heartbeat for 60 s); make a new "
    "ServiceClient",
    errors.PayloadTooLarge: "the request has 70000 JSON values, 65536 at most; send less at once",
    errors.LimitExceeded: "the limit of runs is 128 for each owner (TANDEM_LIMIT_RUNS), 128 are "
    "used; close unneeded sessions "
    '(ServiceClient.close("success")), and their runs end. Checkpoints stay',
    errors.InvalidRequest: "temperature is -1.0; it must be a number of at least 0",
    errors.InvalidField: "'learnign_rate' is no setting of trl; did you mean learning_rate?",
    errors.FrameworkMissing: "trl is not installed on the host of trainers: run `make setup-trl` "
    "there, or use the image of deploy/trl.Dockerfile",
    errors.MalformedPayload: "the body is of the type 'text/plain'; send JSON with Content-Type: "
    "application/json",
    errors.SdkTooOld: "forward_backward came as JSON, which SDKs older than tinker 0.25 send; this "
    'server takes protobuf alone. Install tinker>=0.27: pip install --upgrade "tinker>=0.27"',
    errors.UnsupportedInput: "datum 3: a chunk of kind image is not supported; this model takes "
    "encoded text alone",
    errors.CustomLossInvalid: "the session has another custom loss with the number 2; give each "
    "its own custom_loss_seq_id",
    errors.StructuredOutputInvalid: "regex has 20000 bytes; at most 16384 are possible, so "
    "shorten it",
    errors.UnsuitableLora: "lora_config trains nothing; set one of train_attn, train_mlp and "
    "train_unembed",
    errors.UnsupportedByBackend: "the trainer backend Mine cannot publish adapters; create the run "
    "with another one (tandem.backend)",
    errors.CheckpointMismatch: "'tinker://s-ab12:train:0/weights/best' holds all parameters of its "
    "model, and this run trains a LoRA adapter; make a run from it with "
    "create_training_client_from_state",
    errors.EmptyBatch: "the batch has no datum; send at least one",
    errors.TokenOutOfVocabulary: "datum 3, position 17: token 151936 is outside the vocabulary of "
    "151936 tokens (0 to 151935); encode text with the model's tokenizer",
    errors.SequenceTooLong: "Prompt length plus max_tokens exceeds the model's context window: "
    "67984 prompt tokens + 4096 max_tokens > 65536.",
    errors.LossInputMissing: "datum 3 lacks 'advantages'; ppo needs target_tokens, logprobs, "
    "advantages",
    errors.LossInputShape: "datum 3: advantages has the shape [6]; it must be that of "
    "target_tokens: [8]",
    errors.LossInputNotFinite: "datum 3, position 17: 'advantages' is nan; every value must be "
    "finite",
    errors.UnknownLoss: "unknown loss 'pppo'; known: cispo, cross_entropy, dpo, ppo",
    errors.UnknownLossSetting: "ppo has no setting 'clip'; its settings: clip_high_threshold, "
    "clip_low_threshold",
    errors.CustomLossFailed: "the custom loss 'mine' failed: the shapes [4] and [5] do not fit",
    errors.OptimizerSetting: "this run was created with the optimizer 'dimuon', so its steps take "
    "DimuonParams, not AdamParams",
    errors.NoGradients: "there are no gradients: no forward_backward came since the last "
    "optim_step; send one first",
    errors.GradientsIncomplete: "a forward_backward since the last step was refused, so the step "
    "was not made and the gradients were dropped: operation 6, a forward_backward since the last "
    "step, was refused: datum 3 has no token; give every datum at least one. Send the batches "
    "again, then the step",
    errors.NameTaken: "there is a checkpoint tinker://s-ab12:train:0/weights/best already; "
    "overwrite=True replaces it",
    errors.NoRoom: "2 more engines need a place, and there is room for 1: 1st in the queue "
    "for a place on group sample-2: 16 workers are there (TANDEM_GROUPS workers). Nothing has "
    "changed. Ask for fewer, "
    "wait for others to end (`tandem top` shows them), or declare more groups (TANDEM_GROUPS)",
    errors.RunStopped: "ann has stopped the run; its state is "
    "tinker://s-ab12:train:0/weights/stopped-12",
    errors.BudgetExhausted: "the budget of ann is used up: 100 device-hours of 100. An admin can "
    "raise it (`tandem owners set ann`); its state is tinker://s-ab12:train:0/weights/stopped-12",
    errors.DeadlineExceeded: "the run has reached its tandem.deadline; its state is "
    "tinker://s-ab12:train:0/weights/stopped-12",
    errors.StaleVersion: "version 3 of s-ab12:train:0 is 4 steps behind its trainer, and "
    "max_staleness is 2; save newer weights for sampling, or raise max_staleness",
    errors.SampleCancelled: "the sample was cancelled by its client",
    errors.SequenceGap: "operation 6 did not arrive within 60 s, so later operations cannot be "
    "carried out in order; send them again",
    errors.SequenceTaken: "operation 7 of s-ab12:train:0 is already another request "
    "(forward_backward), which stays as it is: two clients number the operations of one run. Let "
    "one client write to the run, and begin a run from its checkpoint for the other",
    errors.WorkerStartFailed: "the trainer did not start: the trainer was killed by SIGKILL, "
    "as the kernel does when memory runs out",
    EngineStarting: "the sampler is starting; it goes on, so retry a little later",
    errors.WorkerDied: "the trainer died 3 times at operation 7, a forward_backward: rank 0 was "
    "killed by SIGKILL; create the run again, from a checkpoint if there is one",
    errors.OperationTimedOut: "the trainer did not end the operation within 1800 s "
    "(TANDEM_OPERATION_TIMEOUT); send smaller batches, or raise the setting",
    errors.OutOfMemory: "a micro-batch of 32768 tokens ran out of memory and cannot be divided. "
    "Send shorter sequences, or give the trainer more memory or more ranks",
    errors.JobFailed: "the job failed after 2 attempts: rank 1 ended with status 1: "
    "torch.OutOfMemoryError: CUDA out of memory",
    errors.GatewayRestarted: "the gateway restarted and the trainer of the run ended. The run "
    "cannot be restored: create it again, from a checkpoint if there is one",
    errors.GatewaySuperseded: "another gateway (epoch 4) has taken over from this one (epoch 3); "
    "ask that one",
    errors.StandingBy: "this gateway is a standby, and another one serves; ask again soon",
    errors.SignInFailed: "the provider login.example.com does not answer properly now "
    "(ConnectTimeout); try again, or sign in with an API key",
    errors.StorageFailed: "the gateway cannot use its storage now (SQLITE_IOERR); try again. If "
    "it lasts, the operator finds the cause in the gateway's log",
    errors.StorageFull: "the disk or the database of the gateway is full, and nothing was changed; "
    "try again after the operator has freed space",
    errors.PublishFailed: "the weights could not be encrypted: age ended with status 1",
    errors.LoadFailed: "v000004-7c1e: the engine's logprobs differ from the trainer's by 0.3, more "
    "than 0.01; save the weights again",
    errors.CheckpointDamaged: "checkpoint best-19af: rank-0-1.safetensors is damaged; load "
    "another checkpoint",
    errors.GradientsNotFinite: "the norm of the gradients is nan; they were dropped and the "
    "weights are unchanged. Look for extreme advantages, weights or learning rates",
    errors.Overloaded: "16384 queued operations of this owner are held already, 16384 at most "
    "(TANDEM_LIMIT_QUEUED_OPERATIONS); ask again in 4 s",
    errors.RequestTimedOut: "the body of the request did not arrive: no byte came for 30 s, or it "
    "was not complete within 300 s; send it again",
    errors.InternalError: "KeyError in the gateway; see its log",
    UserError: "there is no log of 'trainer-1'; `tandem logs` lists the logs",
    ServerError: "the gateway at http://127.0.0.1:8000 does not answer: connection refused; "
    "`tandem logs gateway` may show why",
    errors.UnknownSchema: "tandem.db has the schema '0042', which this release of Tandem does not "
    "know: another version made it, a newer one or one that was never released. Use that version "
    "again, or give this one an empty database and data directory (TANDEM_DATABASE_URL, "
    "TANDEM_DATA_DIR) and create the runs again",
    errors.UnknownSetting: "TANDEM_POTR is unknown; did you mean TANDEM_PORT?",
    errors.WorkerCrashed: "the sampler did not start: the sampler was killed by SIGSEGV",
    errors.WorkerMayRun: "the trainer was killed, and some of its processes have not ended yet",
    errors.IllegalTransition: "worker trainer-s-ab12-0 is asleep and cannot become starting",
    errors.CannotSleep: "the trainer backend Mine does not know how to sleep",
    errors.SuspendFailed: "resuming the worker took longer than 120 s",
}


def descendants(cls: type[TandemError]) -> Iterator[type[TandemError]]:
    """Yield the subclasses of a class, in the order of their definition."""
    for child in cls.__subclasses__():
        yield child
        yield from descendants(child)


def error_page() -> str:
    """Return the page. Raises `ValueError` for a type of error without an example."""
    shown: dict[str, type[TandemError]] = {}  # a richer form of an error has its parent's type
    for cls in descendants(TandemError):
        shown.setdefault(cls.type, cls)
    types = [*shown.values()]
    if missing := [cls.__name__ for cls in types if cls not in EXAMPLES]:
        raise ValueError(f"these errors have no example: {', '.join(missing)}")
    users = [cls for cls in types if issubclass(cls, UserError) and cls not in _INTERNAL]
    servers = [cls for cls in types if issubclass(cls, ServerError) and cls not in _INTERNAL]
    lines = [_HEAD]
    for (title, about), part in zip(_PARTS.items(), (users, servers, _INTERNAL), strict=True):
        lines += [f"## {title}", "", about, ""]
        if part is _INTERNAL:
            lines += ["| type | example |", "|---|---|"]
            lines += [f"| `{cls.type}` | {EXAMPLES[cls]} |" for cls in part]
        else:
            lines += ["| type | status | does a retry help? | example |", "|---|---|---|---|"]
            lines += map(_row, part)
        lines.append("")
    return "\n".join(lines)


def _row(cls: type[TandemError]) -> str:
    if cls in _RETRY:
        retry = _RETRY[cls]
    elif issubclass(cls, UserError):
        retry = "no"
    else:
        retry = "yes" if cls.status == ServerError.status else "yes, the SDK retries"
    status = "404, 405" if cls is UnknownEndpoint else cls.status
    return f"| `{cls.type}` | {status} | {retry} | {EXAMPLES[cls]} |"


if __name__ == "__main__":
    PAGE.write_text(error_page())
