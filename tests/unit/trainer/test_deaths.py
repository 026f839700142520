from __future__ import annotations

import itertools
import re

import pytest

from tandem.errors import OutOfMemory, TandemError, UnknownLoss, WorkerDied
from trainer_service.service.deaths import Death, Deaths, RankReport, trace

BROKEN = Death(rank=1, returncode=1, report=RankReport(error="RuntimeError: connection closed"))
TOO_LARGE = Death(rank=2, returncode=1, report=RankReport(error="too large", out_of_memory_at=64))
KILLED = Death(rank=3, returncode=-9)
GONE = Death(node="node 1 (ranks 2, 3) is gone: its connection was closed")


def cause(*deaths: Death, where: str = "") -> TandemError:
    known = Deaths(on_first=lambda _: None, settle=0.0, where=lambda rank: where)
    for death in deaths:
        known.add_death(death)
    found = known.cause(timeout=0.0)
    assert found is not None
    return found


@pytest.mark.parametrize("deaths", list(itertools.permutations([BROKEN, TOO_LARGE, KILLED, GONE])))
def test_a_node_is_blamed_before_a_rank_that_was_killed_and_that_before_one_that_failed(deaths):
    order = [GONE, KILLED, TOO_LARGE, BROKEN]
    for index, worst in enumerate(order):
        left = [death for death in deaths if death in order[index:]]
        assert cause(*left).message == cause(worst).message


def test_of_two_that_failed_the_first_is_blamed():
    assert cause(BROKEN, Death(rank=2, returncode=1)).message == (
        "rank 1 failed: RuntimeError: connection closed"
    )


def test_a_rank_on_another_node_is_named_with_it():
    error = cause(KILLED, where=" on node 1")
    assert error.message == "rank 3 on node 1 was killed by SIGKILL"
    error = cause(TOO_LARGE, where=" on node 1")
    assert isinstance(error, OutOfMemory)
    assert (error.tokens, error.message) == (64, "rank 2 on node 1 failed: too large")


def test_while_nothing_died_there_is_no_cause():
    assert Deaths(on_first=lambda _: None, settle=0.0, where=str).cause(timeout=0.0) is None


def fail(path: str) -> None:
    raise OSError(f"no such file: '{path}'")


def test_an_error_is_told_on_one_line_with_its_traceback_and_causes_and_without_folders():
    try:
        try:
            fail("/srv/models/tiny/config.json")
        except OSError as error:
            raise RuntimeError("the model\nis damaged") from error
    except RuntimeError as error:
        told = trace(error)
    here = "test_deaths.py:[0-9]+"
    assert re.fullmatch(
        rf"RuntimeError: the model \(traceback: {here} test_\w+\), caused by OSError: no such "
        rf"file: 'config.json' \(traceback: {here} test_\w+, {here} fail\)",
        told,
    )


def test_an_error_that_tandem_reports_is_told_by_its_sentence_alone():
    assert trace(UnknownLoss("unknown loss 'x'")) == "UnknownLoss: unknown loss 'x'"


def test_a_report_can_be_sent_whatever_its_sentence_holds():
    report = RankReport.of_error(ValueError("half a pair: \ud800"))
    assert RankReport.model_validate_json(report.model_dump_json()) == report


def test_the_traceback_of_an_endless_recursion_is_short():
    def recurse() -> None:
        recurse()

    with pytest.raises(RecursionError) as caught:
        recurse()
    assert len(trace(caught.value)) < 1000


@pytest.mark.parametrize(
    ("error", "defect"),
    [
        (KeyError("weights"), True),
        (AssertionError(), True),
        (ZeroDivisionError(), True),
        (NotImplementedError(), True),
        (RuntimeError("CUDA error: uncorrectable ECC error"), False),
        (OSError(5, "Input/output error"), False),
        (UnknownLoss("unknown loss"), False),
    ],
)
def test_an_error_that_is_in_the_program_itself_is_a_defect(error, defect):
    found = Death(rank=1, returncode=1, report=RankReport.of_error(error)).cause("")
    assert isinstance(found, WorkerDied)
    assert found.defect == defect
