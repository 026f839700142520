"""Owners, with their keys, sessions, limits and usage.

`auth` finds a caller's owner and role and audits changes. `sessions` are client connections, which
own runs and samplers. `limits` bounds an owner's requests and bytes. `usage` meters owners and
traces sessions. `counted_lines` keeps refused requests from filling the log. A new limit starts in
`limits`, a new kind of usage in `usage/meter.py`.
"""
