"""Sessions: client connections, which own their runs and samplers.

`registry` holds active sessions, which live by heartbeats. `queries` searches all sessions."""
