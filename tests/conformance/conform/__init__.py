"""The parts of the conformance suite: the SDK's surface, claims about it, and callers.

`surface` reads the installed SDK. A test declares its claims with `proves`. `claims` writes
docs/tinker-compatibility.md from both."""
