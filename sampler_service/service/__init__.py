"""The sampler's process and its gRPC face: everything that speaks protobuf.

`process` binds the port, makes the engine in a thread of its own and ends the process;
`engine_process` and `engine_server` are the two ends of an engine in another process; `servicer`
answers calls; `sample_stream` has the requests of one gateway, from their arrival to their replies;
`request_parser` checks a request and turns it into an `EngineRequest`; `responses` encodes results
and buffers tokens that are told as they are drawn. To add a field to a request: parse it in
`request_parser`, carry it in `EngineRequest`, compute it in the engine, encode it in `responses`.
"""
