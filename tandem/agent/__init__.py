"""The agent: the process on a host that starts workers and outlives the gateway.

- `service`: the gRPC service (`protos/tandem/v1/agent.proto`), on a Unix socket in the data
  directory (`address`) or for other hosts.
- `launcher`: starts and stops workers, partly from a `pool` of processes started in advance.
  `worker_process` supervises one.
- `suspender`: moves workers that cannot sleep off their devices.
- `process_groups`: lists the workers' process groups in a file, for the next agent.
  `process_identity` distinguishes processes of one number. `scratch` removes temporary files.
- `preflight`: checks whether a job could start here, before it gets devices.
- `host`: describes cores, memory and accelerators. `environment`: the variables that workers
  inherit.
- `metrics`: the agent's metrics, and the ports of its workers' metrics.
- `exits`: why a process ended. `check`: a container's health check.

A stack runs an agent beside its gateway. `tandem agent` starts one by hand. The agent imports no
torch, vLLM or web framework. It holds every worker's lifeline, so its end ends its workers. To add
a call, extend the proto file, `AgentServicer` and `ProcessLauncher`."""

SENTENCE = "tandem agent: "
"""Begins the line of standard error with which an agent explains a failed start."""
