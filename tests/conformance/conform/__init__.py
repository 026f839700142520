"""The conformance suite's parts.

`surface` reads the installed SDK. A test declares its claims with `proves`. `claims` writes
docs/tinker-compatibility.md from both."""
