"""Signing in at a provider of another site, in a real browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect, sync_playwright

from tandem.settings.oidc import OidcSettings
from tests.support.browser import CHROMIUM
from tests.support.gateway.running import running_gateway
from tests.support.oidc import running_provider

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed"),
]


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without scripts"])
def test_the_way_back_from_another_site_ends_signed_in(tmp_path, scripts):
    with running_provider() as provider, sync_playwright() as playwright:
        provider.know("ann-1", email="ann@example.com", email_verified=True)
        provider.know("eve-1", email="eve@evil.org", email_verified=True)
        rules = {"@example.com": {"role": "member"}}
        secret = tmp_path / "secret"
        secret.write_text("client-secret-of-a-test")
        chosen = OidcSettings(
            issuer=provider.url, client_id="tandem", client_secret_file=secret, rules=rules
        )
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with running_gateway(tmp_path, oidc=chosen) as gate:
            assert "127.0.0.1" in gate.url, "the provider's localhost is another site"
            context = chromium.new_context(java_script_enabled=scripts)
            page = context.new_page()
            page.goto(f"{gate.url}/devices")
            page.get_by_role("link", name="Sign in at localhost").click()
            page.get_by_placeholder("sub").fill("eve-1")
            page.get_by_role("button", name="Authorize").click()
            expect(page.get_by_role("alert")).to_contain_text("No rule lets eve@evil.org sign in")
            expect(page.get_by_label("API key")).to_be_visible()

            page.get_by_role("link", name="Sign in at localhost").click()
            page.get_by_placeholder("sub").fill("ann-1")
            page.get_by_role("button", name="Authorize").click()
            expect(page).to_have_url(f"{gate.url}/devices")
            expect(page.get_by_role("heading", name="Devices").first).to_be_visible()
            cookies = {each["name"]: each["sameSite"] for each in context.cookies(gate.url)}
            assert set(cookies.values()) == {"Strict"}, cookies
            page.go_back()
            page.goto(f"{gate.url}/")
            expect(page.get_by_text("ann@example.com").first).to_be_visible()
        chromium.close()
