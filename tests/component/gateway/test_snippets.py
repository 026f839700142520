"""The Python of README.md and docs/ runs unchanged, with fake workers.

Snippets get their page's variables (`service`, `training`, `prompt`, `data`, `client`), and real
ids for placeholders. A warning of the SDK fails the test. A whole script, with `__main__`, runs in
a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import openai
import pytest
import tinker
import wandb
from tinker import types

import tandem
from tandem.tracking.run import TrackedRun
from tests.support.gateway.running import KEY
from tests.support.gateway.speaking_models import (
    byte_tokenizer,
    speaking_gateway,
    write_speaking_model,
)

ROOT = Path(__file__).parents[3]
SNIPPETS = [
    pytest.param(snippet, id=f"{page.name}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
    if "sampler_service" not in snippet  # tests/component/sampler/test_generation.py
]


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("snippets")
    with speaking_gateway(folder, session_ttl=600) as gate:
        model = write_speaking_model(folder / "model", byte_tokenizer(), window=2**15)
        gate.run(gate.gateway.models.add(name="my/model", path=str(model)))
        yield gate


@pytest.fixture(scope="module")
def names(gate):
    """The snippets' variables."""
    with gate.service() as service:
        training = service.create_lora_training_client("my/model").result()
        training.save_weights_for_sampler("final").result()
        tokens = list(range(4))
        inputs = {
            "target_tokens": types.TensorData(data=tokens, dtype="int64", shape=[4]),
            **{
                name: types.TensorData(data=[0.5] * 4, dtype="float32", shape=[4])
                for name in ("logprobs", "advantages", "old", "mask")
            },
        }
        with gate.http() as http:
            traced = http.post("/api/tandem/v1/traces", json={"model": training.model_id})
        yield {
            "tandem": tandem,
            "trace": traced.raise_for_status().json(),
            "tinker": tinker,
            "service": service,
            "training": training,
            "policy": training,
            "step": 1,
            "mean": 0.5,
            "rewards": np.zeros(2),
            "lengths": np.ones(2),
            "client": openai.OpenAI(base_url=f"{gate.url}/v1", api_key=KEY),
            "prompt": types.ModelInput.from_ints(tokens),
            "data": [
                types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
            ],
        }
    wandb.teardown()


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_of_the_documents_runs(snippet, gate, names, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", gate.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda _text: "")  # the user presses Enter
    run_id = names["training"].model_id
    for placeholder, value in {
        "http://127.0.0.1:8000": gate.url,
        "tml-…": KEY,
        "RestClient()": f"RestClient(base_url={gate.url!r})",  # else one per process
        "s-ab12…:train:0": run_id,
        '{"model": "RUN"}': f'{{"model": "{run_id}"}}',
        "tinker://RUN/sampler_weights/NAME": f"tinker://{run_id}/sampler_weights/final",
    }.items():
        snippet = snippet.replace(placeholder, value)
    if "__main__" in snippet:
        (tmp_path / "script.py").write_text(snippet)
        command = [sys.executable, "-W", "error::FutureWarning", "script.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        found = dict(names)
        exec(compile(snippet, "snippet", "exec"), found)
    for tracked in (each for each in found.values() if isinstance(each, TrackedRun)):
        tracked.finish()
    opened = found["service"]
    if opened is not names["service"]:
        opened.close("success").result()
