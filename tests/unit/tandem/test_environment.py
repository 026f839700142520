"""The environment variables that an agent and its workers inherit."""

from __future__ import annotations

import pytest

from tandem.agent.environment import inherited

SECRETS = """
DATABASE_URL TANDEM_DATABASE_URL TANDEM_DATABASE_URL_FILE PGPASSWORD REDIS_URL AMQP_URL MONGO_URI
GITHUB_PAT GITHUB_TOKEN GH_PAT NPM_AUTH SLACK_WEBHOOK AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID
AWS_SESSION_TOKEN OPENAI_API_KEY TINKER_API_KEY TANDEM_API_KEY TANDEM_BOOTSTRAP_KEY
TANDEM_BOOTSTRAP_KEY_FILE HF_TOKEN HF_TOKEN_PATH HUGGING_FACE_HUB_TOKEN HUGGINGFACE_TOKEN
VLLM_API_KEY
GOOGLE_APPLICATION_CREDENTIALS DB_PASSWORD MYSQL_PWD SENTRY_DSN http_proxy HTTPS_PROXY ALL_PROXY
SSH_AUTH_SOCK KUBECONFIG DOCKER_AUTH_CONFIG PIP_INDEX_URL COOKIE PASSWORD VLLM_PAT HF_HUB_AUTH
TANDEM_STORE_PASS TANDEM_REPORTS_DSN
"""
KEPT = """
PATH HOME USER TMPDIR TZ LANG LC_ALL LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH PYTHONUNBUFFERED
VIRTUAL_ENV CUDA_VISIBLE_DEVICES CUDA_HOME NVIDIA_VISIBLE_DEVICES NCCL_DEBUG NCCL_SOCKET_IFNAME
GLOO_SOCKET_IFNAME OMP_NUM_THREADS MKL_NUM_THREADS KMP_AFFINITY HF_HOME HF_HUB_OFFLINE
TRANSFORMERS_OFFLINE TORCH_HOME TORCHINDUCTOR_CACHE_DIR TORCHDYNAMO_DISABLE
PYTORCH_CUDA_ALLOC_CONF TRITON_CACHE_DIR VLLM_LOGGING_LEVEL TOKENIZERS_PARALLELISM GRPC_VERBOSITY
CC TANDEM_TRAINER_RANKS TANDEM_POOL_PROCESSES TANDEM_IMAGE_VERSION TANDEM_NODE_RANK
XDG_CACHE_HOME
"""


@pytest.mark.parametrize("name", [*SECRETS.split(), *SECRETS.lower().split()])
def test_a_worker_inherits_nothing_that_may_be_a_secret(name):
    assert inherited({name: "x"}) == {}


@pytest.mark.parametrize("name", KEPT.split())
def test_a_worker_inherits_what_it_needs(name):
    assert inherited({name: "x"}) == {name: "x"}


@pytest.mark.parametrize("name", ["HF_ENDPOINT", "TANDEM_PUBLIC_URL", "VLLM_MODEL_REDIRECT_PATH"])
def test_a_worker_inherits_no_address_with_a_password(name):
    assert inherited({name: "https://ann:secret@hub.example.org/models"}) == {}
    plain = {name: "https://hub.example.org:8080/models@main"}
    assert inherited(plain) == plain


def test_a_worker_inherits_nothing_that_nobody_has_thought_of():
    assert inherited({"SOMETHING_ELSE": "x", "PATHS": "x", "MYHOME": "x"}) == {}
