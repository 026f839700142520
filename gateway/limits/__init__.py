"""What an owner may have and use. `quotas` has all limits; a `ledger` counts what an owner holds
of one that passes by waiting.

To add a limit: a field of `tandem.settings.LimitSettings`; then, for things that an owner keeps,
a call of `Quotas.check` where they are created and a line in `quotas._FREE`, or else a ledger in
`Quotas` and a reservation where the amount is taken.
"""
