"""Sends requests through tinker-cookbook's capture proxy.

The argument is the model. Each input line is `[path, body]`, each output line `[status, answer]`.
"""

from __future__ import annotations

import asyncio
import json
import sys

import tinker
from aiohttp.test_utils import TestClient, TestServer
from tinker_cookbook.capture.proxy.app import ProxyDeps, make_app
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer


async def answer(app, lines) -> None:
    async with TestClient(TestServer(app)) as client:
        for line in lines:
            path, body = json.loads(line)
            response = await client.post(path, json=body)
            print(json.dumps([response.status, await response.json()]), flush=True)


def main(model: str) -> None:
    service = tinker.ServiceClient()
    deps = ProxyDeps(
        renderer=get_renderer("role_colon", get_tokenizer(model)),
        sampling_client=service.create_sampling_client(base_model=model).result(),
        model_label=model,
        default_max_tokens=8,
    )
    asyncio.run(answer(make_app(deps), sys.stdin))


if __name__ == "__main__":
    main(sys.argv[1])
