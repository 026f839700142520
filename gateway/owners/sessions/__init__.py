"""Sessions: one client's connection each, which owns the runs and samplers that it creates.

`registry` knows the active sessions, which stay alive while heartbeats arrive, and bounds the
metadata that clients attach to sessions, runs and checkpoints; `queries` looks through all
sessions that there ever were, in pages with signed cursors.
"""
