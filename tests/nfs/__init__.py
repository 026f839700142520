"""Weight versions on NFS, between emulated machines, `make test-nfs`.

- `machines`: a server and clients in qemu, with Debian's kernel. A kill of the server is a power
  failure: its disk has only synced writes.
- `client`: the program of both clients. It calls the product's functions.
- `__main__`: the rounds, the power failures, and the result in `benchmarks/results`.

It needs Debian with the packages `qemu-system-x86`, `kmod` and `e2fsprogs`, but no root and no KVM.

`tests/golden/nfs-trace.jsonl.gz` is the trace of `make test-nfs ARGS="--rounds 30 --runs 3
--restart-every 15 --trace FILE"`. A unit test replays it on the simulated disk. To trace another
operation, let `client` call it, and record the trace anew."""
