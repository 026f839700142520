"""Owners: their keys, their sessions, their limits and their usage.

`auth` finds the owner and the role of a caller and audits changes. `sessions` are the connections
of clients; each owns the runs and samplers that it creates. `limits` bounds the requests and bytes
of an owner. `usage` counts what owners used and writes traces of sessions. `counted_lines` keeps
strangers from filling the log.
"""
