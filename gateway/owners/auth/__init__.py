"""Authentication, access rights and the audit log.

`keys` stores API keys. `identity` turns a key or token into a `Caller` with owner and role. `audit`
records every changing request. `signing` signs addresses and cursors. `bootstrap` reads the first
admin key from a file."""
