"""Sessions: one client's connection each, which owns the runs and samplers that it creates.

`registry` knows the active sessions, which stay alive while heartbeats arrive; `search` looks
through all that there ever were, in pages with signed cursors; `metadata` bounds what clients
attach to sessions, runs and checkpoints.
"""
