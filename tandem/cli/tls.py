"""`tandem tls`: the certificate authority for gateway and agents on several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.context import JsonFlag, end_if_json, new_commands, say
from tandem.protocol.certificate import AGENT_NAME

app = new_commands("Make certificates for agents of other hosts.")


@app.command("create", here=True)
def create(
    folder: Annotated[Path, typer.Argument(help="Made; what TANDEM_TLS_DIR of the gateway names.")],
    as_json: JsonFlag = False,
) -> None:
    """Make a certificate authority.

    It writes tls.crt and tls.key. Keep tls.key secret.

    Example: tandem tls create /etc/tandem/authority"""
    from tandem.protocol.authority import Authority

    Authority.create(folder)
    end_if_json(as_json, {"authority": str(folder)})
    say(f"The authority is in {folder}; keep tls.key secret, and start the gateway with")
    say(f"  TANDEM_TLS_DIR={folder}")


@app.command("issue", here=True)
def issue(
    authority: Annotated[Path, typer.Argument(help="The folder of `tandem tls create`.")],
    folder: Annotated[Path, typer.Argument(help="Made; what an agent's --tls names.")],
    as_json: JsonFlag = False,
) -> None:
    """Make a certificate for agents.

    It writes tls.crt, tls.key and ca.crt. Several agents may share one certificate.

    Example: tandem tls issue /etc/tandem/authority ./agent-tls"""
    from tandem.protocol.authority import Authority, write_certificate

    write_certificate(folder, Authority.read(authority).issue(AGENT_NAME))
    end_if_json(as_json, {"certificate": str(folder)})
    say(f"The certificate is in {folder}; start an agent with")
    say(f"  tandem agent --listen HOST:PORT --tls {folder}")
