"""Everything public has a claim, and the document lists all claims."""

from __future__ import annotations

import os

import pytest
import tinker

from gateway.api.tinker.service import TESTED
from tests.conformance.conform.claims import PATH, all_claims, render
from tests.conformance.conform.surface import NEWEST, OLDEST, commands, public_methods, surface

another_sdk = pytest.mark.skipif(
    "TANDEM_TEST_SDK" in os.environ, reason="about the newest SDK's surface"
)


@pytest.mark.core
def test_the_sdk_is_one_of_those_we_claim() -> None:
    oldest, version, newest = (
        tuple(int(part) for part in each.split("."))
        for each in (OLDEST, tinker.__version__, NEWEST)
    )
    assert oldest <= version <= newest


@another_sdk
def test_every_public_method_and_command_has_a_claim() -> None:
    claimed = {claim.subject for claim in all_claims()}
    assert not sorted(surface() - claimed)


@another_sdk
def test_every_claim_is_about_something_that_exists() -> None:
    claimed = {claim.subject for claim in all_claims()}
    assert not sorted(claimed - surface())


@another_sdk
def test_the_surface_is_the_one_that_was_counted() -> None:
    """Notices classes and commands that introspection misses."""
    methods = [method.path for method in public_methods()]
    assert len([path for path in methods if not path.startswith("AdminClient")]) == 100
    assert len([path for path in methods if path.startswith("AdminClient")]) == 7
    assert len(commands()) == 19


@another_sdk
@pytest.mark.last
def test_every_claimed_method_was_called(whole_suite: bool, called: set[str]) -> None:
    if not whole_suite:
        pytest.skip("only a run of the whole suite can tell")
    methods = {method.path for method in public_methods()}
    assert not sorted(methods - called)


@another_sdk
@pytest.mark.last
def test_the_document_says_what_is_proved(whole_suite: bool, failed: list[str]) -> None:
    """A whole, passing run rewrites it."""
    text = render(methods=public_methods(), commands=commands(), claims=all_claims())
    before = PATH.read_text() if PATH.exists() else ""
    if whole_suite and not failed:
        PATH.write_text(text)
    assert before == text, f"{PATH.name} was not current; a whole passing run writes it"


def test_the_gateway_knows_the_oldest_release_that_is_tested() -> None:
    oldest = tuple(int(part) for part in OLDEST.split(".")[:2])
    assert oldest == TESTED
