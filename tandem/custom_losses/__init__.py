"""Custom losses: functions of one datum that a client traced with torch.fx and sent as data.

- `operations`: the allowed operations by name.
- `graph`: reads the client's JSON into a checked `Graph`.
- `interpreter`: computes a graph on tensors, with the functions of `implementations`.
- `process`: runs the interpreter with bounded memory and time.

To allow an operation, add its name to `operations`, and an implementation if calling torch is not
enough. The first two need no torch, so the gateway can refuse a loss at once. The trainer reads the
graph again, because it trusts no outside bytes."""

from tandem.custom_losses.graph import MAX_BYTES, Graph, read_custom_loss

__all__ = ["MAX_BYTES", "Graph", "read_custom_loss"]
