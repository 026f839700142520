"""What every route takes, answers and refuses: served as /openapi.json, printed as docs/api.md."""
