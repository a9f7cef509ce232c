"""KV pages from prefill to decode workers: registered staging buffers, and reads between them over NIXL."""
