"""Launchers start and stop workers and report exits.

`base` defines the interface. `agent` uses an agent (`tandem.agent`), and `kubernetes` a cluster's
API server. A group names the launcher of each kind of its workers. To add a launcher, implement
`base.Launcher` in its own module and name it in `make_launchers` for `TANDEM_LAUNCHER`."""

from __future__ import annotations

from collections.abc import Callable

from gateway.workers.epoch import Epoch
from gateway.workers.launchers.agent import AgentLauncher
from gateway.workers.launchers.base import Launcher, Launchers, for_each_kind
from tandem.errors import InvalidRequest
from tandem.protocol.authority import Authority
from tandem.protocol.worker import WORKER_STOP_TIMEOUT
from tandem.settings.gateway import GatewaySettings

__all__ = ["Launcher", "Launchers", "for_each_kind", "load_launcher", "make_launchers"]

_CALL_SECONDS = 60.0
"""Seconds for a call to the agent, beyond a worker's start or stop time."""


def load_launcher(settings: GatewaySettings) -> None:
    """Import the launcher's packages before the gateway leads, because slow imports would delay its
    beats. Check the templates, so that a gateway with bad ones replaces no other gateway. Raises
    `InvalidRequest` for a missing package or bad templates."""
    if settings.launcher == "kubernetes":
        _kubernetes()
        from gateway.workers.launchers.kubernetes.home import Home
        from gateway.workers.launchers.kubernetes.objects import check_templates
        from gateway.workers.launchers.kubernetes.templates import read_templates

        cluster = settings.kubernetes
        home = Home(settings=cluster, namespace="", volume=settings.data_dir, epoch=0)
        check_templates(read_templates(cluster), pools=settings.claim_pools, home=home)


def make_launchers(settings: GatewaySettings, epoch: Epoch) -> Launchers:
    """Return the launchers in the settings. Raises `InvalidRequest` for an unknown name."""
    match settings.launcher:
        case "agent":
            return _agents(settings, epoch)
        case "kubernetes":
            return for_each_kind(_kubernetes()(settings, epoch))
        case unknown:
            raise InvalidRequest(f"unknown TANDEM_LAUNCHER {unknown!r}; known: agent, kubernetes")


def _kubernetes() -> Callable[[GatewaySettings, Epoch], Launcher]:
    try:
        from gateway.workers.launchers.kubernetes.launcher import kubernetes_launcher
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"TANDEM_LAUNCHER=kubernetes needs the package {error.name}: install tandem[kubernetes]"
        ) from error
    return kubernetes_launcher


def _agents(settings: GatewaySettings, epoch: Epoch) -> Launchers:
    def launcher(address: str = "", authority: Authority | None = None) -> AgentLauncher:
        return AgentLauncher(
            data_dir=settings.data_dir,
            timeout=settings.worker_start_timeout + WORKER_STOP_TIMEOUT + _CALL_SECONDS,
            epoch=epoch,
            address=address,
            authority=authority,
        )

    if not settings.agents:
        return for_each_kind(launcher())
    if missing := {"trainer", "sampler"}.difference(settings.agents):
        raise InvalidRequest(f"TANDEM_AGENTS names no agent for {missing.pop()}s")
    if settings.tls_dir is None:
        raise InvalidRequest(
            "TANDEM_AGENTS needs TANDEM_TLS_DIR, the certificate authority that gateway and agents "
            "share; `tandem tls create` makes one"
        )
    authority = Authority.read(settings.tls_dir)
    by_address = {each: launcher(each, authority) for each in set(settings.agents.values())}
    trainers, samplers = (by_address[settings.agents[kind]] for kind in ("trainer", "sampler"))
    return {"trainer": trainers, "sampler": samplers, "job": trainers}
