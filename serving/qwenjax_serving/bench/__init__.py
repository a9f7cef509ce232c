"""`qwenjax bench serve`: a load on any OpenAI-compatible server, and what its clients see."""
