from __future__ import annotations

from tandem.agent.metrics import AgentMetrics


def test_an_agent_at_the_last_port_has_no_metrics_and_lives(tmp_path):
    metrics = AgentMetrics(data_dir=tmp_path, logs=tmp_path, kinds=lambda: iter(()))
    assert metrics.serve_agent("127.0.0.1:65535") == 0
