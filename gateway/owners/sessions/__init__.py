"""Sessions: client connections, which own their runs and samplers.

`registry` holds active sessions, which live by heartbeats, and bounds the metadata from clients.
`queries` searches all sessions in pages with signed cursors.
"""
