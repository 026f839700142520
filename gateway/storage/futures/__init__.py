"""What became of accepted requests: `table` has the futures, by request_id, and the results that
nobody has fetched yet; `completion_feed` tells a client which of its samples have ended."""
