"""The OpenAI-compatible HTTP front end: requests in, a backend's outputs as JSON or server-sent events out."""
