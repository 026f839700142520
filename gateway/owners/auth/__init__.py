"""Authentication, access rights and the audit log.

`keys` stores API keys. `identity` turns a key or token into a `Caller` with owner and role. `audit`
records every changing request. `oidc` asks a provider who a person is, and `grants` gives the
person a key. `signing` signs addresses and cursors. `bootstrap` reads the first admin key from a
file."""
