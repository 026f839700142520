"""Owners, with their keys, sessions, limits and usage.

`auth` finds a caller's owner and role and audits changes. `sessions` are client connections, which
own runs and samplers. `limits` bounds requests and bytes, and `budgets` has the limits of single
owners. `usage` meters owners and traces sessions. `counted_lines` limits log lines. A new limit
starts in `limits`, a new kind of usage in `usage/meter.py`."""
