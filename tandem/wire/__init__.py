"""The binary messages of the `tinker` SDK, described by ourselves in protos/tandem/wire."""
