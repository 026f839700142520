"""The agent: the process on a host that starts workers, so that they do not end with the gateway.

`worker_process` supervises one worker, and `launcher` starts and stops them, out of a `pool` of
processes that were started ahead; `service` takes what a gateway asks for
(`protos/tandem/v1/agent.proto`), over a Unix socket in the data directory (`address`). A
`suspender` moves workers that cannot sleep by themselves off their devices. `process_groups` are in
a file, for the agent that comes after this one. `host` describes the cores, memory and accelerators
of a host; `process_birth` tells processes with one number apart; `environment` lists the variables
that workers inherit; a `supervised_process` is the agent or the gateway of a stack.

The stack runs one beside its gateway; by hand it is `tandem agent`. It imports neither torch nor
vLLM nor a web framework, and holds every worker's lifeline: whatever ends it ends its workers.
"""

SENTENCE = "tandem agent: "
"""Begins the line of standard error with which an agent says why it does not start."""
