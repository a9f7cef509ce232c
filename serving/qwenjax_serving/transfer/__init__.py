"""KV pages from prefill to decode workers: staging buffers, and reads between them over NIXL or within a process."""
