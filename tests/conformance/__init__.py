"""Tests of every public method of the SDK. Their stack ends with this package."""
