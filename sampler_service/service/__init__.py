"""The sampler's process and its gRPC server: all code that uses protobuf.

- `process`: binds the port, makes the engine in its own thread, and ends the process.
- `engine_process` and `engine_server`: the two ends of the pipe to an engine in another process.
- `parser_process`: parses answers in a process of its own.
- `servicer`: answers calls. `sample_stream`: one gateway's open requests and ready replies.
- `request_parser`: turns a request into an `EngineRequest`.
- `responses`: encodes results, and buffers streamed tokens.

To add a field to a request, parse it in `request_parser`, carry it in `EngineRequest`, compute it
in the engine, and encode it in `responses`."""
