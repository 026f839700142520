"""Which events of GitHub start a run on GPUs, and of which commit."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tandem.blueprints.approval import ApprovalRules, decide
from tandem.cli.main import main
from tandem.errors import InvalidRequest

EVENTS = Path(__file__).parents[2] / "support" / "github_events"
FIRST, PUSHED = (
    "1f0c5b8e2d7a4c93b6e1d05f8a7c2b94e3d6f1a0",
    "9ad4e7c1b2f3805d6c7e8f90a1b2c3d4e5f60718",
)
START = "5" * 40
"""The commit of a manual or scheduled start."""
LABELS = ApprovalRules(maintainers=("Ann",))
REVIEWS = ApprovalRules(environment="gpu")
CODE, DOCUMENTS = ("docs/loop.md", "tandem/rl/sft.py"), ("docs/loop.md", "README.md")
LABELED = "pull_request_labeled"

# event, rules, changed paths, the commit that runs ("" skips), words of the reason
TABLE = [
    ("pull_request_opened", LABELS, CODE, "", "'opened' approves nothing"),
    ("pull_request_opened", REVIEWS, CODE, FIRST, "waits for a reviewer of 'gpu'"),
    ("pull_request_opened", REVIEWS, DOCUMENTS, "", "only documents"),
    (LABELED, LABELS, CODE, FIRST, "'ann' approved"),
    (LABELED, LABELS, (), FIRST, "'ann' approved"),
    (LABELED, LABELS, DOCUMENTS, "", "only documents"),
    (LABELED, LABELS, ("docs/loop.md", "docsx/loop.py"), FIRST, "'ann' approved"),
    (LABELED, ApprovalRules(), CODE, "", "no maintainers are named"),
    (LABELED, REVIEWS, CODE, "", "no maintainers are named"),
    (f"{LABELED}_otherwise", LABELS, CODE, "", "the label 'bug' approves nothing"),
    (f"{LABELED}_by_bot", LABELS, CODE, "", "a program set the label"),
    (f"{LABELED}_by_helper", LABELS, CODE, "", "'eve' set the label"),
    (f"{LABELED}_of_fork", LABELS, CODE, "", "of a fork"),
    (f"{LABELED}_of_deleted_fork", LABELS, CODE, "", "of a fork"),
    (f"{LABELED}_in_fork", LABELS, CODE, FIRST, "'ann' approved"),
    ("pull_request_synchronize", LABELS, CODE, "", "a push withdraws each approval"),
    ("pull_request_synchronize", REVIEWS, CODE, PUSHED, "for this commit alone"),
    ("pull_request_unlabeled", LABELS, CODE, "", "'unlabeled' approves nothing"),
    ("pull_request_closed", LABELS, CODE, "", "closed"),
    ("push", LABELS, CODE, "", "events of this kind"),
    ("workflow_dispatch", ApprovalRules(), (), START, "'ann' started it by hand"),
    ("workflow_dispatch", LABELS, DOCUMENTS, START, "'ann' started it by hand"),
    ("workflow_dispatch_of_commit", LABELS, (), PUSHED, "'ann' started it by hand"),
    ("workflow_dispatch_by_bot", LABELS, (), "", "needs a person"),
    ("schedule", ApprovalRules(), (), START, "the schedule '17 3 * * 1'"),
    ("deployment_review_approved", REVIEWS, CODE, FIRST, "'ann' approved"),
    ("deployment_review_approved", REVIEWS, DOCUMENTS, "", "only documents"),
    ("deployment_review_approved", LABELS, CODE, "", "another environment"),
    ("deployment_review_approved", ApprovalRules((), "docs"), CODE, "", "another environment"),
    ("deployment_review_requested", REVIEWS, CODE, "", "'requested' approves nothing"),
    ("deployment_review_approved_of_fork", REVIEWS, CODE, "", "of a fork"),
]


def event(name: str) -> dict:
    read: dict = json.loads((EVENTS / f"{name}.json").read_text())
    return read


@pytest.mark.parametrize(("name", "rules", "changed", "commit", "reason"), TABLE)
def test_an_event_runs_one_commit_or_none(name, rules, changed, commit, reason):
    found = decide(event(name), rules, commit=START, changed=changed)
    assert (found.run, found.commit) == (bool(commit), commit)
    assert reason in found.reason


def test_every_event_has_a_row():
    assert {file.stem for file in EVENTS.iterdir()} == {row[0] for row in TABLE}


def test_a_push_after_the_approval_leaves_nothing_to_run_but_the_approved_commit():
    """The label is still there. A later label of another kind does not renew it."""
    assert decide(event(LABELED), LABELS).commit == FIRST
    pushed = event("pull_request_synchronize")
    assert [each["name"] for each in pushed["pull_request"]["labels"]] == ["gpu-approved"]
    assert not decide(pushed, LABELS).run
    later = event(f"{LABELED}_otherwise")
    later["pull_request"]["head"]["sha"] = PUSHED
    assert not decide(later, LABELS).run


def test_a_review_of_a_pull_request_with_the_label_approves_nothing():
    reviewed = event(LABELED) | {"action": "submitted", "review": {"state": "approved"}}
    assert not decide(reviewed, LABELS).run


def test_words_of_an_event_stay_in_one_line():
    forged = event(f"{LABELED}_otherwise")
    forged["label"]["name"] = "x\nrun=true\ncommit=" + PUSHED
    assert "\n" not in decide(forged, LABELS).reason


@pytest.mark.parametrize("sha", ["", "main", FIRST[:12], FIRST.upper(), f"{FIRST}\n", f"{FIRST}0"])
def test_a_commit_is_named_by_its_whole_sha(sha):
    branched = event(LABELED)
    branched["pull_request"]["head"]["sha"] = sha
    with pytest.raises(InvalidRequest, match=r"pull_request\.head\.sha"):
        decide(branched, LABELS)
    with pytest.raises(InvalidRequest, match="hexadecimal"):
        decide(event("schedule"), LABELS, commit=sha)
    manual = event("workflow_dispatch") | {"inputs": {"commit": sha or "HEAD"}}
    with pytest.raises(InvalidRequest, match="hexadecimal"):
        decide(manual, LABELS, commit=START)


@pytest.mark.parametrize("broken", [[], "labeled", None, {"pull_request": {}}, {"sender": 1}])
def test_malformed_events_are_refused(broken):
    with pytest.raises(InvalidRequest, match="no event of GitHub"):
        decide(broken, LABELS)


def told(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["tandem", "ci", "decide", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    done = capsys.readouterr()
    return int(ended.value.code or 0), done.out, done.err


def test_the_command_prints_outputs_and_its_status_is_the_decision(monkeypatch, capsys, tmp_path):
    labeled, paths = EVENTS / f"{LABELED}.json", tmp_path / "paths.txt"
    options = ("--maintainers", "ben, ann", "--changed", paths)
    paths.write_text("docs/loop.md\n")
    status, out, _ = told(monkeypatch, capsys, labeled, *options)
    assert (status, out) == (3, "run=false\ncommit=\nreason=only documents changed\n")
    paths.write_text("docs/loop.md\ntandem/rl/sft.py\n")
    status, out, _ = told(monkeypatch, capsys, labeled, *options)
    assert (status, out.splitlines()[:2]) == (0, ["run=true", f"commit={FIRST}"])
    status, out, _ = told(monkeypatch, capsys, labeled, *options, "--json")
    assert (status, json.loads(out)["commit"]) == (0, FIRST)


def test_the_command_reads_an_event_from_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(event("schedule"))))
    status, out, _ = told(monkeypatch, capsys, "-", "--commit", START)
    assert (status, f"commit={START}\n" in out) == (0, True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pull_request": 1}'])
def test_a_bad_event_has_another_status_and_no_outputs(monkeypatch, capsys, tmp_path, text):
    file = tmp_path / "event.json"
    file.write_text(text)
    status, out, err = told(monkeypatch, capsys, file)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
