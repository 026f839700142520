"""What the conformance suite is made of: the SDK's surface, claims about it, callers.

The surface is read from the installed SDK; a test declares with `proves` what it asserts of
which methods; `claims` writes docs/tinker-compatibility.md from the two.
"""
