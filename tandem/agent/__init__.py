"""The agent: the process on a host that starts workers, so that they do not end with the gateway.

`worker_process` supervises one worker, `launcher` starts and stops them, `service` says over a Unix
socket in the data directory (`protos/tandem/v1/agent.proto`) what a gateway asks for.

The stack runs one beside its gateway; by hand it is `tandem agent`. It imports neither torch nor
vLLM nor a web framework, and holds every worker's lifeline: whatever ends it ends its workers.
"""

SENTENCE = "tandem agent: "
"""Begins the line of standard error with which an agent says why it does not start."""
