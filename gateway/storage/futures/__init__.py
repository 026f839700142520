"""Outcomes of accepted requests. `table` holds the futures by request_id and their unfetched
results. `completion_feed` reports finished samples to polling clients."""
