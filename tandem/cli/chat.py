"""`tandem chat`: talk to a base model, a checkpoint or a run's newest weights."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from tandem.cli.context import (
    ChosenGateway,
    DataDir,
    JsonFlag,
    call,
    chosen_gateway,
    err,
    explained,
    fail,
    print_json,
    read_answer,
    say,
    say_aside,
    shown,
)
from tandem.cli.run_names import run_id
from tandem.errors import ServerError, TandemError, UnknownModel, UnknownRun, UserError, describe
from tandem.settings.chosen_names import is_run_id

_OPENAI_API = "v1"
_ANSWER_SECONDS = 1900.0
"""The gateway ends a request earlier (TANDEM_OPERATION_TIMEOUT)."""
_PATIENT_SECONDS = 3.0
_PATIENT_SENTENCE = "(waiting: an engine may have to start, see `tandem status`)"
_STARTING, _RETRY_SECONDS, _MOST_RETRIES = 503, 5.0, 60
_PROMPT = "> "


@dataclass
class _Talk:
    """A conversation with one model. `heading` is shown beside another model's answer."""

    model: str
    heading: str
    options: dict[str, object]
    messages: list[dict[str, str]] = field(default_factory=list)


def chat(
    model: Annotated[
        str,
        typer.Argument(
            help="A base model, tinker://RUN/sampler_weights/NAME, or a run (id or name) for its "
            "newest weights for sampling."
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(help="One message. Default: a conversation, or a pipe's text."),
    ] = None,
    compare: Annotated[
        str, typer.Option("--compare", metavar="MODEL", help="Ask a second model the same.")
    ] = "",
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 for the likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    complete: Annotated[
        bool,
        typer.Option("--complete", help="Continue the text, for a model without chat template."),
    ] = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Talk to a model. Answers appear as they are sampled.

    Ctrl-C stops an answer, Ctrl-D ends, and a line `/new` begins again.

    Example: tandem chat my-run "What is 2 + 3?" --compare Qwen/Qwen3-0.6B"""
    target = chosen_gateway(data_dir)
    given: dict[str, object] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
    }
    options = {name: value for name, value in given.items() if value is not None}
    first = [{"role": "system", "content": system}] if system else []
    names = [name for name in (model, compare) if name]
    talks = [
        _Talk(_model(data_dir, name), name if compare else "", options, list(first))
        for name in names
    ]
    if prompt is None and (as_json or not _is_conversation()):
        prompt = sys.stdin.read()
    if prompt is not None:
        if not prompt.strip():
            raise UserError("the prompt is empty; give one as an argument or through a pipe")
        answers = [_ask(target, talk, prompt, complete=complete, quiet=as_json) for talk in talks]
        if as_json:
            print_json({"answers": answers})
        return
    while (line := _read_line()) is not None:
        if line == "/new":
            for talk in talks:
                talk.messages = list(first)
        elif line:
            _converse(target, talks, line, complete=complete)


def _converse(target: ChosenGateway, talks: list[_Talk], line: str, *, complete: bool) -> None:
    for talk in talks:
        try:
            _ask(target, talk, line, complete=complete)
        except KeyboardInterrupt:
            say("\n(stopped)")
        except TandemError as error:
            fail(describe(error))


def _is_conversation() -> bool:
    return sys.stdin.isatty()


def _read_line() -> str | None:
    """Return a line of the user, None at the end."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history
    try:
        return input(_PROMPT).strip()
    except (EOFError, KeyboardInterrupt):
        say("")
        return None


def _model(data_dir: Path | None, given: str) -> str:
    """Return the name for the OpenAI route: a base model's, a checkpoint's path or a run's id."""
    if "://" in given or is_run_id(given):
        return given
    known = [model["id"] for model in call(data_dir, "GET", "models", api=_OPENAI_API)["data"]]
    if given in known:
        return given
    try:
        return run_id(data_dir, given)
    except UnknownRun as error:
        names = [name for name in known if "://" not in name]
        raise UnknownModel(
            f"no base model or run is called {given!r}; base models: {', '.join(names) or 'none'}; "
            "`tandem runs list` shows the runs"
        ) from error


def _ask(
    target: ChosenGateway, talk: _Talk, text: str, *, complete: bool, quiet: bool = False
) -> dict[str, object]:
    """Print the answer while it comes, and add it to the conversation. Return it."""
    asked = [*talk.messages, {"role": "user", "content": text}]
    body: dict[str, object] = {"model": talk.model, "stream": True, **talk.options}
    body |= {"prompt": text} if complete else {"messages": asked}
    path = "completions" if complete else "chat/completions"
    if talk.heading and not quiet:
        say(f"── {talk.heading} ──")
    answer = finish = version = ""
    for part in _parts(target, path, body):
        version = part.get("tandem_weight_version") or version
        for choice in part["choices"]:
            piece = choice["text"] if complete else _said(choice["delta"])
            finish = choice["finish_reason"] or finish
            answer += piece
            if not quiet:
                sys.stdout.write(shown(piece))
                sys.stdout.flush()
    if not complete:
        talk.messages = [*asked, {"role": "assistant", "content": answer}]
    if not quiet:
        say("" if finish != "length" else "…\n(cut: --max-tokens or the model's context)")
    about = {"finish_reason": finish, "weight_version": version}
    return {"model": talk.model, "text": answer, **about}


def _said(delta: dict[str, Any]) -> str:
    return f"{delta.get('reasoning_content') or ''}{delta.get('content') or ''}"


def _parts(target: ChosenGateway, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of an answer. A starting engine is waited for. Raises the gateway's error."""
    with explained(target), target.client(timeout=_ANSWER_SECONDS) as client:
        for _ in range(_MOST_RETRIES):
            notice = threading.Timer(_PATIENT_SECONDS, say_aside, [_PATIENT_SENTENCE])
            notice.daemon = True
            if err.is_terminal:
                notice.start()
            try:
                with client.stream("POST", f"{_OPENAI_API}/{path}", json=body) as answer:
                    if answer.is_success:
                        for part in _events(answer.iter_lines()):
                            notice.cancel()
                            yield part
                        return
                    answer.read()
                    read_answer(target, answer)
            except TandemError as error:
                if answer.status_code != _STARTING:
                    raise
                why = error.message
            finally:
                notice.cancel()
            say_aside(f"{why} (trying again)")
            time.sleep(_RETRY_SECONDS)
        raise ServerError(f"no engine started for {body['model']}: {why}")


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        part = orjson.loads(line.removeprefix("data: "))
        if "error" in part:
            raise ServerError(f"the answer broke off: {part['error']['message']}")
        yield part
