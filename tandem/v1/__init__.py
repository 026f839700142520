"""Stubs of the gRPC services between the gateway and its workers (made by scripts/protos.sh)."""
