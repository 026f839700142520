"""Custom losses: functions of one datum that a client traced with torch.fx and sent as data.

`operations` lists by name what a loss may use, `graph` reads the client's JSON into a checked
`Graph`, `interpreter` computes a graph on tensors with the functions of `implementations`, in a
`process` with bounded memory and time. To allow another operation, add its name to `operations`,
and an implementation if calling torch is not enough.

The first two need no torch: the gateway refuses a loss when it is created. The trainer reads the
graph again, since it trusts no bytes from outside, and computes it.
"""

from tandem.custom_losses.graph import MAX_BYTES, Graph, read_custom_loss

__all__ = ["MAX_BYTES", "Graph", "read_custom_loss"]
