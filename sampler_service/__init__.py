"""The sampler: one process that samples from weight versions.

An asyncio gRPC servicer hands requests to a scheduler, whose one thread steps vLLM's
synchronous engine and changes the weights in place. Token ids come in; token ids, their
logprobs and the name of the weight version go out.
"""
