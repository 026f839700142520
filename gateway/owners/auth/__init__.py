"""Who is calling, what they may do, and what they did.

`keys` keeps the API keys; `identity` turns a key, or a token that was exchanged for one, into a
`Caller` with an owner and a role; `audit` records every request that changes something; `signing`
signs addresses and cursors. `bootstrap` is the first admin key of a gateway that others reach.
"""
