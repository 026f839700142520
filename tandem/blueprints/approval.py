"""Decides whether an event of GitHub starts a run on GPUs. It reads nothing but its arguments.

A decision names the one commit that may run. A commit that nobody approved is never named."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from tandem.errors import InvalidRequest

LABEL = "gpu-approved"
_PUSHES = ("opened", "reopened", "synchronize")
"""Actions after which a protected environment asks its reviewers about a new commit."""

_SHA = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
Commit = Annotated[str, StringConstraints(pattern=f"^({_SHA.pattern})$")]


class _EventPart(BaseModel):
    """The used fields of a part. GitHub adds others at any time."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class EventAccount(_EventPart):
    login: str
    type: str

    @property
    def is_person(self) -> bool:
        return self.type == "User"


class EventRepository(_EventPart):
    id: int


class EventLabel(_EventPart):
    name: str


class PullRequestHead(_EventPart):
    """`repo` is None after the repository was deleted."""

    sha: Commit
    repo: EventRepository | None = None


class PullRequest(_EventPart):
    state: str
    head: PullRequestHead


class WorkflowRun(_EventPart):
    head_sha: Commit
    head_repository: EventRepository | None = None


class WorkflowJob(_EventPart):
    environment: str | None = None


class GitHubEvent(_EventPart):
    """The payload of a webhook, which is also the file GITHUB_EVENT_PATH of a workflow. It does not
    name its kind, so the fields that are present tell it."""

    action: str = ""
    sender: EventAccount | None = None
    repository: EventRepository | None = None
    pull_request: PullRequest | None = None
    label: EventLabel | None = None
    workflow_run: WorkflowRun | None = None
    workflow_job_run: WorkflowJob = WorkflowJob()
    workflow_job_runs: tuple[WorkflowJob, ...] = ()
    approver: EventAccount | None = None
    workflow: object = None
    inputs: object = None
    schedule: str | None = None


@dataclass(frozen=True)
class GpuDecision:
    """`commit` is the commit to check out, and empty if nothing runs. `reason` is one line."""

    run: bool
    reason: str
    commit: str = ""


@dataclass(frozen=True)
class ApprovalRules:
    """`maintainers` are the accounts whose label counts, because an event does not show rights, and
    helpers without write access may set labels. `environment` is the protected environment in
    which the job waits for a reviewer, empty without one."""

    maintainers: Collection[str] = ()
    environment: str = ""


def decide(
    event: object, rules: ApprovalRules, *, commit: str = "", changed: Collection[str] = ()
) -> GpuDecision:
    """Decide about one event, given as parsed JSON. Raises `InvalidRequest` if it is malformed.

    `commit` is the commit of a manual or scheduled start, which such events do not name. `changed`
    are the paths that a pull request changes, and empty if they are unknown."""
    try:
        read = GitHubEvent.model_validate(event)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"])) or "it"
        raise InvalidRequest(f"this is no event of GitHub: {where}: {fault['msg']}") from error
    if read.pull_request is not None:
        return _without_documents(_of_pull_request(read, read.pull_request, rules), changed)
    if read.workflow_run is not None:
        return _without_documents(_of_review(read, read.workflow_run, rules), changed)
    if read.schedule is not None:
        return _start(f"the schedule {read.schedule!r} started it", commit)
    if read.workflow is not None and "inputs" in read.model_fields_set:
        return _of_manual_start(read, commit)
    return _skip("events of this kind approve nothing")


def _of_pull_request(
    event: GitHubEvent, pull_request: PullRequest, rules: ApprovalRules
) -> GpuDecision:
    head, action = pull_request.head, event.action
    if pull_request.state != "open":
        return _skip("the pull request is closed")
    if _is_foreign(head.repo, event.repository):
        return _skip("the pull request is of a fork, whose code gets no key; see docs/ci.md")
    if action in _PUSHES and rules.environment:
        why = f"the job waits for a reviewer of {rules.environment!r}, for this commit alone"
        return GpuDecision(True, why, head.sha)
    if action == "synchronize":
        return _skip(f"a push withdraws each approval; remove {LABEL}, and set it again")
    if action != "labeled" or event.label is None:
        return _skip(f"{action!r} approves nothing; a maintainer sets the label {LABEL}")
    if event.label.name != LABEL:
        return _skip(f"the label {event.label.name!r} approves nothing; {LABEL} does")
    who = event.sender
    if who is None or not who.is_person:
        return _skip(f"a program set the label {LABEL}; a maintainer must")
    if not rules.maintainers:
        return _skip("no maintainers are named, so no label counts")
    if who.login.casefold() not in {each.casefold() for each in rules.maintainers}:
        return _skip(f"{who.login!r} set the label {LABEL}, and is not named as a maintainer")
    return GpuDecision(True, f"{who.login!r} approved the commit by a label", head.sha)


def _of_review(event: GitHubEvent, run: WorkflowRun, rules: ApprovalRules) -> GpuDecision:
    """Decide about `deployment_review`: a reviewer of a protected environment has answered."""
    named = {job.environment for job in (event.workflow_job_run, *event.workflow_job_runs)}
    if event.action != "approved":
        return _skip(f"{event.action!r} approves nothing")
    if not rules.environment or rules.environment not in named:
        return _skip("the review is of another environment")
    if _is_foreign(run.head_repository, event.repository):
        return _skip("the reviewed commit is of a fork, whose code gets no key; see docs/ci.md")
    if event.approver is None:
        return _skip("the event names no reviewer")
    return GpuDecision(True, f"{event.approver.login!r} approved the commit", run.head_sha)


def _of_manual_start(event: GitHubEvent, commit: str) -> GpuDecision:
    if event.sender is None or not event.sender.is_person:
        return _skip("a program started the workflow; a manual start needs a person")
    given = event.inputs.get("commit") if isinstance(event.inputs, dict) else ""
    return _start(f"{event.sender.login!r} started it by hand", str(given or commit))


def _start(why: str, commit: str) -> GpuDecision:
    if not _SHA.fullmatch(commit):
        raise InvalidRequest(f"the commit is {commit[:100]!r}; give all its hexadecimal digits")
    return GpuDecision(True, why, commit)


def _without_documents(decision: GpuDecision, changed: Collection[str]) -> GpuDecision:
    if decision.run and changed and all(map(_is_document, changed)):
        return _skip("only documents changed")
    return decision


def _is_document(path: str) -> bool:
    return path.startswith("docs/") or PurePosixPath(path).suffix == ".md"


def _is_foreign(head: EventRepository | None, own: EventRepository | None) -> bool:
    """Repositories are compared by id. The own one may itself be somebody's fork."""
    return head is None or own is None or head.id != own.id


def _skip(reason: str) -> GpuDecision:
    return GpuDecision(False, reason)
