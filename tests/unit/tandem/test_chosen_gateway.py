"""Which gateway a command asks, with which key, and what it says if that fails."""

from __future__ import annotations

import httpx
import pytest
from typer.testing import CliRunner

from tandem.cli import context
from tandem.cli.context import ChosenGateway, chosen_gateway, explained, note_url, read_answer
from tandem.cli.main import app
from tandem.errors import ServerError, Unauthenticated, UserError
from tandem.stack import Endpoint

HERE, THERE, OTHER = "http://127.0.0.1:8000", "https://tandem.example.org", "http://other:1"
LOCAL_KEY, KEY = "tml-local", "tml-ann"


@pytest.fixture(autouse=True)
def running_here(monkeypatch):
    endpoint = Endpoint(url=HERE, pid=1, api_key=LOCAL_KEY)
    monkeypatch.setattr(context, "read_endpoint", lambda _folder: endpoint)
    for name in (context.URL_VARIABLE, context.KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    note_url(None, anew=True)


@pytest.mark.parametrize(
    ("option", "folder", "variable", "key", "expected"),
    [
        ("", False, "", "", ChosenGateway(HERE, LOCAL_KEY)),
        ("", False, "", KEY, ChosenGateway(HERE, KEY)),
        ("", True, "", KEY, ChosenGateway(HERE, KEY)),
        ("", False, THERE, KEY, ChosenGateway(THERE, KEY, remote=True)),
        (f"{THERE}/", False, OTHER, KEY, ChosenGateway(THERE, KEY, remote=True)),
        ("", True, THERE, KEY, ChosenGateway(HERE, LOCAL_KEY)),
    ],
    ids=[
        "this machine's",
        "this machine's, as the key",
        "--data-dir, as the key",
        "the variable",
        "--url before the variable",
        "--data-dir before the variable and its key",
    ],
)
def test_a_command_asks_the_gateway_that_is_named_nearest(
    monkeypatch, tmp_path, option, folder, variable, key, expected
):
    monkeypatch.setenv(context.URL_VARIABLE, variable)
    monkeypatch.setenv(context.KEY_VARIABLE, key)
    note_url(option)
    assert chosen_gateway(tmp_path if folder else None) == expected


@pytest.mark.parametrize(
    "arguments",
    [("--url", THERE, "runs", "list"), ("runs", "list", "--url", THERE)],
    ids=["before the command", "after it"],
)
def test_a_url_may_be_before_and_after_a_command_and_counts_once(monkeypatch, arguments):
    asked = []
    monkeypatch.setattr(
        context, "chosen_gateway", lambda folder: asked.append(context.remote_url(folder)) or None
    )
    for words in (arguments, ("runs", "list")):
        CliRunner().invoke(app, list(words))
    assert asked == [THERE, ""]


def test_a_url_with_a_password_is_refused_without_repeating_it():
    note_url("https://ann:secret@tandem.example.org")
    with pytest.raises(UserError, match="TINKER_API_KEY") as refused:
        context.remote_url(None)
    assert "secret" not in refused.value.message


def test_printed_sentences_cannot_move_the_cursor(capsys):
    context.say("a\x1b[31mb\nc")
    context.fail("\x1b]0;title")
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "b\nc" in out


@pytest.mark.parametrize("url", ["tandem.example.org", "ftp://x", "http://", "http://a:b:c"])
def test_a_malformed_url_is_refused_with_an_example(url):
    note_url(url)
    with pytest.raises(UserError, match=r"--url is .* not a URL such as https://"):
        chosen_gateway(None)


def test_a_url_needs_a_key_and_no_data_dir(tmp_path):
    note_url(THERE)
    with pytest.raises(UserError, match=f"commands to {THERE} act as TINKER_API_KEY"):
        chosen_gateway(None)
    with pytest.raises(UserError, match="give one of them"):
        chosen_gateway(tmp_path)


@pytest.mark.parametrize("command", [("backup", "x"), ("doctor",), ("keys", "list", "--offline")])
def test_a_command_on_this_machine_s_files_refuses_a_url_and_ignores_the_variable(
    monkeypatch, command
):
    monkeypatch.setattr("tandem.cli.keys.run_offline", lambda *_: {"keys": []})
    refused = CliRunner().invoke(app, ["--url", THERE, *command])
    assert "on the machine of the gateway only" in str(refused.exception)
    monkeypatch.setenv(context.URL_VARIABLE, THERE)
    if command[0] == "keys":
        assert CliRunner().invoke(app, list(command)).exit_code == 0


def test_models_are_downloaded_to_the_gateway_s_machine_only(monkeypatch):
    downloaded = []
    monkeypatch.setattr("tandem.cli.models._download", lambda name, *_: downloaded.append(name))
    for url in (THERE, HERE):
        monkeypatch.setenv(context.URL_VARIABLE, url)
        done = CliRunner().invoke(app, ["models", "add", "org/name"])
        assert (done.exception is None) == (url == HERE)
    assert downloaded == ["org/name"]


def test_a_key_is_not_shown():
    assert KEY not in repr(ChosenGateway(THERE, KEY))


WRONG_KEY = httpx.Response(401, json={"error": {"message": "no", "code": "invalid_api_key"}})
ANSWERS = {
    "another server": (httpx.Response(404, json={"detail": "x"}), ServerError, "status 404"),
    "a redirect": (
        httpx.Response(301, headers={"location": f"{THERE}/x"}),
        ServerError,
        f"redirects to {THERE}/x",
    ),
    "a wrong key for the OpenAI routes": (
        WRONG_KEY,
        Unauthenticated,
        "refuses TINKER_API_KEY: no; set it to a key of this gateway",
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_that_is_no_result_becomes_one_sentence(monkeypatch, case):
    answer, kind, sentence = ANSWERS[case]
    monkeypatch.setenv(context.KEY_VARIABLE, KEY)
    with pytest.raises(kind, match=sentence) as caught:
        read_answer(ChosenGateway(OTHER, KEY, remote=True), answer)
    assert "\n" not in caught.value.message and KEY not in caught.value.message


def test_the_local_administrator_is_offered_to_a_wrong_key_on_this_machine(monkeypatch):
    monkeypatch.setenv(context.KEY_VARIABLE, KEY)
    with pytest.raises(Unauthenticated, match="or unset it to act as the local administrator"):
        read_answer(ChosenGateway(HERE, KEY), WRONG_KEY)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (ChosenGateway(THERE, KEY, remote=True), "check the URL"),
        (ChosenGateway(HERE, KEY, remote=True), "--data-dir DIRECTORY"),
        (ChosenGateway(HERE, KEY), "`tandem logs gateway` may show why"),
    ],
)
def test_a_gateway_that_cannot_be_reached_becomes_one_sentence(target, sentence):
    with pytest.raises(ServerError, match=sentence), explained(target):
        raise httpx.ReadTimeout("slow")
