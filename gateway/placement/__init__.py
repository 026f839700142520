"""Which worker exists on which devices, and which of them may use these now. See docs/sharing.md.

`asks` says what a session asks for, `groups` what devices there are, `places` who may exist where,
all or nothing, and `leases` who may have its state on a group's devices now.
"""
