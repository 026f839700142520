"""Which worker exists on which devices, and which of them may use these now. See docs/sharing.md.

`asks` says what a session asks for, `groups` what devices there are, `room` what still fits there,
`places` who may exist where, all or nothing, and `queue` who is next. Who may have its state on a
group's devices now is decided by `leases`, in the order of `policy` and by what each has had
(`accounts`); `lease` is what a worker has of it, `lease_records` what the database knows,
`switches` puts its worker to sleep and wakes it, `memory` says where its state goes, and
`evictions` make room for one that wakes. `occupancy` shows it to callers."""
