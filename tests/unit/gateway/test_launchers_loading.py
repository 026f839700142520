from __future__ import annotations

import kubernetes.aio.client  # noqa: F401 - imported before the guard: it binds a port
import pytest

from gateway.app import create_app
from gateway.workers.launchers import load_launcher
from tandem.errors import InvalidRequest
from tandem.settings.cluster import KubernetesSettings
from tandem.settings.gateway import GatewaySettings


def a_gateway(tmp_path, template: str) -> GatewaySettings:
    (tmp_path / "trainer-pod.yaml").write_text(template)
    return GatewaySettings(
        data_dir=tmp_path / "data",
        launcher="kubernetes",
        database_url="postgresql://nowhere.invalid/none",
        claim_pools=[{"name": "cpu", "roles": ["trainer", "sampler"]}],
        kubernetes=KubernetesSettings(templates=tmp_path, trainer_image="t", sampler_image="s"),
    )


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("kind: Service", "a template is a Pod of v1"),
        ("apiVersion: v1\nkind: Pod\nspec: {restartPolicy: Always}", "the gateway sets it"),
    ],
)
async def test_a_standby_with_templates_of_which_no_pod_could_be_made_does_not_start(
    tmp_path, template, fault
):
    app = create_app(a_gateway(tmp_path, template))
    with pytest.raises(InvalidRequest, match=fault):
        async with app.router.lifespan_context(app):
            pass
    assert not (tmp_path / "data").exists()


def test_a_launcher_that_can_be_made_is_loaded(tmp_path):
    load_launcher(a_gateway(tmp_path, "apiVersion: v1\nkind: Pod\nspec: {}"))
    load_launcher(GatewaySettings(data_dir=tmp_path))
