from __future__ import annotations

import base64
import io
from collections.abc import Iterable


class SecretFound(AssertionError):
    pass


class Watch:
    """A log stream that keeps only the lines since the last `check`."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self._forms: set[str] = set()
        self.lines = 0

    def write(self, text: str) -> int:
        self._text.write(text)
        return len(text)

    def flush(self) -> None:
        return

    def know(self, secret: str | bytes) -> None:
        """Add a secret in every printable form."""
        if isinstance(secret, str):
            self._forms.add(secret)
            secret = secret.encode()
        plain = base64.b64encode(secret).decode().rstrip("=")
        url = base64.urlsafe_b64encode(secret).decode().rstrip("=")
        self._forms |= {secret.hex(), plain, url, repr(secret)[2:-1]}

    def check(self) -> None:
        text = self._text.getvalue()
        self.lines += text.count("\n")
        self._text = io.StringIO()
        self.check_text("a log line", [text])

    def check_text(self, what: str, texts: Iterable[str]) -> None:
        for text in texts:
            for form in self._forms:
                at = text.find(form)
                if at >= 0:
                    raise SecretFound(f"{what} names a secret: …{text[max(0, at - 200) : at]}[…]")
