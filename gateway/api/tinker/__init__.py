"""The wire protocol of the `tinker` SDK, under /api/v1."""
