#!/usr/bin/env bash
# Regenerates the stubs in tandem/v1 and tandem/wire/v1 from protos/. The result is committed.
# The compiler is older than the locked runtimes (protobuf 6.33 with CUDA vLLM, 7.36 with the CPU
# build), because code of a newer compiler would refuse to load.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.venv/protos
if [ ! -x "$tools/bin/python" ]; then
  .venv/bin/python -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet grpcio-tools==1.76.0 "mypy-protobuf<4" "setuptools<81"
fi
PATH="$PWD/$tools/bin:$PATH" "$tools/bin/python" -m grpc_tools.protoc -I protos \
  --python_out=. --mypy_out=quiet:. --grpc_python_out=. --mypy_grpc_out=quiet:. \
  protos/tandem/v1/common.proto protos/tandem/v1/trainer.proto protos/tandem/v1/sampler.proto \
  protos/tandem/v1/agent.proto
PATH="$PWD/$tools/bin:$PATH" "$tools/bin/python" -m grpc_tools.protoc -I protos \
  --python_out=. --mypy_out=quiet:. protos/tandem/wire/v1/tinker.proto
rm -f tandem/v1/common_pb2_grpc.py tandem/v1/common_pb2_grpc.pyi  # it has no service
