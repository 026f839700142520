from __future__ import annotations

import asyncio

import pytest

from tandem import errors
from tandem.errors import InternalError, ServerError, TandemError, UserError
from tandem.v1 import common_pb2


def descendants(cls: type[TandemError]) -> list[type[TandemError]]:
    return [found for child in cls.__subclasses__() for found in (child, *descendants(child))]


CLASSES = [cls for cls in descendants(TandemError) if cls.__module__ == errors.__name__]
USER = [cls for cls in CLASSES if issubclass(cls, UserError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_the_way_through_a_failure(cls):
    failure = common_pb2.Failure.FromString(cls("what was wrong").to_failure().SerializeToString())
    back = errors.from_failure(failure)
    assert type(back) is cls
    assert back.message == str(back) == "what was wrong"
    again = errors.from_type(failure.type, failure.message)
    assert (type(again), again.message) == (cls, back.message)


def test_types_are_unique_and_in_snake_case():
    types = [cls.type for cls in CLASSES]
    assert len(set(types)) == len(types)
    assert all(type_.replace("_", "").isalpha() and type_.islower() for type_ in types)
    assert errors.TokenOutOfVocabulary.type == "token_out_of_vocabulary"


def test_an_unknown_type_becomes_an_internal_error_with_the_message_kept():
    error = errors.from_failure(common_pb2.Failure(type="of_a_newer_worker", message="so it is"))
    assert type(error) is InternalError
    assert error.message == "so it is"


@pytest.mark.parametrize("cls", USER)
def test_a_user_s_mistake_never_gets_a_status_that_the_sdk_repeats(cls):
    assert 400 <= cls.status < 500
    assert cls.status not in (408, 409, 429)
    assert cls.category == "user"
    assert issubclass(cls, ValueError)


def test_every_error_is_either_the_user_s_or_the_server_s():
    for cls in CLASSES:
        assert issubclass(cls, UserError) != issubclass(cls, ServerError)
    assert all(cls.category == "server" for cls in CLASSES if cls not in USER)


def test_an_error_without_a_message_says_its_type():
    assert errors.StorageFull().message == "storage_full"
    assert errors.from_failure(errors.StorageFull().to_failure()).message == "storage_full"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "[Errno 13] Permission denied: '/srv/data/weights/x'",
            "[Errno 13] Permission denied: 'x'",
        ),
        ('File "/opt/tandem/trainer/a.py", line 3', 'File "a.py", line 3'),
        ("/srv/models/tiny is no model", "tiny is no model"),
        ("reading=/srv/models/tiny: no", "reading=tiny: no"),
        ("tinker://s-1:train:0/weights/a", "tinker://s-1:train:0/weights/a"),
        (
            "https://example.org/a/b and base/tiny/x, 3 / 4",
            "https://example.org/a/b and base/tiny/x, 3 / 4",
        ),
    ],
)
def test_a_fault_of_a_worker_is_told_without_the_folders_of_the_machine(said, told):
    assert errors.from_failure(errors.LoadFailed(said).to_failure()).message == told
    mistake = errors.UnknownLoss("unknown loss '/a/b/c'")
    assert errors.from_failure(mistake.to_failure()).message == mistake.message


def _raised(error: BaseException, cause: BaseException | None) -> BaseException:
    try:
        raise error from cause
    except BaseException as raised:  # noqa: BLE001 - the test examines it
        return raised


@pytest.mark.parametrize(
    ("error", "cause", "shown"),
    [
        (AssertionError(), None, "AssertionError"),
        (AssertionError(), KeyError("rank"), "AssertionError, caused by KeyError: 'rank'"),
        (TimeoutError(), OSError(), "TimeoutError, caused by OSError"),
        (RuntimeError(" "), ValueError("a shape"), "RuntimeError, caused by ValueError: a shape"),
        (KeyError("rank"), None, "KeyError: 'rank'"),
        (ValueError("a shape"), KeyError("rank"), "a shape"),
        (errors.StorageFull(), None, "storage_full"),
        (errors.LoadFailed("no version"), None, "no version"),
    ],
)
def test_an_error_without_a_sentence_is_shown_by_its_type_and_its_cause(error, cause, shown):
    assert errors.describe(_raised(error, cause)) == shown


def test_an_error_without_a_sentence_names_the_error_that_it_was_raised_during():
    try:
        try:
            raise ValueError("a shape")
        except ValueError:
            raise AssertionError  # noqa: B904 - the cause is the context
    except AssertionError as error:
        assert errors.describe(error) == "AssertionError, caused by ValueError: a shape"


async def test_a_timeout_is_not_shown_as_caused_by_the_cancellation_that_ends_the_wait():
    for wait in (asyncio.timeout(0), asyncio.timeout_at(0)):
        with pytest.raises(TimeoutError) as raised:
            async with wait:
                await asyncio.Event().wait()
        assert errors.describe(raised.value) == "TimeoutError"
    with pytest.raises(TimeoutError) as raised:
        await asyncio.wait_for(asyncio.Event().wait(), timeout=0.001)
    assert errors.describe(raised.value) == "TimeoutError"


def test_a_typed_description_begins_with_the_type():
    assert errors.describe(ValueError("a shape"), typed=True) == "ValueError: a shape"
    assert errors.describe(ValueError(), typed=True) == "ValueError"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("see https://hf.co//srv/secret/tiny/tree/main.", "see https://hf.co/main."),
        ("'https://hf.co//srv/secret/tiny' for files", "'https://hf.co/tiny' for files"),
        ("https://hf.co/%2Fsrv%2Fsecret%2Ftiny", "https://hf.co/tiny"),
        ("https://hf.co/x?path=%2fsrv%2fsecret%2ftiny&y=1", "https://hf.co/x?path=tiny&y=1"),
        ("https://hf.co/x?path=/srv/secret/tiny&y=1", "https://hf.co/x?path=tiny&y=1"),
        ("twice: %252Fsrv%252Fsecret%252Ftiny", "twice: tiny"),
        ("https:///srv/secret/tiny", "https://tiny"),
        ("file:///srv/secret/tiny", "tiny"),
        ("file://localhost/srv/secret/tiny and", "tiny and"),
        ("file:/srv/secret/tiny", "tiny"),
        ("sqlite:////srv/secret/tandem.db", "sqlite://tandem.db"),
        ("No such file: '/srv/my secret folder of old/tiny'", "No such file: 'tiny'"),
        ("no config in /srv/my secret/tiny today", "no config in tiny today"),
        ("--model=/srv/secret/tiny", "--model=tiny"),
        ("model;/srv/secret/tiny", "model;tiny"),
        ("model->/srv/secret/tiny", "model->tiny"),
        ("@/srv/secret/tiny", "@tiny"),
        ("in ~/secret/tiny and ~ann/secret/tiny", "in tiny and tiny"),
        (r'{"path": "\/srv\/secret\/tiny"}', '{"path": "tiny"}'),
        (r"'first\n/srv/secret/tiny\n'", r"'first\ntiny\n'"),
        ("PosixPath('/srv/secret/tiny')", "PosixPath('tiny')"),
        ("the folder /srv/secret/tiny/ is empty", "the folder tiny/ is empty"),
        ("/srv/secret/a:/srv/secret/b", "b"),
        ("//srv/secret/tiny", "tiny"),
        (
            'Traceback:\n  File "/opt/secret/lib/a.py", line 3, in read\nOSError: /srv/secret/tiny',
            'Traceback:\n  File "a.py", line 3, in read\nOSError: tiny',
        ),
    ],
)
def test_no_folder_of_the_machine_is_told_however_it_is_written(said, told):
    assert errors.without_paths(said) == told
    assert "secret" not in errors.without_paths(f"{said} | {said}")


@pytest.mark.parametrize(
    "said",
    [
        "tinker://s-1:train:0/sampler_weights/a",
        "https://example.org/a/b?c=d/e#f, see http://example.org:80/x/y/z",
        "org/model/variant and 3 / 4 of and/or 5 tokens/s, 26/11/2026",
        "the stop </s> and/or <s>",
        "https://hf.co/api/models/org%2Ftiny",
        "0.5/1.0/2.0, a ratio of 1//2",
        "dtype torch.float32 (n/a)",
    ],
)
def test_what_is_no_path_of_the_machine_stays(said):
    assert errors.without_paths(said) == said


@pytest.mark.parametrize("piece", ["/", "%2F", "/a", "a/", "~", "\\/", "'/", " a", "file://"])
def test_a_text_of_any_length_is_cut(piece):
    assert len(errors.without_paths(piece * 10_000)) <= len(piece) * 10_000


@pytest.mark.parametrize(
    "piece",
    [")%2F", ")\\/", "]\\\\\\/", ") )\\/", "; (/", ":/", "a b\\/", "'\\/", "%252F%2F", "~a/\\"],
)
@pytest.mark.parametrize("start", ["/", "'/", "file:///", "\\/"])
def test_a_text_that_can_be_divided_in_many_ways_is_cut_as_soon_as_others(start, piece):
    said = start + piece * 400
    assert len(errors.without_paths(said)) <= len(said)
