"""The router: requests in, through prefill and decode workers, tokens out."""
