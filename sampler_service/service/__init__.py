"""The sampler's process and its gRPC server: all code that uses protobuf.

- `process`: binds the port, makes the engine in its own thread, and ends the process.
- `engine_process` and `engine_server`: the two ends of the pipe to an engine in another process.
- `servicer`: answers calls. `sample_stream`: the open requests and ready replies of one gateway.
- `request_parser`: turns a checked request into an `EngineRequest`.
- `responses`: encodes results, and buffers the tokens of streamed requests.

To add a field to a request, parse it in `request_parser`, carry it in `EngineRequest`, compute it
in the engine, and encode it in `responses`.
"""
